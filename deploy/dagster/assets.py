"""Two Dagster assets: a trained model, and predictions that depend on the model.

    dagster dev -f assets.py

Set four environment variables: RINGSPARK_JOB (the job file), RINGSPARK_MODEL (its `save.model`),
RINGSPARK_ROWS (a Parquet folder) and RINGSPARK_PREDICTIONS (the output folder). The job file must set
`save.overwrite: true`, so that a second materialization replaces the model.

Run: tests/deploy/test_orchestrators.py materializes both assets.
"""

import os
import subprocess

from dagster import AssetExecutionContext, Definitions, MaterializeResult, asset


def ringspark(context: AssetExecutionContext, *arguments: str) -> None:
    # The command runs in a separate process, so that its Spark session ends with it.
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
