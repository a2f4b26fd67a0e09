"""Every notebook runs, cell by cell, as Databricks would run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.py"))


def cells(source: str) -> list[str]:
    """The Python cells of a notebook in Databricks source format."""
    header, _, body = source.partition("\n")
    assert header == "# Databricks notebook source"
    parts = body.split("\n# COMMAND ----------\n")
    return [part for part in parts if not part.strip().startswith("# MAGIC")]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, spark: Any, capsys: Any) -> None:
    names: dict[str, Any] = {"spark": spark, "__name__": "__main__"}
    for number, cell in enumerate(cells(path.read_text())):
        exec(compile(cell, f"{path.name}, cell {number + 1}", "exec"), names)
    assert names["auc"] > 0.6
    assert "ROC AUC on the months after training: 0." in capsys.readouterr().out


def test_the_notebooks_are_found() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["01_quickstart"]
