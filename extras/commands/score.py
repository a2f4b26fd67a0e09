"""The command `ringspark score`: predicts with a saved model or pipeline, or one of MLflow's registry."""

from __future__ import annotations

import argparse
import time
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ringspark.estimators.names import first_line
from ringspark.jobs import cli
from ringspark.jobs.row_source import FORMATS, RowSource, check_apart

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DESCRIPTION = "Predict rows with a saved model."
# A logged model, such as models:/name@alias, models:/name/3 or runs:/id/model.
_LOGGED = ("models:/", "runs:/")
_MODELS = ("TorchClassificationModel", "TorchRegressionModel", "TorchModel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    text = "saved pipeline, such as save.model of a job file, or models:/name@alias of MLflow's registry"
    model.add_argument("model", nargs="?", metavar="URI", help=text)
    model.add_argument("--model", dest="named_model", metavar="URI", help="the model, as an option")
    rows = parser.add_argument_group("rows, one of these").add_mutually_exclusive_group(required=True)
    for kind in FORMATS:
        rows.add_argument(f"--{kind}", metavar="URI", help=f"files of the format {kind}")
    rows.add_argument("--table", metavar="NAME", help="table of Spark's catalog")
    parser.add_argument("--where", metavar="SQL", help="filter of the rows")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of Spark's reader, such as header=true for CSV; can be repeated",
    )
    parser.add_argument("--output", metavar="URI", required=True, help="Parquet folder for the predictions")
    parser.add_argument("--overwrite", action="store_true", help="replace predictions of an earlier start")
    parser.add_argument(
        "--columns", metavar="A,B", help="columns to write, including predictions; default: all"
    )
    cli.add_master(parser)


def run(args: argparse.Namespace) -> None:
    options: dict[str, Any] = {}
    for text in args.option:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--option takes KEY=VALUE, such as header=true, got {text!r}")
        options[key] = value
    (kind,) = [name for name in (*FORMATS, "table") if getattr(args, name) is not None]
    source = RowSource(where=args.where, options=options, **{kind: getattr(args, kind)})
    source.find_problem()  # refuses a password in a URI
    with cli.spark("ringspark score", args.master) as spark:
        _score(spark, args, source)


def _score(spark: SparkSession, args: argparse.Namespace, source: RowSource) -> None:
    from ringspark.estimators.techniques import FUNCTIONS
    from ringspark.jobs.outputs import new_output, remove_output
    from ringspark.pipelines import storage
    from ringspark.pipelines.folder_removal import check_removal, discard
    from ringspark.pipelines.spark_paths import resolve

    storage.refuse_secrets(args.output)
    output = resolve(spark, args.output)
    if not args.overwrite and storage.exists(output):
        raise ValueError(f"--output {output} exists; give --overwrite or another folder")
    source.check_apart(spark, output)
    given = args.named_model or args.model
    if not given.startswith(_LOGGED):
        check_apart(spark, output, given, "the model")
    if storage.exists(output):
        remove_output(output, "score", check_removal)
    with ExitStack() as stack:
        if given.startswith(_LOGGED):
            # Executors cannot read the folder into which a registry's client downloads on this host.
            copied = f"{output}.model-{uuid.uuid4().hex}"
            stack.callback(discard, copied, ".+")
            FUNCTIONS["save_logged"](given, copied)
            given = copied
        model = _load_model(resolve(spark, given))
        scored = _select(model.transform(source.read(spark)), args.columns)
        started = time.perf_counter()
        remove_output(output, "score")
        with new_output(output, "score"):
            scored.write.parquet(output)
        seconds = time.perf_counter() - started
        rows = spark.read.parquet(output).count()
    print(f"score: predictions in {output}")
    cli.print_rate("score", rows, seconds)


def _load_model(uri: str) -> Any:
    from pyspark.ml import PipelineModel

    from ringspark import estimators
    from ringspark.estimators.stages.spark_metadata import read_metadata
    from ringspark.pipelines import storage

    if not storage.exists(storage.join(storage.normalize(uri), "metadata")):
        raise ValueError(f"{uri} holds no saved model; give the folder that save() wrote")
    kind = str(read_metadata(storage.normalize(uri))["class"]).rpartition(".")[2]
    if kind == "PipelineModel":
        return PipelineModel.load(uri)
    if kind not in _MODELS:
        raise ValueError(f"{uri} holds a {kind}; give a PipelineModel or one of {', '.join(_MODELS)}")
    return getattr(estimators, kind).load(uri)


def _select(scored: DataFrame, columns: str | None) -> DataFrame:
    if columns is None:
        return scored
    from pyspark.errors import AnalysisException

    try:
        return scored.select(*(name.strip() for name in columns.split(",")))
    except AnalysisException as error:
        raise ValueError(f"--columns: {first_line(error)}") from None
