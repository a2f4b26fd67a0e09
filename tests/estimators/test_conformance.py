"""The contract of a Spark ML stage for every public stage; tests that only read a model share `fitted`."""

import json
import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import Estimator, Pipeline, PipelineModel, Transformer
from pyspark.ml.evaluation import Evaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import (
    CrossValidator,
    CrossValidatorModel,
    ParamGridBuilder,
    TrainValidationSplit,
    TrainValidationSplitModel,
)
from pyspark.sql import functions as F
from spark_tables import values_of

import ringspark.estimators

pytestmark = [pytest.mark.spark, pytest.mark.modes]

# A fitted model's network cannot change.
FIXED_IN_MODELS = {"model"}


def values(stage: Any) -> dict[str, Any]:
    """Returns the value of every Param that has one, by name; for a stage its uid and its own values."""
    return {
        param.name: (value.uid, values(value)) if isinstance(value, Estimator) else value
        for param, value in stage.extractParamMap().items()
    }


def set_by_user(stage: Any) -> set[str]:
    return {param.name for param in stage.params if stage.isSet(param)}


def accessor(verb: str, name: str) -> str:
    return f"{verb}{name[0].upper()}{name[1:]}"


def predictions(model: Any, frame: Any) -> list[float]:
    return values_of(model.transform(frame))


@pytest.mark.extras  # the public names include stages from extras
def test_every_public_stage_is_listed(listed):
    extras = import_module("ringspark.extras")
    names = [found.name for found in pkgutil.iter_modules(extras.__path__, "ringspark.extras.")]
    packages = [ringspark.estimators, *map(import_module, names)]
    public = [getattr(package, name) for package in packages for name in getattr(package, "__all__", ())]
    stages = {
        kind
        for kind in public
        if isinstance(kind, type) and issubclass(kind, Estimator | Transformer | Evaluator)
    }
    assert stages == {kind for case in listed for kind in (case.stage, case.model)} - {None}


@pytest.fixture
def kinds(any_case):
    """The classes of a case that have Params: a SearchModel has none."""
    return [kind for kind in (any_case.stage, any_case.model) if kind is not None and kind().params]


def test_every_param_is_documented_and_has_getter_and_setter(any_case, kinds):
    for kind in kinds:
        stage, fixed = kind(), FIXED_IN_MODELS if kind is any_case.model else set()
        explained = stage.explainParams()
        for param in stage.params:
            assert param.doc.strip()
            assert f"{param.name}: {param.doc}" in explained
            assert callable(getattr(stage, accessor("get", param.name), None)), param.name
            setter = getattr(stage, accessor("set", param.name), None)
            assert callable(setter) or param.name in fixed, param.name


def test_a_getter_gives_what_its_setter_took(kinds):
    for stage in (kind() for kind in kinds):
        for name, value in values(stage).items():
            if hasattr(stage, accessor("set", name)):
                assert getattr(stage, accessor("set", name))(value) is stage
                assert getattr(stage, accessor("get", name))() == value, name


def test_a_value_of_a_wrong_type_is_refused_by_name(kinds):
    for stage in (kind() for kind in kinds):
        for param in stage.params:
            before = values(stage)
            # Spark's `_set` puts the Param's name before the converter's message.
            with pytest.raises((TypeError, ValueError), match=param.name):
                stage._set(**{param.name: object()})
            assert values(stage) == before


def test_defaults_are_there_and_stay_when_others_are_set(any_case, kinds):
    name = any_case.text_param
    for kind in kinds:
        defaults = values(kind())
        if name == "predictionCol":
            assert {"featuresCol", "predictionCol"} <= set(defaults)
        assert not set_by_user(kind())
        changed = kind(**{name: "guess"})
        assert values(changed) == defaults | {name: "guess"}
        assert set_by_user(changed) == {name}
        assert values(kind()) == defaults, "instances must share no values"


def test_an_unknown_keyword_names_the_nearest_param(any_case, kinds):
    name = any_case.text_param
    for kind in kinds:
        with pytest.raises(TypeError, match=f"{kind.__name__} .*'{name[:-1]}'.*did you mean '{name}'"):
            kind(**{name[:-1]: "guess"})
    with pytest.raises(TypeError, match=f"did you mean '{name}'"):
        any_case.stage().setParams(**{name[:-1]: "guess"})


def test_a_stages_copy_leaves_the_original(any_case, stage_storage):
    stage, name = any_case.make(stage_storage), any_case.text_param
    before = values(stage)
    copied = stage.copy({stage.getParam(name): "guess"})
    assert type(copied) is type(stage)
    assert copied.uid == stage.uid
    assert values(copied) == before | {name: "guess"}
    getattr(copied, accessor("set", name))("other")
    assert values(stage) == before


def test_a_model_belongs_to_its_estimator(case, estimator, fitted):
    assert type(fitted) is case.model
    assert fitted.uid == estimator.uid
    assert all(param.parent == fitted.uid for param in fitted.params)
    for name, value in values(fitted).items():
        assert estimator.getOrDefault(name) == value
    for name in set_by_user(fitted):
        assert estimator.isSet(name), f"{name}: a default must stay a default"


def test_fit_takes_a_param_map_for_one_fit(frame, estimator):
    before = values(estimator)
    model = estimator.fit(frame, {estimator.epochs: 1, estimator.predictionCol: "guess"})
    assert len(model.summary.epochs) == 1
    assert "guess" in model.transform(frame).columns
    assert values(estimator) == before


def test_fit_takes_a_list_of_param_maps(case, frame, estimator):
    """Spark's `fit` of a list numbers the models as `fitMultiple` does."""
    models = estimator.fit(frame, [{estimator.epochs: 2}, {estimator.epochs: 1}])
    assert [type(model) for model in models] == [case.model] * 2
    assert [len(model.summary.epochs) for model in models] == [2, 1]
    assert models[0].summary.run_uri != models[1].summary.run_uri
    # All maps are checked before the first fit.
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        estimator.fitMultiple(frame, [{estimator.epochs: 1}, {estimator.epochs: 0}])


def test_fit_on_no_rows_is_one_sentence(case, frame, stage_storage):
    with pytest.raises(ValueError, match=r"row") as failure:
        case.make(stage_storage).fit(frame.where("id < 0"))
    assert len(str(failure.value).splitlines()) == 1


def test_the_summary_tells_what_the_fit_did(fitted):
    summary = fitted.summary
    assert fitted.hasSummary
    assert [epoch.epoch for epoch in summary.epochs] == [1, 2]
    assert summary.rows == 2 * 96
    assert summary.steps == 2 * 3
    assert summary.seconds > 0
    assert Path(summary.run_uri.removeprefix("file://")).is_dir()
    assert list(summary.history["epoch"]) == [1, 2]
    assert summary.precision_difference is None, "predictions in fp32 are not compared"


def test_other_columns_pass_through_untouched(fitted, frame, scored):
    result, width = fitted.transform(frame), len(frame.columns)
    assert result.columns[:width] == frame.columns
    types = [[field.dataType for field in table.schema][:width] for table in (result, frame)]
    assert types[0] == types[1]
    assert [row[:width] for row in scored] == [tuple(row) for row in frame.orderBy("id").collect()]


def test_transform_schema_is_what_transform_gives(transformer, frame):
    models = [transformer]
    if transformer.hasParam("predictionCol"):
        models.append(transformer.copy({transformer.predictionCol: "guess"}))
    for model in models:
        assert model.transformSchema(frame.schema) == model.transform(frame).schema


def test_transform_evaluates_nothing(transformer, frame):
    broken = frame
    for name in ("a", "features"):
        broken = broken.withColumn(name, F.when(F.expr("raise_error('evaluated') is null"), F.col(name)))
    result = transformer.transform(broken)
    assert len(result.columns) > len(frame.columns)
    with pytest.raises(Exception, match="evaluated"):
        result.collect()


def test_no_rows_give_no_rows(transformer, frame):
    result = transformer.transform(frame.where("id < 0"))
    assert result.collect() == []
    assert result.schema == transformer.transform(frame).schema


def test_a_models_copy_leaves_the_original(fitted, frame, scored):
    copied = fitted.copy({fitted.predictionCol: "guess"})
    assert type(copied) is type(fitted)
    assert copied.uid == fitted.uid
    assert copied.summary == fitted.summary
    assert fitted.getPredictionCol() == "prediction"
    renamed = copied.transform(frame)
    assert "prediction" not in renamed.columns
    assert [row.guess for row in renamed.orderBy("id").collect()] == [row.prediction for row in scored]


def test_a_stage_survives_save_and_load(any_case, stage_storage, tmp_path, spark):
    stage = any_case.make(stage_storage)
    path = str(tmp_path / "stage")
    stage.save(path)
    loaded = any_case.stage.load(path)
    assert type(loaded) is type(stage)
    assert loaded.uid == stage.uid
    assert values(loaded) == values(stage)
    assert set_by_user(loaded) == set_by_user(stage), "a default must stay a default"


def test_a_model_survives_save_and_load(fitted, frame, scored, tmp_path):
    path = str(tmp_path / "model")
    fitted.save(path)
    assert not list(tmp_path.rglob("*.pkl")), "a model of a ModelSpec needs no pickle"
    loaded = type(fitted).load(path)
    assert loaded.uid == fitted.uid
    assert values(loaded) == values(fitted)
    assert set_by_user(loaded) == set_by_user(fitted)
    assert loaded.summary == fitted.summary
    assert loaded.transform(frame).orderBy("id").collect() == scored


@pytest.fixture
def instances(any_case, transformer, stage_storage):
    """An estimator and its model, or a Transformer."""
    return {"stage": any_case.make(stage_storage), "model": transformer}


def test_save_refuses_a_folder_that_is_taken(instances, tmp_path, spark):
    for name, stage in instances.items():
        folder = tmp_path / name
        stage.save(str(folder))
        before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        with pytest.raises(ValueError, match=r"exists already; use .*overwrite\(\)"):
            stage.save(str(folder))
        assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_overwrite_replaces_a_saved_stage(any_case, transformer, stage_storage, tmp_path, spark):
    path, name = str(tmp_path / "stage"), any_case.text_param
    any_case.make(stage_storage, **{name: "first"}).save(path)
    any_case.make(stage_storage, **{name: "second"}).write().overwrite().save(path)
    assert values(any_case.stage.load(path))[name] == "second"
    transformer.write().overwrite().save(path)
    assert type(transformer).load(path).uid == transformer.uid


def test_a_newer_format_is_refused(instances, tmp_path, spark):
    for name, stage in instances.items():
        stage.save(str(tmp_path / name))
        (file,) = [file for file in (tmp_path / name).glob("*.json") if "format_version" in file.read_text()]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 999}))
        with pytest.raises(ValueError, match=r"999.*upgrade ringspark") as failure:
            type(stage).load(str(tmp_path / name))
        assert len(str(failure.value).splitlines()) == 1


def test_a_pipeline_of_it_survives_save_and_load(fitted, estimator, frame, scored, tmp_path, spark_saves):
    Pipeline(stages=[estimator]).save(str(tmp_path / "pipeline"))
    (loaded,) = Pipeline.load(str(tmp_path / "pipeline")).getStages()
    assert values(loaded) == values(estimator)
    PipelineModel(stages=[fitted]).save(str(tmp_path / "model"))
    model = PipelineModel.load(str(tmp_path / "model"))
    assert model.transform(frame).orderBy("id").collect() == scored


def test_a_pipeline_joins_the_stage_to_sparks(estimator, frame, tmp_path, spark_stages):
    raw = frame.drop("features")
    stages = [VectorAssembler(inputCols=["a", "b"], outputCol="features"), estimator]
    fitted = Pipeline(stages=stages).fit(raw)
    assert fitted.stages[1].uid == estimator.uid
    fitted.save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    assert predictions(loaded, raw) == predictions(fitted, raw)


@pytest.fixture(scope="module")
def evaluator(case):
    return case.make_evaluator()


@pytest.fixture(scope="module")
def cross_validated(estimator, evaluator, frame):
    """Selects the better of two maps; two fits run in parallel on each of two folds."""
    return CrossValidator(
        estimator=estimator,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).build(),
        evaluator=evaluator,
        numFolds=2,
        seed=1,
        parallelism=2,
    ).fit(frame)


@pytest.fixture(scope="module")
def split(estimator, evaluator, frame):
    """Builds a train-validation split with one map and a quarter of the rows for validation."""
    return TrainValidationSplit(
        estimator=estimator,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.epochs, [1]).build(),
        evaluator=evaluator,
        seed=1,
    ).fit(frame)


def test_cross_validator_takes_the_best_of_the_maps(case, cross_validated, evaluator):
    metrics = cross_validated.avgMetrics
    assert len(metrics) == 2
    chosen = metrics.index(max(metrics) if evaluator.isLargerBetter() else min(metrics))
    assert type(cross_validated.bestModel) is case.model
    assert len(cross_validated.bestModel.summary.epochs) == chosen + 1


def test_train_validation_split_fits_the_stage(case, split, evaluator, frame):
    assert len(split.validationMetrics) == 1
    assert type(split.bestModel) is case.model
    assert evaluator.evaluate(split.transform(frame)) == evaluator.evaluate(split.bestModel.transform(frame))


def test_validators_survive_save_and_load(cross_validated, split, frame, tmp_path, spark_saves):
    for name, kind, fitted in (
        ("folds", CrossValidatorModel, cross_validated),
        ("split", TrainValidationSplitModel, split),
    ):
        fitted.save(str(tmp_path / name))
        assert predictions(kind.load(str(tmp_path / name)), frame) == predictions(fitted, frame)
