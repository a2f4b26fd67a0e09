"""A gang with any work on Spark, under the supervisor of `fit`."""

import tempfile
from typing import Any

from ringspark.estimators.launch.gang_task import Work
from ringspark.estimators.launch.supervisor import Supervisor
from ringspark.estimators.training.settings.config import TrainConfig


def supervisor_of(spark: Any, work: Any = None, run_uri: str = "", **settings: Any) -> Supervisor:
    columns = {"input_columns": ("x",), "label_columns": ("y",)}
    config = TrainConfig(shards_uri="", run_uri=run_uri, **columns, **settings)
    return Supervisor(spark=spark, config=config, make_work=lambda config: work, token="test")


def run_gang(spark: Any, num_workers: int, collective: str, work: Work, **settings: Any) -> list[str]:
    """Runs `work` once on `num_workers` concurrent ranks; returns their texts in rank order."""
    settings |= {"num_workers": num_workers, "collective": collective}
    with tempfile.TemporaryDirectory() as folder:
        return supervisor_of(spark, work, folder, **settings).run()
