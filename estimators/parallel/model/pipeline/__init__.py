"""Pipelines: each rank has some of the layers, and the micro-batches of a step pass through the ranks."""

from ringspark.estimators.parallel.model.pipeline.passes import PipelineOptions, PipelinePasses, pipelined
from ringspark.estimators.parallel.model.pipeline.schedules import SCHEDULES

__all__ = ["SCHEDULES", "PipelineOptions", "PipelinePasses", "pipelined"]
