"""Two Dagster assets: a trained model, and predictions that are made again when the model changes.

    dagster dev -f assets.py

The paths come from the environment: RINGSPARK_JOB (the job file), RINGSPARK_MODEL (its save.model),
RINGSPARK_ROWS (Parquet) and RINGSPARK_PREDICTIONS.

Run: tests/deploy/test_orchestrators.py materializes both assets.
"""

import os
import subprocess

from dagster import AssetExecutionContext, Definitions, MaterializeResult, asset


def ringspark(context: AssetExecutionContext, *arguments: str) -> None:
    # A process of its own: Spark's session ends with it, and the log keeps its output.
    done = subprocess.run(["ringspark", *arguments], capture_output=True, text=True, check=False)
    context.log.info(done.stdout + done.stderr)
    done.check_returncode()


@asset
def model(context: AssetExecutionContext) -> MaterializeResult:
    ringspark(context, "train", os.environ["RINGSPARK_JOB"])
    return MaterializeResult(metadata={"path": os.environ["RINGSPARK_MODEL"]})


@asset(deps=[model])
def predictions(context: AssetExecutionContext) -> None:
    paths = [os.environ[f"RINGSPARK_{name}"] for name in ("MODEL", "ROWS", "PREDICTIONS")]
    ringspark(context, "score", paths[0], "--parquet", paths[1], "--output", paths[2], "--overwrite")


definitions = Definitions(assets=[model, predictions])
