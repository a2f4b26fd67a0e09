"""Layout rules: allowed imports, packaged files, and text that no file may contain."""

import ast
import graphlib
import itertools
import re
import runpy
import statistics
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from ringspark.estimators.training.settings.setting import settings_of
from ringspark.estimators.training.settings.table import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
CORE = ("pipelines", "models", "estimators", "jobs")
ROOMS = (*CORE, "extras")
EXAMPLES = tuple(path.stem for path in (ROOT / "examples").rglob("*.py"))

# Folder -> forbidden imports anywhere below it, including lazy imports.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "pipelines": ("torch", "horovod", "ringspark.models", "ringspark.estimators", "ringspark.jobs"),
    "models": ("pyspark", "pyarrow", "ringspark.pipelines", "ringspark.estimators", "ringspark.jobs"),
    "estimators": ("ringspark.jobs",),
    "estimators/training": ("pyspark",),
    "estimators/collectives": ("pyspark",),
    "estimators/parallel": ("pyspark",),
    # Bare names can be imported only in a checkout.
    **{f"{room}/": (*ROOMS, *EXAMPLES) for room in ROOMS},
}

# Layers from bottom to top: a folder or file imports only from its own layer or below. The longest matching
# name counts.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("lazy_names", "pipelines", "models"),
    (
        "estimators/environment",
        "estimators/failures",
        "estimators/names",
        "estimators/user_code",
        "estimators/run_layout",
        "estimators/lazy_imports",
        "estimators/options",
        "estimators/techniques",
    ),
    ("estimators/collectives",),
    ("estimators/parallel",),
    ("estimators/training",),
    ("estimators/columns", "estimators/tracking", "estimators/memory"),
    ("estimators/stages", "estimators/inference"),
    ("estimators/launch", "estimators/run"),
    (
        "estimators/checked_fit",
        "estimators/prepared_fit",
        "estimators/held_out_rows",
        "estimators/initial_model",
        "estimators/torch_estimator",
        "estimators/torch_model",
        "estimators/trained_model",
    ),
    ("estimators",),  # the public names, imported on first use, and the old names of moved modules
    ("jobs",),
    # Registries in the core refer to extras only by import path, as strings.
    ("extras",),
    ("extras/planning", "extras/report"),
    ("extras/search", "extras/tuning"),
    ("extras/commands",),
)

# Written so that the patterns do not match this file, which is searched too.
ADDRESSES = {
    "a package registry": re.compile(
        r"pypi\.org/simple|files\.pythonhosted\.org|download\.pytorch\.org|https?://\S+/simple\b"
    ),
    "an option or variable that names a registry": re.compile(
        r"--(?:extra-)?index-url|--find[-]links|PIP_(?:EXTRA_)?INDEX_URL|PIP_FIND[_]LINKS"
    ),
    "a path of one machine": re.compile(
        r"(?<![\w.])/(?:work/(?:main|shared)|opt/(?:pypi|wheels)|root|home/\w+)\b"
    ),
}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in path.parts]


def package_of(path: Path) -> str:
    return ".".join(["ringspark", *path.relative_to(ROOT).parent.parts])


@cache
def imported_names(source: str, package: str) -> list[tuple[int, str]]:
    """Returns the line and absolute dotted name of every import in `source`, a module of `package`."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from ringspark import models` imports a module. `from torch import nn` needs only the first
            # part, but both names are harmless.
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append((node.lineno, node.args[0].value))
    return found


def violations(source: str, package: str, forbidden: tuple[str, ...]) -> list[str]:
    """Returns `line: name` for every import of a forbidden package or its contents."""
    return [
        f"{line}: {name}"
        for line, name in imported_names(source, package)
        for banned in forbidden
        if name == banned or name.startswith(f"{banned}.")
    ]


def run_python(code: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folder_imports_nothing_forbidden(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{violation}"
        for path in sources(folder)
        for violation in violations(path.read_text(), package_of(path), FORBIDDEN[folder])
    ]
    assert not found, f"{folder} must not import {', '.join(FORBIDDEN[folder])}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import os, torch.nn as nn",
        "from torch.utils import data",
        "def late():\n    import torch",
        "try:\n    from torch import nn\nexcept ImportError:\n    pass",
        "import importlib\nimportlib.import_module('torch.nn')",
        "from importlib import import_module\nimport_module('torch')",
        "from ringspark import models",
        "import ringspark.models.spec",
        "from .. import models",
        "from ..models import ModelSpec",
        "from ..models.spec import ModelSpec",
    ],
)
def test_forbidden_import_is_found(source: str) -> None:
    package = "ringspark.pipelines"
    assert violations(source, package, ("torch", "ringspark.models"))


def test_allowed_import_is_not_found() -> None:
    source = (
        "import torchmetrics\nfrom . import shuffle\nfrom .readers import base\nimport_module(a)\nx = 'torch'"
    )
    assert not violations(source, "ringspark.pipelines", ("torch", "ringspark.models"))


@pytest.mark.parametrize(
    ("packages", "absent"),
    [
        (
            "ringspark.pipelines.readers, ringspark.pipelines.writing.shards",
            {"torch", "pyspark", "petastorm", "pandas"},
        ),
        ("ringspark.models.spec, ringspark.models.transformer", {"pyspark", "pyarrow"}),
        # Training from shards works on a GPU machine without Spark, and starting workers must not import
        # modules that take a second.
        (
            "ringspark.estimators, ringspark.estimators.launch.local, ringspark.estimators.training.worker",
            {"pyspark", "torch.distributed.tensor", "torch._dynamo"},
        ),
        # A bare name would mean an import from the checkout's root, not from `ringspark`.
        ("ringspark.estimators.torch_estimator, ringspark.jobs", set(ROOMS)),
    ],
)
def test_importing_package_loads_nothing_forbidden(packages: str, absent: set[str], tmp_path: Path) -> None:
    code = f"import sys, {packages}; print(*sorted(sys.modules.keys() & {absent!r}))"
    assert run_python(code, tmp_path) == ""


def floor_of(path: str) -> int:
    """Returns the layer number of a file or folder, relative to the root."""
    matches = [
        (len(room), number)
        for number, floor in enumerate(FLOORS)
        for room in floor
        if path == room or path.startswith(f"{room}/")
    ]
    assert matches, f"{path} stands on no floor of FLOORS"
    return max(matches)[1]


def imports_of_rooms() -> Iterator[tuple[str, str]]:
    """Yields importing file and imported file or folder of every ringspark import, relative to the root."""
    for path in itertools.chain.from_iterable(sources(room) for room in ROOMS):
        for _, name in imported_names(path.read_text(), package_of(path)):
            if not name.startswith("ringspark."):
                continue
            target = ROOT.joinpath(*name.split(".")[1:])
            if not target.is_dir() and not target.with_suffix(".py").exists():
                target = target.parent  # the last part is a name inside the module
            yield (
                path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__"),
                target.relative_to(ROOT).as_posix(),
            )


# For type checkers only, the core's public names include names of extras.
PUBLIC_NAMES = ("estimators", "models", "pipelines")


def test_no_room_imports_a_higher_floor() -> None:
    climbing = sorted(
        f"{importer} imports {imported}"
        for importer, imported in set(imports_of_rooms())
        # `from ringspark.estimators import names` names the folder too.
        if imported not in CORE and importer not in PUBLIC_NAMES and floor_of(imported) > floor_of(importer)
    )
    assert climbing == []


def import_paths_of_extras() -> set[str]:
    """Returns the strings of the core that name a module or an object in extras."""
    return {
        node.value
        for path in itertools.chain.from_iterable(sources(room) for room in CORE)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"ringspark\.extras[\w.]*(:\w+)?", node.value)
    }


@pytest.mark.extras
def test_every_import_path_of_extras_leads_to_an_object() -> None:
    paths = import_paths_of_extras()
    assert len(paths) > 10
    for path in paths:
        module, _, name = path.partition(":")
        assert not name or hasattr(import_module(module), name), path


def assert_no_cycle(pairs: set[tuple[str, str]]) -> None:
    order: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for importer, imported in pairs:
        order.add(importer, imported)
    assert list(order.static_order())  # raises CycleError, which names the files or folders


def test_no_two_files_import_each_other_however_far_around() -> None:
    """The import graph of the files has no cycle."""
    pairs = {(importer, imported) for importer, imported in imports_of_rooms() if importer != imported}
    assert_no_cycle(pairs)


def folder_of(path: str) -> PurePosixPath:
    """Returns the folder of a file, or the folder itself."""
    return PurePosixPath(path) if (ROOT / path).is_dir() else PurePosixPath(path).parent


def test_no_two_folders_import_each_other_however_far_around() -> None:
    """Folders inside a top-level folder obey the layers too; a folder and its parent may share files."""
    pairs = set()
    for importer, imported in imports_of_rooms():
        above, below = folder_of(importer), folder_of(imported)
        apart = above not in (below, *below.parents) and below not in above.parents
        if importer not in PUBLIC_NAMES and apart:
            pairs.add((str(above), str(below)))
    assert_no_cycle(pairs)


def test_a_setting_is_a_field_of_one_section_and_most_are_spelled_in_few_files() -> None:
    """`python scripts/count_setting_files.py` prints the files."""
    places = runpy.run_path(str(ROOT / "scripts" / "count_setting_files.py"))["places"]()
    assert sorted(name for section in SECTIONS for name in settings_of(section)) == sorted(places)
    # All settings of the training's folder count as one file.
    in_core = [sum(not name.startswith("extras/") for name in found) for found in places.values()]
    assert statistics.median(in_core) <= 3
    assert max(in_core) <= 18


# The only file that removes folders, and the file with the call that it makes.
REMOVERS = {"pipelines/folder_removal.py", "pipelines/storage.py"}
_REMOVALS = {"rmtree", "removedirs", "delete_dir", "delete_dir_contents", "rm"}


def removals(source: str) -> list[str]:
    """Returns `line: call` for every call that may remove a folder and its content."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        recursive = name in ("remove", "delete") and keywords.get("recursive", "False") != "False"
        overwrites = ast.unparse(node.func).endswith("write.mode") and "overwrite" in ast.unparse(node)
        # As a callback, too: `atexit.register(shutil.rmtree, folder)`.
        passed = [a for a in node.args if isinstance(a, ast.Attribute) and a.attr in {"rmtree", "removedirs"}]
        if name in _REMOVALS or recursive or overwrites or passed:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_one_function_removes_folders() -> None:
    """Others call `remove_folder`, which removes only what this package wrote."""
    found = [
        f"{path.relative_to(ROOT)}:{call}"
        for path in itertools.chain.from_iterable(sources(room) for room in (*ROOMS, "examples"))
        if path.relative_to(ROOT).as_posix() not in REMOVERS
        for call in removals(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "shutil.rmtree(folder)",
        "rmtree(folder, ignore_errors=True)",
        "atexit.register(shutil.rmtree, folder)",
        "os.removedirs(folder)",
        "fs.rm(path, recursive=True)",
        "fs.delete(path, recursive=True)",
        "storage.remove(uri, recursive=is_folder)",
        "frame.write.mode('overwrite').parquet(uri)",
    ],
)
def test_removal_of_a_folder_is_found(source: str) -> None:
    assert removals(source)
    assert not removals("storage.remove(uri)\nos.rmdir(p)\nnames.remove('a')\nfs.delete(p)\ndel x")


def test_no_module_is_named_after_a_dependency() -> None:
    project = pyproject()["project"]
    listed = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[^\w-]", requirement)[0].replace("-", "_").lower() for requirement in listed}
    taken = names | {"sklearn", "mlflow", "optuna"}
    clashes = [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in sources(room)
        if {path.stem, path.parent.name} & taken
    ]
    assert {"torch", "pyspark"} <= taken
    assert not clashes


def packages_on_disk() -> set[str]:
    return {"ringspark"} | {package_of(path) for room in ROOMS for path in sources(room)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Builds the wheel and the zip of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(ROOT / "scripts" / "build_package.py"), "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    (archive,) = folder.glob("*.zip")
    return wheel, archive


@pytest.mark.extras
def test_wheel_holds_every_module_under_ringspark(built: tuple[Path, Path]) -> None:
    expected = {f"ringspark/{path.relative_to(ROOT).as_posix()}" for room in ROOMS for path in sources(room)}
    expected |= {path.relative_to(ROOT).as_posix() for path in sources("ringspark")}
    held = set(zipfile.ZipFile(built[0]).namelist())
    assert {name for name in held if name.endswith(".py")} == expected
    assert {name.split("/")[0] for name in held} == {"ringspark", f"{built[1].stem}.dist-info"}


@pytest.mark.extras
def test_zip_holds_what_the_wheel_holds(built: tuple[Path, Path]) -> None:
    wheel, archive = (zipfile.ZipFile(path) for path in built)
    files = [name for name in archive.namelist() if not name.endswith("/")]
    assert sorted(files) == sorted(wheel.namelist())
    assert all(archive.read(name) == wheel.read(name) for name in files)


@pytest.mark.telling
@pytest.mark.extras
def test_every_package_is_imported_from_the_zip(built: tuple[Path, Path], tmp_path: Path) -> None:
    packages = sorted(packages_on_disk())
    code = f"import importlib; [print(importlib.import_module(name).__file__) for name in {packages}]"
    files = run_python(code, tmp_path, PYTHONPATH=str(built[1])).splitlines()
    assert files == [f"{built[1]}/{name.replace('.', '/')}/__init__.py" for name in packages]


def addresses(text: str) -> list[str]:
    """Returns `line: reason (match)` for every registry address or machine path in `text`."""
    return [
        f"{number}: {what} ({found[0]})"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in ADDRESSES.items()
        if (found := pattern.search(line))
    ]


def test_no_file_names_a_registry_or_this_machine() -> None:
    # Untracked files count too, so no commit can add a match.
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    found = []
    for name in listed:
        path = ROOT / name
        if path.is_file():
            found += [f"{name}:{match}" for match in addresses(path.read_text(errors="replace"))]
    assert listed
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install --index" + "-url x",
        "--extra-index" + "-url=x",
        "PIP_INDEX" + "_URL=x",
        "--find" + "-links wheels",
        "https://mirror.example" + "/simple/torch",
        "https://files.python" + "hosted.org/packages/x",
        "cd /work" + "/main",
        "see /work" + "/shared/facts.md",
        "/" + "root/.cache",
        "/home" + "/someone/data",
    ],
)
def test_address_is_found(line: str) -> None:
    assert addresses(f"first\n{line}\n")[0].startswith("2: ")


def test_harmless_lines_are_not_found() -> None:
    assert (
        addresses("network/main\nfile:///tmp/shards\ns3://bucket/root/run\nhttps://pypi.org/project/x/") == []
    )
