"""Trains on the flights of examples/flights/etl.py by one `fit` on the table.

    python examples/flights/train.py --data artifacts/flights
    spark-submit --py-files dist/ringspark-0.1.0.zip examples/flights/train.py --data s3a://bucket/flights

Reads `train` below `--data`. Writes `model`, a Spark ML model.
After a failure, `--resume` continues from the last checkpoint, and `--no-resume` starts again.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import recipes
from ringspark.estimators.options.checked import choices_of
from ringspark.estimators.training.settings.data import Data
from ringspark.estimators.training.settings.memory import Memory
from ringspark.estimators.training.settings.recovery import Recovery
from ringspark.estimators.training.settings.setting import Setting, settings_of
from ringspark.estimators.training.settings.training import Training
from ringspark.estimators.training.settings.workers import Workers
from ringspark.jobs import cli
from ringspark.pipelines import storage
from ringspark.pipelines.spark_paths import resolve

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SETTINGS = settings_of(Workers, Training, Memory, Data, Recovery)
# The estimator's settings that are options of the job, with the job's own defaults.
FOR_DEMO: dict[str, Any] = {"numWorkers": 2, "epochs": recipes.EPOCHS, "seed": None}
TRAINING: dict[str, Any] = {
    **FOR_DEMO,
    "batchSize": recipes.BATCH_SIZE,
    "learningRate": recipes.LEARNING_RATE,
    **dict.fromkeys(("precision", "gradientCheckpointing", "gradientAccumulation", "collective"), None),
    **dict.fromkeys(("reader", "cache", "useGpu"), None),
}
_METAVARS: dict[Any, str] = {int: "N", float: "X"}
RECOVERY = tuple(settings_of(Recovery))


def add_settings(parser: Any, defaults: Mapping[str, Any]) -> None:
    """Adds options for the estimator's settings; None means the setting's own default."""
    for name, default in defaults.items():
        _add_setting(parser, _SETTINGS[name], default)


def option_name(name: str) -> str:
    return "--" + re.sub("[A-Z]", lambda capital: f"-{capital[0].lower()}", name)


def _add_setting(parser: Any, setting: Setting, default: Any) -> None:
    kwargs: dict[str, Any] = {
        "dest": setting.name,
        "default": setting.default if default is None else default,
        "help": setting.words.replace("%", "%%"),
    }
    if setting.kinds == [bool]:
        parser.add_argument(option_name(setting.name), action="store_true", **kwargs)
        return

    def convert(text: str) -> Any:
        if text == kwargs["default"]:
            return text  # argparse converts defaults too, and a lookup in a registry imports torch
        try:
            return setting.from_text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    choices = choices_of(setting.hint)
    metavar = f"{{{','.join(choices)}}}" if choices else _METAVARS.get(setting.kinds[0], "WORD")
    parser.add_argument(option_name(setting.name), type=convert, metavar=metavar, **kwargs)


def build_parser() -> cli.JobParser:
    parser = cli.JobParser("train", "Train on the flights of examples/flights/etl.py.")
    parser.add_argument("--data", default=recipes.DEFAULT_ROOT, metavar="URI", help="output folder of etl")
    parser.add_argument("--output", metavar="URI", help="saved model; default: DATA/model")
    parser.add_argument(
        "--validate",
        choices=("days", "month"),
        default="days",
        help="hold out whole days of months 1 to 9, or month 9, which chose the recipe; default: days",
    )
    add_settings(parser, TRAINING)
    recovery_group = parser.add_argument_group("when something fails")
    recovery_group.add_argument("--run", metavar="URI", help="run folder; default: DATA/runs/current")
    recovery_group.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="resume the run in the folder of --run, or start again; default: refuse an unfinished run",
    )
    add_settings(recovery_group, dict.fromkeys(RECOVERY))
    cli.add_master(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from pyspark.sql import functions as F

    import flights
    from ringspark.estimators import TorchClassifier, WorkerError
    from ringspark.estimators.run.folder import remove_old_run
    from ringspark.models import ModelSpec

    given = {name: getattr(args, name) for name in (*TRAINING, *RECOVERY)}
    with cli.spark("ringspark train", args.master) as spark:
        data = resolve(spark, args.data)
        run_uri = resolve(spark, args.run) if args.run else storage.join(data, "runs", "current")
        rows = _read(spark, storage.join(data, "train"))  # before `remove_old_run` removes an old run
        if args.validate == "month":
            rows = rows.withColumn("is_validation", F.col("split") == "validation")
        remove_old_run(run_uri, args.resume)
        estimator = TorchClassifier(
            model=ModelSpec("tabpack", dict.fromkeys(("number_width", "category_width"), recipes.WIDTH)),
            # The other columns nearly identify rows, or are known by another name.
            inputCols=[*flights.CATEGORICAL, *flights.NUMERIC],
            validationIndicatorCol="is_validation",
            runUri=run_uri,
            resume=bool(args.resume),
            **given,
        )
        print("train: " + ", ".join(f"{name}={value}" for name, value in given.items()), flush=True)
        try:
            model = estimator.fit(rows)
        except WorkerError as error:
            # The message has the worker's traceback; the driver's is omitted.
            raise SystemExit(f"train: error: {error}") from None
        output = resolve(spark, args.output) if args.output else storage.join(data, "model")
        model.write().overwrite().save(output)
        summary = model.summary
    print(f"train: model saved to {output}")
    cli.print_rate("train", summary.rows, summary.seconds)


def _read(spark: SparkSession, uri: str) -> DataFrame:
    if not storage.exists(uri):
        raise ValueError(f"no rows at {uri}; run examples/flights/etl.py first, or give --data")
    return spark.read.parquet(uri)


if __name__ == "__main__":
    sys.exit(cli.main(build_parser(), run))
