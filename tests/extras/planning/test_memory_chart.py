"""The chart of a memory plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ringspark.estimators import plan_memory
from ringspark.models import ModelSpec

DEEP = ModelSpec("mlp", {"in_features": 8, "hidden": [32] * 16, "out_features": 3})
BATCH = (((64, 8), "float32"), ((64,), "int64"))


def test_the_chart_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    plan_memory(DEEP, BATCH, rows=4096, budget="5m").save_chart(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_chart_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'ringspark\[examples\]'"):
        plan_memory(DEEP, BATCH).save_chart(str(tmp_path / "plan.png"))
