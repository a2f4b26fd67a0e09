"""No password that a user put into a URI reaches a message or a file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from ringspark.estimators import TorchRegressor
from ringspark.models import ModelSpec

SPEC = ModelSpec("linear", {"in_features": 2, "out_features": 1})
URI = "s3://KEY:hunter2@bucket/runs"


def files_with_it(folder: Path) -> list[str]:
    return [str(p) for p in folder.rglob("*") if p.is_file() and b"hunter2" in p.read_bytes()]


@pytest.mark.parametrize("name", ["storageUri", "runUri"])
def test_a_param_refuses_a_uri_with_a_password(name: str, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    setter = f"set{name[0].upper()}{name[1:]}"
    for give in (
        lambda: TorchRegressor(model=SPEC, **{name: URI}),
        lambda: getattr(TorchRegressor(model=SPEC), setter)(URI),
    ):
        with pytest.raises(ValueError, match="must not hold a password or token") as caught:
            give()
        assert "hunter2" not in str(caught.value)
    assert "hunter2" not in caplog.text


def test_a_copy_and_a_saved_stage_hold_no_password(tmp_path: Path) -> None:
    estimator = TorchRegressor(model=SPEC, featuresCol="x", labelCol="y", storageUri="s3://bucket/runs")
    with pytest.raises(ValueError, match="must not hold a password or token"):
        estimator.copy({estimator.storageUri: URI})
    with pytest.raises(ValueError, match="must not hold a password or token") as caught:
        estimator.save(URI)
    assert "hunter2" not in str(caught.value)
    estimator.save(str(tmp_path / "stage"))
    assert files_with_it(tmp_path) == []
