"""Writes the stubs from which editors and type checkers learn the Params of the stages.

python scripts/show_stubs.py

A stub has the module's classes and functions without bodies. Classes decorated with `with_settings` list
their Params, getters and setters, and the first base class of a public stage has the stage's constructor.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from ringspark.estimators.options.checked import parts_of
from ringspark.estimators.options.declare import Options
from ringspark.estimators.training.settings.setting import Setting

ROOT = Path(__file__).resolve().parent.parent
# Module -> class -> the public stage that inherits its constructor from this class.
STUBS: dict[str, dict[str, str]] = {
    "estimators.stages.params": {
        "ClassifierKeywords": "ringspark.estimators:TorchClassifier",
        "RegressorKeywords": "ringspark.estimators:TorchRegressor",
        "EstimatorKeywords": "ringspark.estimators:TorchEstimator",
    },
    "extras.pretraining.autoencoder_params": {"AutoencoderParams": "ringspark.estimators:TorchAutoencoder"},
    "extras.windows.window_params": {"WindowParams": "ringspark.estimators:SequenceWindows"},
    "extras.search.search_params": {
        "OptunaParams": "ringspark.extras.search:OptunaSearch",
        "PopulationParams": "ringspark.extras.search:PopulationSearch",
    },
}
_IMPORTS = """\
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pyspark.ml.param import Param

from ringspark.estimators.stages.declared import Getter, Setter
from ringspark.estimators.options.finetuning import LoRA, Pretrained
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.privacy import Privacy
from ringspark.estimators.options.scaling import ScaleLearningRate
from ringspark.estimators.options.sync import Sync
"""


def stub(module: str) -> str:
    """Returns the text of a module's stub."""
    path, made = ROOT / f"{module.replace('.', '/')}.py", import_module(f"ringspark.{module}")
    nodes = ast.parse(path.read_text()).body
    lines: list[str] = []
    for node in nodes:
        if isinstance(node, ast.ClassDef) and "Section" not in map(ast.unparse, node.bases):
            lines += ["", *_class(node, getattr(made, node.name), STUBS[module].get(node.name))]
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("TypeVar("):
            lines += ["", ast.unparse(node)]
        elif isinstance(node, ast.FunctionDef) and node.name[0] != "_":
            lines += ["", _function(node)]
    # Our getters override untyped getters of Spark's mixins.
    head = [
        f"# Written by scripts/show_stubs.py from {path.name}.",
        '# mypy: disable-error-code="assignment, override"',
    ]
    head += _imports([*ast.parse(_IMPORTS).body, *nodes], "\n".join(lines))
    return "\n".join(head + lines) + "\n"


def _imports(nodes: list[ast.stmt], text: str) -> list[str]:
    """Returns the imports of the names in `text`."""
    words = set(re.findall(r"\w+", text))
    found: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names = {each.name for each in node.names}
            found.setdefault(node.module or "", set()).update(names & words)
    return [f"from {module} import {', '.join(sorted(found[module]))}" for module in found if found[module]]


def _class(node: ast.ClassDef, made: Any, stage: str | None) -> Iterator[str]:
    decorators = list(map(ast.unparse, node.decorator_list))
    yield from (f"@{text}" for text in decorators if not text.startswith("with_settings"))
    yield f"class {node.name}({', '.join(map(ast.unparse, node.bases))}):".replace("()", "")
    body = [f"    {_function(each)}" for each in node.body if isinstance(each, ast.FunctionDef)]
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    body += [f"    {ast.unparse(each.target)}: {ast.unparse(each.annotation)}" for each in fields]
    if stage is not None:
        body += _constructor(stage)
    if any(text.startswith("with_settings") for text in decorators):
        own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        for setting in made.SETTINGS.values():
            if setting.name in vars(made):
                body += _members(setting, vars(made).keys() - own)
    yield from body or ["    ..."]


def _function(node: ast.FunctionDef) -> str:
    return (
        f"def {node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns or ast.Constant(None))}: ..."
    )


def _members(setting: Setting, known: set[str]) -> Iterator[str]:
    suffix = setting.name[0].upper() + setting.name[1:]
    parts = [f"{setting.name}: Param[Any]"]
    if f"get{suffix}" in known:
        parts.append(f"get{suffix}: Getter[{_type(setting, False)}]")
    if f"set{suffix}" in known:
        parts.append(f"set{suffix}: Setter[{_type(setting, True)}]")
    yield f"    {'; '.join(parts)}"


def _constructor(path: str) -> Iterator[str]:
    module, _, name = path.partition(":")
    settings = getattr(import_module(module), name).SETTINGS.values()
    words = ",\n".join(f"{each.name}: {_type(each, True)} = ..." for each in settings).replace(" ", "\0")
    yield "    def __init__(self, *,"
    for line in textwrap.wrap(words, 120, break_long_words=False, break_on_hyphens=False):
        yield f"        {line}".replace("\0", " ")
    yield "    ) -> None: ..."


def _type(setting: Setting, is_given: bool) -> str:
    """Returns the type of a setting's value as text: what a user may give, or what the getter returns."""
    if is_given and setting.convert is not None and setting.kinds != [str]:
        return "Any"
    words = dict.fromkeys(word for kind in setting.kinds for word in _words(kind, is_given))
    may_be_none = is_given or NoneType in get_args(setting.hint)
    return "Any" if "Any" in words else " | ".join([*words, *(["None"] if may_be_none else [])])


def _words(kind: Any, is_given: bool) -> list[str]:
    args = get_args(kind)
    if get_origin(kind) is Literal:
        return [f"Literal[{', '.join(map(repr, args))}]"]
    if get_origin(kind) is tuple:
        inner = _words(parts_of(args[0])[0].kind, is_given)[0]
        names = ["str"] if is_given and inner == "str" else []
        return [*names, f"{'Sequence' if is_given else 'list'}[{inner}]"]
    if isinstance(kind, type) and issubclass(kind, Options):
        return [kind.__name__, *(["str", "int", "Mapping[str, Any]"] if is_given else [])]
    return [getattr(kind, "__name__", "Any") if get_origin(kind) is None else "dict[str, Any]"]


def main() -> None:
    for module in STUBS:
        (ROOT / f"{module.replace('.', '/')}.pyi").write_text(stub(module))


if __name__ == "__main__":
    main()
