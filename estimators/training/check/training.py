"""`Trial`, the value that the driver's checks take and return, and `CheckedTraining`, which remains of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.training.build import build_module
from ringspark.estimators.training.check.probe import Shape
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.manifest import Split


@dataclass(frozen=True, kw_only=True)
class CheckedTraining:
    """A training that passed every check of the driver. It holds no network but the user's own.

    Attributes:
        config: The config, with `losses`, `monitor`, `output_widths` and `own_metrics`.
        heads: Loss and metrics, one per output.
        shapes: Shape of one row of each output.
    """

    config: TrainConfig
    objects: UserObjects
    manifest: ShardManifest
    heads: tuple[Head, ...]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A training during the checks of the driver.

    Attributes:
        config: The config; checks add `monitor`, `output_widths` and `own_metrics`.
        copies: A copy of `objects` that the checks may change.
        whole: The network with all layers. For a large network of the transformers library it is on `meta`.
        module: The network that the checks run: `whole`, or a shorter network of the same family.
        heads: Loss and metrics, one per output.
        splits: Splits that have rows, in the order in which `monitor` prefers them.
        outputs: Outputs of `module` for two rows of zeros.
        inputs, labels: Two training rows of zeros, after transformBatch.
        num_steps: Optimizer steps of the training.
    """

    config: TrainConfig
    objects: UserObjects
    copies: UserObjects
    manifest: ShardManifest
    whole: nn.Module
    module: nn.Module
    heads: tuple[Head, ...]
    splits: tuple[Split, ...]
    outputs: Sequence[torch.Tensor] = ()
    inputs: tuple[torch.Tensor, ...] = ()
    labels: tuple[torch.Tensor, ...] = ()
    num_steps: int = 0

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of `outputs`, rows first."""
        return [tuple(output.shape) for output in self.outputs]

    def finish(self) -> CheckedTraining:
        return CheckedTraining(
            config=self.config,
            objects=self.objects,
            manifest=self.manifest,
            heads=self.heads,
            shapes=tuple(shape[1:] for shape in self.shapes),
        )


def copy_objects(objects: UserObjects) -> UserObjects:
    """Copies what the checks would change. Together, because a loss may use layers of the network."""
    if objects.module is None and not any(isinstance(loss, nn.Module) for loss in objects.losses):
        return objects
    return user_code.copy(replace(objects, callbacks=()))


def build_networks(config: TrainConfig, objects: UserObjects) -> tuple[nn.Module, nn.Module]:
    """Returns the whole network, and the network that the checks run.

    They differ for a `ModelSpec` of the transformers library: the first one is on `meta`, and the second one
    has fewer blocks, so that the driver does not hold the whole network.
    """
    stages = config.parallelism.pipeline
    spec = None if config.model is None else ModelSpec.from_json(config.model)
    short = None if spec is None else spec.shorten(max(2, stages.stages * stages.virtual))
    if short is None:
        module = build_module(config, objects)
        return module, module
    whole = build_on_meta(partial(build_module, config, objects))
    shorter = replace(config, model=short.to_json())
    try:
        return whole, build_module(shorter, objects)
    except ValueError:  # `freeze` or `lora` name blocks that only the whole network has
        return whole, build_module(replace(shorter, freeze=(), lora=None), objects)
