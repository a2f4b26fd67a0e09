"""Pipeline parallelism: each rank has some of the layers, and micro-batches pass through the ranks."""

from ringspark.extras.model_parallel.pipeline.passes import (
    PipelinePasses,
    build_pipeline,
)
from ringspark.extras.model_parallel.pipeline.schedules import SCHEDULES

__all__ = ["SCHEDULES", "PipelinePasses", "build_pipeline"]
