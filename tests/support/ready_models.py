"""Fitted models without a fit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringspark.estimators.training.checkpoint.weights import save_checkpoint
from ringspark.models import ModelSpec
from ringspark.pipelines import Column


def ready_model(
    kind: type[Any],
    network: nn.Module | ModelSpec,
    folder: Path,
    shapes: Sequence[tuple[int, ...]] = ((1,),),
    columns: Sequence[Column] = (),
    *,
    scale: float = 1.0,
    seed: int = 0,
    **params: Any,
) -> Any:
    """Returns the model that `fit` would make if it only multiplied the initial weights by `scale`.

    Args:
        folder: Gets the checkpoint.
        shapes: Row shapes of the network's outputs.
        columns: Columns of the training's shards; their types are unknown if there are none.
    """
    torch.manual_seed(seed)
    module = network.build() if isinstance(network, ModelSpec) else network
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    save_checkpoint(str(folder), module)
    stage = kind(model=network, **params)
    return stage._set_trained(
        str(folder), list(shapes), None, columns=columns, input_columns=stage.inputColumns()
    )
