"""Adds a setting in four lines, and checks the Param, the help and the errors that result."""

import json
import os
import shutil
from pathlib import Path

from programs import run_program

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Path("estimators", "training", "settings")
# File -> (text after the inserted lines, inserted lines).
CHANGES = {
    SETTINGS / "training.py": (
        '    keep: Keep = setting("last"',
        "    stochastic_depth: Annotated[float, Ge(0)] | None = setting(\n"
        '        None, "share of the blocks that a step skips; unset: none", recorded_on_resume=True\n'
        "    )\n",
    ),
    SETTINGS / "capabilities.py": (
        '    SettingValue("certify", ',
        '    SettingValue("stochasticDepth", lambda c: bool(c.stochastic_depth), '
        "needs=(WHOLE_NETWORK, EAGER_CODE)),\n",
    ),
}
# Prints the getter, the help, the errors and the record of the new setting.
SCRIPT = """
import json, sys
from ringspark.estimators import Mesh, TorchClassifier
from ringspark.estimators.run.identity import _RECORDED
from ringspark.estimators.stages.to_config import config_of
from ringspark.models import ModelSpec
def result_of(**settings):
    try:
        spec = ModelSpec("mlp", {"in_features": 1, "hidden": [2], "out_features": 2})
        return config_of(TorchClassifier(model=spec, **settings), "classification", ["y"])[0].stochastic_depth
    except (TypeError, ValueError) as error:
        return str(error)
stage = TorchClassifier(stochasticDepth=0.25)
print(json.dumps({
    "getter": stage.setStochasticDepth(0.5).getStochasticDepth(),
    "explained": stage.explainParam("stochasticDepth"),
    "help": "stochasticDepth: share of the blocks that a step skips; unset: none" in TorchClassifier.__doc__,
    "config": result_of(stochasticDepth=0.5),
    "range": result_of(stochasticDepth=-1),
    "misspelled": result_of(stochastcDepth=0.5),
    "compiled": result_of(stochasticDepth=0.5, compile=True),
    "cut": result_of(stochasticDepth=0.5, parallelism=Mesh(tensor=2), numWorkers=2),
    "recorded": "stochasticDepth" in _RECORDED,
}))
"""


def _copy(folder: Path) -> int:
    """Copies the packages, inserts the technique's lines, and returns their number."""
    shutil.copytree(ROOT / "ringspark", folder / "ringspark", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pipelines", "models", "extras", "jobs"):
        (folder / "ringspark" / name).symlink_to(ROOT / name)
    packages = folder / "ringspark"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "estimators", packages / "estimators", ignore=ignored)
    lines = 0
    for path, (before, added) in CHANGES.items():
        text = (packages / path).read_text()
        assert text.count(before) == 1
        (packages / path).write_text(text.replace(before, added + before))
        lines += added.count("\n")
    return lines


def test_a_new_setting_takes_four_lines_in_two_files(tmp_path):
    assert (_copy(tmp_path), len(CHANGES)) == (4, 2)
    done = run_program(SCRIPT, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "getter": 0.5,
        "explained": "stochasticDepth: share of the blocks that a step skips; unset: none (current: 0.5)",
        "help": True,
        "config": 0.5,
        "range": "stochasticDepth must not be negative, got -1",
        "misspelled": "TorchClassifier has no Param 'stochastcDepth'; did you mean 'stochasticDepth'?",
        "compiled": "stochasticDepth needs eager execution, but compile (True) fuses operations; leave "
        "compile unset, or leave stochasticDepth unset",
        "cut": "stochasticDepth needs the whole network and whole rows on every worker, but "
        "parallelism=Mesh(tensor=2) gives each worker only a shard of the network or of each row; give all "
        "workers to 'data', or leave stochasticDepth unset",
        "recorded": True,
    }
