"""Whole fits with a teacher: what the network imitates, what the history shows, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity import assert_equal_weights

from ringspark.estimators import TorchClassifier, TorchEstimator, TorchRegressor
from ringspark.models import ModelSpec
from ringspark.pipelines import write_shards

pytestmark = pytest.mark.spark


def _network(width: int = 3) -> ModelSpec:
    return ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": width})


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    frame = spark.range(0, 96, 1, 2).selectExpr(
        "array(sin(id), cos(id)) as features", "cast(id % 3 as int) as number", "sin(2 * id) as value"
    )
    return frame.selectExpr("*", "concat('class ', number) as name")


def _estimator(kind: Any, root: Path, label: str, **changes: Any) -> Any:
    own = {"model": _network(1 if label == "value" else 3), "batchSize": 32, "labelCol": label}
    return kind(**own, storageUri=str(root), showProgress=False, **changes)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distillation")


@pytest.fixture(scope="module")
def teacher(rows: Any, root: Path) -> Any:
    return _estimator(TorchClassifier, root, "name", epochs=2, learningRate=0.05).fit(rows)


def test_a_network_that_equals_its_teacher_stays_as_it_is(rows: Any, teacher: Any, root: Path) -> None:
    start = {"initialModel": teacher, "optimizer": "sgd", "learningRate": 1.0, "validationFraction": 0.25}
    student = _estimator(TorchClassifier, root, "name", teacher=teacher, alpha=1.0, **start).fit(rows)
    assert_equal_weights(student, teacher, 1e-6)
    record = student.summary.epochs[0]
    assert record.train_loss == pytest.approx(0.0, abs=1e-6)
    # The held-out loss is the label's alone.
    assert record.validation_loss > 0.5
    assert student.labels == teacher.labels == ["class 0", "class 1", "class 2"]
    assert [c for c in student.transform(rows).columns if c.startswith("__ringspark")] == []


def test_alpha_0_trains_as_without_a_teacher(rows: Any, teacher: Any, root: Path) -> None:
    with pytest.warns(UserWarning, match="alpha has no effect"):
        alone = _estimator(TorchClassifier, root, "name", alpha=0.25).fit(rows)
    stages = (_estimator(TorchClassifier, root, "name", teacher=teacher, alpha=alpha) for alpha in (0.0, 0.5))
    ignoring, following = (stage.fit(rows) for stage in stages)
    assert_equal_weights(alone, ignoring)
    with pytest.raises(AssertionError):
        assert_equal_weights(alone, following)


def test_teachers_of_one_fit_multiple_keep_apart(rows: Any, teacher: Any, root: Path) -> None:
    other = _estimator(TorchClassifier, root, "name", epochs=1, seed=5).fit(rows)
    estimator = _estimator(TorchClassifier, root, "name", alpha=1.0, optimizer="sgd", learningRate=1.0)
    maps = [{estimator.teacher: model, estimator.initialModel: model} for model in (teacher, other)]
    found = dict(estimator.fitMultiple(rows, maps))
    assert [found[i].summary.epochs[0].train_loss for i in range(2)] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_a_saved_estimator_has_the_path_of_its_teacher(rows: Any, teacher: Any, root: Path) -> None:
    path = str(root / "teacher")
    teacher.write().overwrite().save(path)
    estimator = _estimator(TorchClassifier, root, "name", teacher=path, temperature=4.0, alpha=0.25)
    estimator.save(str(root / "student"))
    loaded = TorchClassifier.load(str(root / "student"))
    assert (loaded.getTeacher(), loaded.getTemperature(), loaded.getAlpha()) == (path, 4.0, 0.25)
    model = loaded.fit(rows)
    model.save(str(root / "fitted"))
    assert model.hasSummary
    with pytest.raises(ValueError, match=r"teacher of .* is a model in memory; save that model"):
        estimator.setTeacher(teacher).save(str(root / "other"))


def test_a_regression_imitates_values(rows: Any, root: Path) -> None:
    first = _estimator(TorchRegressor, root, "value", epochs=1, learningRate=0.05).fit(rows)
    start = {"initialModel": first, "optimizer": "sgd", "learningRate": 1.0}
    student = _estimator(TorchRegressor, root, "value", teacher=first, alpha=1.0, **start).fit(rows)
    assert student.summary.epochs[0].train_loss == pytest.approx(0.0, abs=1e-9)


@pytest.mark.slow
def test_a_pack_for_a_table_teaches_a_smaller_one(rows: Any, root: Path) -> None:
    table = rows.select("features", "name")
    shared = {"labelCol": "name", "epochs": 2, "numWorkers": 2, "storageUri": str(root)}
    teacher = TorchClassifier(**shared).fit(table)
    spec = ModelSpec("tabpack", {"rates": [1.0], "dropouts": [0.1], "width": 16})
    student = TorchClassifier(**shared, model=spec, teacher=teacher, alpha=0.9).fit(table)
    assert student.labels == teacher.labels
    assert student.getModel().kwargs["cardinalities"] == teacher.getModel().kwargs["cardinalities"]
    assert student.transform(table).count() == 96


def test_other_teachers_are_refused(rows: Any, teacher: Any, root: Path) -> None:
    def with_teacher(label: str, kind: Any = TorchClassifier) -> Any:
        return _estimator(kind, root, label, teacher=teacher)

    others = rows.selectExpr("features", "if(number = 0, 'other', name) as name")
    several = _estimator(TorchEstimator, root, "number", loss="cross_entropy").fit(rows)
    pair = TorchEstimator(model=_network(), labelCols=["value", "number"], teacher=several)
    shards = write_shards(rows.select("features", "number"), str(root / "shards")).uri
    refused: dict[str, Callable[[], Any]] = {
        "of TorchRegressor must be a TorchReg": lambda: with_teacher("value", TorchRegressor).fit(rows),
        "classes of numbers, but teacher was fitted on strings": lambda: with_teacher("number").fit(rows),
        "has 3 outputs per row, but the network has 4; fit": (
            lambda: with_teacher("name").setModel(_network(4)).fit(rows)
        ),
        "rows with strings that are no class of teacher; fit": lambda: with_teacher("name").fit(others),
        "teacher works with one label, got ": lambda: pair.fit(rows),
        "because shards lack its outputs; call fit": lambda: with_teacher("number").fitOnShards(shards),
    }
    for message, fit in refused.items():
        with pytest.raises(ValueError, match=message):
            fit()
