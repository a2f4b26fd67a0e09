"""Starts Python processes that cannot import ringspark and pyspark."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Served:
    """A fitted stage, rows as a client sends them, and the predictions of `transform` for these rows."""

    stage: Any
    folder: Path
    rows: list[dict[str, Any]]
    wanted: list[dict[str, Any]]


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Asserts that the predictions of all rows are equal but for rounding."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            expected = value if value is None or isinstance(value, str) else pytest.approx(value, abs=1e-5)
            assert one[name] == expected, name


_REFUSE = """
import sys

class Refuse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"refused {{name}}", name=name)

sys.meta_path.insert(0, Refuse)
"""

_PREDICT = """
import json, mlflow.pyfunc, pandas
model = mlflow.pyfunc.load_model({folder!r})
rows = pandas.DataFrame(json.load(open({rows!r})))
print(model.predict(rows).to_json(orient="records", double_precision=15))
"""


def predict_without(folder: Path, rows: list[dict[str, Any]], *others: str) -> list[dict[str, Any]]:
    """Predicts rows with an MLflow model in a process without ringspark, pyspark and `others`."""
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(rows))
    code = _REFUSE.format(refused={"ringspark", "pyspark", *others})
    code += _PREDICT.format(folder=str(folder), rows=str(file))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
