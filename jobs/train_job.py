"""Trains by a job file, which gives the data, the stage and its Params, the output and the evaluation.

ringspark train job.yaml
ringspark train job.yaml --print
spark-submit --py-files dist/ringspark-0.1.0.zip jobs/command.py train job.yaml
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ringspark.estimators.names import first_line
from ringspark.jobs import cli
from ringspark.jobs.job_file import JobFile, read_section, yaml_or_json
from ringspark.jobs.row_source import RowSource, check_apart

if TYPE_CHECKING:
    from pyspark.ml import Transformer
    from pyspark.sql import DataFrame, SparkSession

    from ringspark.estimators.training.settings.config import TrainConfig, UserObjects

DESCRIPTION = "Train by a job file and save the model."
# The paths below a saved PipelineModel.
_SAVED = r"metadata/[^/]+|stages/\d+_[^/]+/.+"
STAGES = {
    **{
        name: f"ringspark.estimators:{name}"
        for name in ("TorchClassifier", "TorchRegressor", "TorchEstimator", "TorchAutoencoder")
    },
    **{name: f"ringspark.extras.search:{name}" for name in ("OptunaSearch", "PopulationSearch")},
}


@dataclass(frozen=True, kw_only=True)
class Save:
    """Folder of the saved Spark ML PipelineModel, which includes the features."""

    model: str
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Rows on which the Param `metrics` is computed after the training; `output` is a JSON file."""

    data: RowSource
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class StageSection:
    """A stage within a stage: the estimator of a search."""

    stage: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Content of a job file.

    Attributes:
        stage: Class name of the estimator or search.
        features: SQL expression of each additional column, by its name; the saved model includes them.
        params: Settings of the stage by name.
    """

    stage: str
    data: RowSource
    save: Save
    features: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    evaluation: EvaluationSection | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--print", action="store_true", help="print the job with all defaults, and stop")
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="resume the run in params.runUri, or start it again",
    )
    cli.add_master(parser)


def add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="job file, YAML or JSON: a path or a URI")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of the file, such as params.epochs=3; can be repeated",
    )


def run(args: argparse.Namespace) -> None:
    file, job = read_job(args.file, args.set)
    estimator = make_estimator(file, job)
    if args.print:
        print(yaml_or_json(_fill_defaults(job, estimator)))
        return
    with cli.spark("ringspark train", args.master) as spark:
        _train(spark, file, job, estimator, args.resume)


def read_job(uri: str, changes: Sequence[str] = ()) -> tuple[JobFile, TrainJob]:
    from ringspark.pipelines import storage

    try:
        data = storage.read_bytes(storage.normalize(uri))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ValueError(f"job file {uri!r} does not exist; docs/jobs.md has an example") from None
    except OSError as error:
        raise ValueError(f"the job file {uri!r} cannot be read: {error}") from None
    name = uri.rstrip("/").rpartition("/")[2]
    try:
        file = JobFile.parse(name, data.decode())
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8 text") from None
    for change in changes:
        file = file.set_value(change)
    job = read_section(file, TrainJob)
    _check(file, job)
    return file, job


def make_estimator(file: JobFile, job: TrainJob) -> Any:
    """Returns the job's estimator with its Params. Needs no Spark session.

    Raises ValueError if a Param is unknown, has a wrong value, or conflicts with another Param.
    """
    stage = _make_stage(file, job.stage, job.params, ())
    estimator = find_estimator(stage)
    if estimator is None:
        raise file.error(
            ("params",), f"{job.stage} needs params.estimator; add it with the keys stage and params"
        )
    unfit = "shards" if job.data.shards is not None else "inPlace" if job.data.inPlace else ""
    if stage is not estimator and unfit:
        remedy = "give a table or files" if unfit == "shards" else "remove inPlace"
        reason = f"data.{unfit} cannot be used with {job.stage}, because a search splits the rows"
        raise file.error(("data",), f"{reason}; {remedy}")
    is_table = _wants_table(file, job, estimator)
    if not is_table:
        with file.place("params"):
            config_of(estimator)
    if job.evaluation is not None and not estimator.hasParam("labelCol"):
        raise file.error(
            ("evaluation",), f"evaluation needs labels, but {job.stage} has none; remove evaluation"
        )
    if job.evaluation is not None and not estimator.getMetrics():
        # Otherwise the evaluation would fail after the training.
        key = "params.metrics" if stage is estimator else "params.estimator.params.metrics"
        raise file.error(("evaluation",), f"evaluation needs {key}; add some, or remove evaluation")
    return stage


def find_estimator(stage: Any) -> Any:
    """Returns the estimator that a search trains, or the stage itself; None for a search without one."""
    return stage.getEstimator() if stage.hasParam("estimator") else stage


def _make_stage(file: JobFile, name: str, params: Mapping[str, Any], path: tuple[str | int, ...]) -> Any:
    from ringspark.estimators.lazy_imports import load_object
    from ringspark.estimators.names import check_name

    # A search trains an estimator, not another search.
    known = [stage for stage in STAGES if not path or "Search" not in stage]
    with file.place(*path, "stage"):
        check_name(".".join(map(str, (*path, "stage"))), name, known, otherwise="")
    stage = load_object(STAGES[name])()
    for key, value in params.items():
        place = (*path, "params", key)
        if key == "estimator" and stage.hasParam(key):
            inner = read_section(file, StageSection, place)
            value = _make_stage(file, inner.stage, inner.params, place)
        with file.place(*place):
            if key != "evaluator" or not stage.hasParam(key):
                stage.setParams(**{key: _from_file(key, value)})
            elif value is not None:
                _evaluator(value)  # `_train` sets it
    return stage


def _wants_table(file: JobFile, job: TrainJob, estimator: Any) -> bool:
    """Whether `fit` makes the network from the rows; raises ValueError if the job's rows do not allow it."""
    from ringspark.estimators.prepared_fit import wants_table

    if not wants_table(estimator) or (estimator._task == "any" and estimator.hasParam("labelCol")):
        return False
    if job.data.shards is not None or (job.data.inPlace and job.data.parquet is None):
        rows = "shards" if job.data.shards is not None else "tables with inPlace"
        raise file.error(
            ("data",),
            f"data: with {rows}, set params.model, because a network for a table is made from rows Spark "
            "reads; or give the rows as a table or as files",
        )
    return True


def config_of(estimator: Any) -> tuple[TrainConfig, UserObjects]:
    from ringspark.estimators.stages import to_config

    return to_config.config_of(estimator, estimator._task, estimator._label_columns())


def _fill_defaults(job: TrainJob, estimator: Any) -> dict[str, Any]:
    evaluation = job.evaluation
    return {
        "stage": job.stage,
        "data": job.data.to_json(),
        "features": job.features,
        "params": _params_of(estimator) | {n: v for n, v in job.params.items() if n == "evaluator"},
        "save": asdict(job.save),
        "evaluation": evaluation and {"data": evaluation.data.to_json(), "output": evaluation.output},
    }


def _params_of(stage: Any) -> dict[str, Any]:
    from ringspark.estimators.prepared_fit import wants_table
    from ringspark.estimators.stages.declared import values_of

    values = values_of(stage)
    if find_estimator(stage) is stage and wants_table(stage):
        # A default that is set would replace a setting that `fit` chooses for the table.
        values = {name: value for name, value in values.items() if stage.isSet(name)}
    return {name: _to_file(value) for name, value in values.items()}


def _check(file: JobFile, job: TrainJob) -> None:
    from ringspark.pipelines import storage

    for path, source in (
        (("data",), job.data),
        (("evaluation", "data"), job.evaluation.data if job.evaluation is not None else None),
    ):
        with file.place(*path, title=f"{'.'.join(path)}: "):
            problem = source.find_problem(trains=path == ("data",)) if source is not None else ""
        if problem:
            raise file.error(path, f"{'.'.join(path)} {problem}")
    if job.features and (job.data.shards is not None or job.data.inPlace):
        is_shards = job.data.shards is not None
        reason = "shards are read without Spark" if is_shards else "inPlace reads the columns of a table"
        raise file.error(("features",), f"features cannot be used, because {reason}; remove features")
    for name, expression in job.features.items():
        if not isinstance(expression, str):
            raise file.error(
                ("features", name), f"features.{name} must be an SQL expression, got {expression!r}"
            )
    outputs = {("save", "model"): job.save.model}
    if job.evaluation is not None:
        outputs["evaluation", "output"] = job.evaluation.output or ""
    for path, uri in outputs.items():
        with file.place(*path, title=f"{'.'.join(path)}: "):
            storage.refuse_secrets(uri)


def _from_file(name: str, value: Any) -> Any:
    """Converts plain data of the file to a Param's value: a network, or column types."""
    import torch

    from ringspark.estimators.prepared_fit import is_for_tables
    from ringspark.models import ModelSpec

    if name == "columns" and isinstance(value, dict):
        return {c: _column_type(kind) if isinstance(kind, dict) else kind for c, kind in value.items()}
    if name != "model" or not isinstance(value, dict):
        return value
    if "target" not in value or not set(value) <= {"target", "kwargs"}:
        raise ValueError(
            "model must have the key target (a network's name or 'package.module:Class') and may have kwargs "
            f"(its arguments), got {', '.join(map(str, value))}"
        )
    spec = ModelSpec(value["target"], value.get("kwargs"))
    if ":" not in spec.target and not is_for_tables(spec):
        # Checks the arguments of one of our networks, without memory for weights.
        with torch.device("meta"):
            spec.build()
    return spec


def _evaluator(given: Any) -> Callable[[], Any]:
    """Returns a function that makes an evaluator of Spark ML, which needs a session."""
    from pyspark.ml import evaluation

    from ringspark.estimators.names import check_name

    if not isinstance(given, dict):
        raise ValueError(
            "evaluator must be a dict such as {name: BinaryClassificationEvaluator, labelCol: late}, got "
            f"{given!r}"
        )
    name, params = given.get("name"), {key: value for key, value in given.items() if key != "name"}
    known = [each for each in evaluation.__all__ if each.endswith("Evaluator") and each != "Evaluator"]
    check_name("evaluator's name", str(name), known, otherwise="")
    kind = getattr(evaluation, str(name))
    known = [*inspect.signature(kind.__init__).parameters][1:]
    for param in params:
        check_name(f"a Param of {name}", param, known, otherwise="")
    return lambda: kind(**params)


def _column_type(given: dict[str, Any]) -> Any:
    from ringspark.pipelines.kinds import KINDS, kind_from_json

    kind = KINDS.get(str(given.get("kind")))
    defaults = [] if kind is None else [entry for entry in fields(kind) if entry.default is not MISSING]
    return kind_from_json({entry.name: entry.default for entry in defaults} | given)


def _to_file(value: Any) -> Any:
    from pyspark.ml import Estimator

    from ringspark.estimators.options.declare import Options
    from ringspark.models import ModelSpec
    from ringspark.pipelines.kinds import Kind

    if isinstance(value, Estimator):
        return {"stage": type(value).__name__, "params": _params_of(value)}
    if isinstance(value, ModelSpec):
        return {"target": value.target, "kwargs": value.kwargs}
    if isinstance(value, Kind):
        return value.to_json()
    if isinstance(value, Options):
        return value.to_values()
    return {key: _to_file(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _train(spark: SparkSession, file: JobFile, job: TrainJob, stage: Any, resume: bool | None) -> None:
    from pyspark.ml import PipelineModel

    from ringspark.estimators import WorkerError
    from ringspark.estimators.checked_fit import check_evaluated
    from ringspark.estimators.run.folder import remove_old_run
    from ringspark.pipelines import storage
    from ringspark.pipelines.folder_removal import check_removal, remove_folder
    from ringspark.pipelines.spark_paths import resolve

    estimator, output = find_estimator(stage), resolve(spark, job.save.model)
    if job.params.get("evaluator") is not None and stage.hasParam("evaluator"):
        with file.place("params", "evaluator"):
            stage.setEvaluator(_evaluator(job.params["evaluator"])())
    if not job.save.overwrite and storage.exists(output):
        raise file.error(
            ("save", "model"), f"save.model: {output} exists; set save.overwrite or another folder"
        )
    inputs = {"run": stage.getRunUri(), "teacher": estimator.getTeacher()}
    inputs["initial model"] = estimator.getInitialModel()
    inputs["pretrained weights"] = getattr(estimator.getPretrained(), "uri", None)
    written = {("save", "model"): output}
    if job.evaluation is not None and job.evaluation.output is not None:
        written["evaluation", "output"] = resolve(spark, job.evaluation.output)
    for key, place in written.items():
        with file.place(*key, title=f"{'.'.join(key)}: "):
            for source in (job.data, *([job.evaluation.data] if job.evaluation is not None else [])):
                source.check_apart(spark, place)
            for what, uri in inputs.items():
                if isinstance(uri, str):
                    check_apart(spark, place, uri, f"the {what}")
            if key != ("save", "model"):
                check_apart(spark, place, output, "the model")
            elif storage.exists(output):
                check_removal(storage.normalize(output), _SAVED)
    if stage.getRunUri() is None and resume is not None:
        raise ValueError("--resume and --no-resume need a run folder; set params.runUri")
    if stage is not estimator and resume is False:
        raise ValueError(
            "--no-resume cannot be used with a search, which always resumes from params.runUri; set "
            "params.runUri to a new folder"
        )
    features = _features(job)
    if job.evaluation is not None:
        with file.place("evaluation", "data", title="evaluation.data: "):
            check_evaluated(estimator, _add_features(spark, job.evaluation.data, features))
    if stage is estimator and stage.getRunUri() is not None:
        _check_rows(spark, job, estimator, features)  # before `remove_old_run` removes an old run
        resume = resume if resume is not None or not estimator.getResume() else True
        remove_old_run(storage.normalize(resolve(spark, estimator.getRunUri())), resume)
        estimator.setResume(bool(resume))
    try:
        model = _fit(spark, job, stage, features)
    except WorkerError as error:
        # The message has the worker's traceback; the driver's is omitted.
        raise SystemExit(f"ringspark train: error: {error}") from None
    # From here on a failure is not wrong input.
    status = "the training has finished, but its model could not be saved"
    try:
        if job.save.overwrite:
            remove_folder(storage.normalize(output), _SAVED)
        PipelineModel([*features, model]).save(output)
        print(f"train: model saved to {output}")
        best = getattr(model, "bestModel", model)
        cli.print_rate("train", best.summary.rows, best.summary.seconds)
        status = f"the model is saved to {output}, but its evaluation failed"
        if job.evaluation is not None:
            _evaluate(spark, job.evaluation, features, best)
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"ringspark train: error: {status}: {error}") from None


def _check_rows(spark: SparkSession, job: TrainJob, estimator: Any, features: list[Transformer]) -> None:
    """Raises ValueError if the training would refuse the rows."""
    from ringspark.estimators.checked_fit import prepare_checked
    from ringspark.pipelines import ShardManifest
    from ringspark.pipelines.spark_paths import resolve

    kind, uri = job.data.location
    if kind == "shards":
        ShardManifest.load(resolve(spark, uri)).verify_files()
    elif kind == "parquet" or not job.data.inPlace:  # other tables in place need no connector in Spark
        alone = estimator.copy()
        for param in (alone.runUri, alone.resume):
            alone.clear(param)
        # The run's folder takes everything that a fit without `runUri` would write into `storageUri`.
        if (parent := estimator.getRunUri().rstrip("/").rpartition("/")[0]) and not alone.getStorageUri():
            alone._set(storageUri=parent)
        prepare_checked(alone, _add_features(spark, job.data, features))


def read_rows(spark: SparkSession, job: TrainJob) -> DataFrame:
    return _add_features(spark, job.data, _features(job))


def _features(job: TrainJob) -> list[Transformer]:
    from pyspark.ml.feature import SQLTransformer

    if not job.features:
        return []
    columns = ", ".join(f"{expression} AS `{name}`" for name, expression in job.features.items())
    return [SQLTransformer(statement=f"SELECT *, {columns} FROM __THIS__")]


def _add_features(spark: SparkSession, source: RowSource, features: list[Transformer]) -> DataFrame:
    from pyspark.errors import AnalysisException, ParseException

    frame = source.read(spark)
    try:
        for stage in features:
            frame = stage.transform(frame)
    except (AnalysisException, ParseException) as error:
        raise ValueError(f"features cannot be computed: {first_line(error)}") from None
    return frame


def _fit(spark: SparkSession, job: TrainJob, estimator: Any, features: list[Transformer]) -> Any:
    kind, uri = job.data.location
    if kind == "shards":
        return estimator.fitOnShards(uri)
    if job.data.inPlace:
        if kind == "parquet":
            return estimator.fitOnParquet(uri)
        fit = estimator.fitOnDelta if kind == "delta" else estimator.fitOnTable
        return fit(uri, job.data.version)
    return estimator.fit(_add_features(spark, job.data, features))


def _evaluate(
    spark: SparkSession, evaluation: EvaluationSection, features: list[Transformer], model: Any
) -> None:
    from ringspark.pipelines import storage
    from ringspark.pipelines.spark_paths import resolve

    metrics = model.evaluate(_add_features(spark, evaluation.data, features))
    for name, value in metrics.items():
        print(f"train: {name} {value:.4f}")
    if evaluation.output is not None:
        text = json.dumps(metrics, indent=2) + "\n"
        storage.write_atomic(storage.normalize(resolve(spark, evaluation.output)), text.encode())
