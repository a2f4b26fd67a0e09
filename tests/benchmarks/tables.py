"""Tables: one line of `fit` against XGBoost, LightGBM and CatBoost, each tuned on the validation rows.

    make setup-peers
    make bench ARGS="tables --seconds 120"
    make bench ARGS="tables --only taxi,Wage --repeats 3"
    make bench ARGS="tables --tables FOLDER"

The tables are public ones, of the packages that `peers/public_tables.py` names. `--tables` takes another
folder of the same form. Everyone trains on the same rows and uses the validation rows to stop and to choose:
`fit` has `validationIndicatorCol`, `--seconds` as its time budget, 2 workers and one seed per repeat. Each
boosting library is tuned for as many seconds on all cores; the one with the best validation score counts.
Boosting's scores are kept in `boosting.json` next to the tables.
"""

from __future__ import annotations

import json
import subprocess
import time
import warnings
from argparse import Namespace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import harness
from pyspark.sql import functions as F
from sklearn.metrics import mean_squared_error, roc_auc_score

from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.jobs import cli

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PEERS = Path(__file__).resolve().parent / "peers"
PYTHON = Path(__file__).resolve().parents[2] / ".venv-peers-xgboost/bin/python"
HEADER = ["table", "rows", "score", "fit", "worst seed", "boosting", "library", "fit is", "seconds"]
# A table is won that is at most this much worse, relative to boosting's score.
SAME = 1e-3


def options() -> Namespace:
    """Parses the command line."""
    parser = harness.parser(__doc__, repeats=(1, 1), seconds=(120, 2))
    parser.add_argument("--tables", metavar="DIR", help="folder with tables.json and a CSV file per table")
    parser.add_argument("--only", default="", metavar="NAMES", help="tables, as a,b; default: all")
    return parser.parse_args()


def run_peer(program: str, *words: str) -> str:
    """Returns the last line that a program of the boosting environment prints."""
    command = [str(PYTHON), str(PEERS / f"{program}.py"), *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().rpartition("\n")[2]


def boosting_scores(folder: Path, name: str, seconds: int) -> dict[str, Any]:
    """Returns library -> scores; tunes the libraries if the folder has no scores for as many seconds."""
    kept = folder / "boosting.json"
    scores = json.loads(kept.read_text()) if kept.exists() else {}
    # A folder that others made does not say for how long they tuned.
    if scores.get(name, {"asked": None}).get("asked", seconds) != seconds:
        tuned = json.loads(run_peer("boosting", str(folder), name, str(seconds)))
        scores[name] = tuned | {"asked": seconds}
        kept.write_text(json.dumps(scores, indent=1))
    found: dict[str, Any] = scores[name]
    return {library: found[library] for library in ("xgboost", "lightgbm", "catboost")}


def first(score: Any) -> float:
    """Returns the first of several scores, AUC or minus the RMSE."""
    return float(score[0] if isinstance(score, list) else score)


def read(spark: SparkSession, folder: Path, name: str, about: dict[str, Any]) -> DataFrame:
    """Returns the rows: `label`, `split` and the inputs with their types."""
    kinds = {"label": "double", "split": "string", **about["columns"]}
    schema = ", ".join(f"`{column}` {kind}" for column, kind in kinds.items())
    frame = spark.read.csv(str(folder / f"{name}.csv.gz"), schema=schema, header=True, escape='"')
    if about["task"] == "binary":
        frame = frame.withColumn("label", F.col("label").cast("int"))
    return frame.repartition(8).cache()


def fit_and_judge(rows: DataFrame, is_class: bool, seconds: int, seed: int) -> tuple[float, float]:
    """Returns the score of the test rows, and the seconds of `fit`."""
    train = rows.where("split <> 'test'").withColumn("held", F.col("split") == "valid").drop("split")
    test = rows.where("split = 'test'").drop("split")
    stage = TorchClassifier if is_class else TorchRegressor
    settings = {"numWorkers": harness.NUM_WORKERS, "timeBudgetSeconds": seconds, "seed": seed}
    estimator = stage(labelCol="label", validationIndicatorCol="held", **settings)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the columns that are left out
        model = estimator.fit(train)
    spent = time.perf_counter() - start
    column = "probability" if is_class else "prediction"
    judged = model.transform(test).select("label", column).toPandas()
    if is_class:
        return float(roc_auc_score(judged["label"], [p[1] for p in judged[column]])), spent
    return -(float(mean_squared_error(judged["label"], judged[column])) ** 0.5), spent


def line(name: str, about: dict[str, Any], ours: list[tuple[float, float]], theirs: Any) -> list[str]:
    """Returns a row of the table. The gain is relative for RMSE, and in points of AUC."""
    best = max(theirs, key=lambda library: first(theirs[library]["valid"]))
    score, base = mean(found for found, _ in ours), first(theirs[best]["test"])
    is_class = about["task"] == "binary"
    gain = score - base if is_class else (score - base) / abs(base)
    verdict = "won" if gain > -SAME * (abs(base) if is_class else 1) else "lost"
    return [
        name,
        f"{about['rows']:,}",
        "AUC" if is_class else "RMSE",
        *(f"{abs(value):.6g}" for value in (score, min(found for found, _ in ours), base)),
        best,
        f"{verdict}, {100 * gain:+.2f} {'points' if is_class else '%'}",
        f"{mean(spent for _, spent in ours):.0f}",
    ]


def main() -> None:
    """Runs every table with every seed."""
    args = options()
    folder = Path(args.tables or (args.root + "-tables"))
    if not args.tables and not PYTHON.exists():
        print("tables: skipped, the boosting libraries are not installed; `make setup-peers` adds them")
        return
    if not (folder / "tables.json").exists():
        run_peer("public_tables", str(folder), *(["--tiny"] if args.tiny else []))
    listed = json.loads((folder / "tables.json").read_text())
    names = [name for name in args.only.split(",") if name] or list(listed)[: 2 if args.tiny else None]
    lines = []
    with cli.spark("tables", harness.MASTER) as spark:
        for name in names:
            about = listed[name]
            theirs = boosting_scores(folder, name, args.seconds)
            rows = read(spark, folder, name, about)
            is_class = about["task"] == "binary"
            ours = [fit_and_judge(rows, is_class, args.seconds, seed) for seed in range(args.repeats)]
            rows.unpersist()
            lines.append(line(name, about, ours, theirs))
            print("  ".join(lines[-1]), flush=True)
    won = sum(" won" in f" {cells[7]}" for cells in lines)
    harness.print_table(f"{won} of {len(lines)} tables won, {args.repeats} seeds", HEADER, lines)


if __name__ == "__main__":
    main()
