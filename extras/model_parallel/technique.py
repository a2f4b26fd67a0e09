"""The setting `parallelism` over the axes pipeline, sequence, tensor and expert."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.estimators.techniques import Technique
from ringspark.estimators.training.passes import Stages
from ringspark.extras.model_parallel.mesh_check import check_mesh
from ringspark.extras.model_parallel.pipeline.trainer_passes import PipelinedPasses
from ringspark.extras.model_parallel.shard_network import check_shardable, shard_network
from ringspark.models.meta_device import copy_to_meta

_log = logging.getLogger(__name__)


class ModelParallelism(Technique):
    def check_network(self, config: Any, objects: Any, network: nn.Module) -> None:
        check_shardable(copy_to_meta(network), config.axes, config.parallelism)

    def check(self, training: Any) -> None:
        config = training.config
        is_short = training.whole is not training.module
        if is_short and (config.parallelism.plan or config.parallelism.pipeline.cuts):
            _log.warning(
                "parallelism %s is checked only on the workers, because it names layers of the whole network",
                config.parallelism,
            )
        else:
            check_mesh(config, training.copies, training.manifest, training.module)

    def shard(
        self,
        config: Any,
        network: nn.Module,
        mesh: Any,
        sample: Sequence[torch.Tensor] | None,
        device: torch.device,
    ) -> Stages | None:
        num_micro = config.gradient_accumulation
        pipeline = shard_network(network, mesh, config.parallelism, num_micro, sample, device)
        return None if pipeline is None else Stages(pipeline.layers, partial(PipelinedPasses, pipeline))
