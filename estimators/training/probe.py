"""Runs a module on two rows of zeros in the data's shapes and types."""

from __future__ import annotations

import torch
from torch import nn

from ringspark.estimators.training.feed import zeros
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models.outputs import as_outputs
from ringspark.pipelines import ShardManifest

PROBE_ROWS = 2

Shape = tuple[int, ...]


def probe(module: nn.Module, config: TrainConfig, manifest: ShardManifest) -> tuple[torch.Tensor, ...]:
    """Returns the module's outputs for `PROBE_ROWS` rows of zeros.

    Raises:
        ValueError: The module cannot take the input columns, or does not return one tensor per label
            with one entry per row.
    """
    name = type(module).__name__
    inputs = [zeros(manifest.array(column), PROBE_ROWS) for column in config.input_columns]
    given = ", ".join(
        f"{column} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for column, t in zip(config.input_columns, inputs, strict=True)
    )
    module.eval()
    try:
        with torch.no_grad():
            output = module(*inputs)
    except Exception as error:
        raise ValueError(
            f"model {name} cannot take the input columns [{given}]: "
            f"{type(error).__name__}: {error}; match the model's input size to the columns"
        ) from error
    finally:
        module.train()
    outputs = as_outputs(output, f"model {name}")
    if len(outputs) != len(config.label_columns):
        raise ValueError(
            f"model {name} returns {len(outputs)} tensors for the labels {list(config.label_columns)}; "
            "each needs one: set labelCols of TorchEstimator, or return the logits or values alone"
        )
    for tensor in outputs:
        if tensor.dim() == 0 or tensor.shape[0] != PROBE_ROWS:
            raise ValueError(
                f"model {name} must return one output per row, shape ({PROBE_ROWS}, ...) for {PROBE_ROWS} "
                f"rows, got {tuple(tensor.shape)}; keep the batch dimension first"
            )
    return outputs
