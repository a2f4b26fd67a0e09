"""Modules that moved to extras keep their old names: imports work, and saved stages load."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import Pipeline

from ringspark.estimators import SequenceWindows
from ringspark.extras.search.saved_search import load_part

OLD_NAMES = {
    "ringspark.estimators.search": ("OptunaSearch", "PopulationSearch", "SearchModel", "Uniform"),
    "ringspark.estimators.search.optuna_search": ("OptunaSearch",),
    "ringspark.estimators.search.population_search": ("PopulationSearch",),
    "ringspark.estimators.search.search_model": ("SearchModel",),
    "ringspark.estimators.sequence_windows": ("SequenceWindows",),
    "ringspark.estimators.tuning": ("time_folds", "lr_range_test", "advise_batch_size"),
    "ringspark.estimators.report": ("report",),
    "ringspark.estimators.scaling": ("plan_scaling", "plan_parallelism", "Link"),
}


@pytest.mark.parametrize("module", OLD_NAMES)
def test_an_old_name_is_the_same_object(module: str) -> None:
    old = import_module(module)
    for name in OLD_NAMES[module]:
        assert getattr(old, name).__module__.startswith("ringspark.extras.")
    with pytest.raises(AttributeError, match="nothing"):
        _ = old.nothing


def _named_as_before(path: Path) -> None:
    """Writes the class names from before the move into saved stages."""
    for metadata in path.rglob("metadata/part-*"):
        text = metadata.read_text()
        metadata.write_text(
            text.replace("ringspark.extras.windows.sequence_windows", "ringspark.estimators.sequence_windows")
        )
        (metadata.parent / f".{metadata.name}.crc").unlink(missing_ok=True)


@pytest.mark.spark
def test_stages_saved_under_an_old_name_load(spark: Any, tmp_path: Path) -> None:
    stage = SequenceWindows(keyCols="key", timeCol="time", valueCols="value", steps=3)
    Pipeline(stages=[stage]).save(str(tmp_path / "pipeline"))
    stage.save(str(tmp_path / "best-model"))
    _named_as_before(tmp_path)
    assert (
        "estimators.sequence_windows"
        in next((tmp_path / "best-model" / "metadata").glob("part-*")).read_text()
    )
    (loaded,) = Pipeline.load(str(tmp_path / "pipeline")).getStages()
    for found in (loaded, load_part(str(tmp_path), "best-model")):
        assert type(found) is SequenceWindows
        assert found.getSteps() == 3
