"""A gang of any work on Spark, under the supervisor that `fit` trains with."""

from __future__ import annotations

import tempfile
from typing import Any

from ringspark.estimators.launch.gang_task import Work
from ringspark.estimators.launch.supervisor import Supervisor


def run_gang(spark: Any, num_workers: int, collective: str, work: Work, use_gpu: bool = False) -> list[str]:
    """Runs `work` once on `num_workers` ranks at the same time; returns their texts in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(
            spark=spark,
            make_work=lambda num_workers: work,
            run_uri=folder,
            token="test",
            num_workers=num_workers,
            collective=collective,
            use_gpu=use_gpu,
            timeout_seconds=600.0,
        )
        return supervisor.run().texts
