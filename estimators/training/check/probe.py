"""Runs a module on two rows in the data's shapes and types: zeros, and the largest ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ringspark.estimators.training.arguments import layout_in
from ringspark.estimators.training.batch_transforms import try_transform
from ringspark.estimators.training.feed import network_dtype
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models.outputs import as_outputs
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Array, Padded

PROBE_ROWS = 2

Shape = tuple[int, ...]


def samples(names: Sequence[str], manifest: ShardManifest) -> tuple[torch.Tensor, ...]:
    """Returns `PROBE_ROWS` rows of the inputs called `names`; of varying length, one value a row."""
    layout = layout_in(manifest, names)

    def sample(number: int, name: str) -> torch.Tensor:
        values, column = _zeros(name, manifest, PROBE_ROWS), manifest.column_of(name)
        if layout and layout[number] == number:
            values[:] = torch.arange(PROBE_ROWS)
        elif name == column.kind.arguments(column.name)[0] and not values.is_floating_point():
            # A table of embeddings with fewer rows is refused now, not by the worker that meets the id.
            # Arrays of one size may hold another thing in each place, and the statistics are of all places.
            values[-1] = 0 if isinstance(column.kind, Array) else _largest_id(column, manifest)
        return values

    return tuple(sample(number, name) for number, name in enumerate(names))


def random_samples(
    names: Sequence[str], manifest: ShardManifest, num_rows: int, *, zero_ids: bool = False
) -> tuple[torch.Tensor, ...]:
    """Returns random rows of the inputs called `names`; an input of varying length gets one value per row.

    Args:
        zero_ids: Whether integers are 0, for networks that accept fewer ids in some elements of an array.
    """
    layout, generator = layout_in(manifest, names), torch.Generator().manual_seed(0)

    def sample(number: int, name: str) -> torch.Tensor:
        values, column = _zeros(name, manifest, num_rows), manifest.column_of(name)
        if layout and layout[number] == number:
            values[:] = torch.arange(num_rows)
        elif name not in column.kind.arguments(column.name):
            # The length of a padded row (full), or a null mask (no nulls).
            values[:] = column.kind.length or 0 if isinstance(column.kind, Padded) else 0
        elif values.is_floating_point():
            values.normal_(generator=generator)
        elif not zero_ids:
            values.random_(0, _largest_id(column, manifest) + 1, generator=generator)
        return values

    return tuple(sample(number, name) for number, name in enumerate(names))


def _zeros(name: str, manifest: ShardManifest, num_rows: int) -> torch.Tensor:
    array = manifest.described(name)
    return torch.from_numpy(np.zeros((num_rows, *array.shape), network_dtype(array.dtype)))


def _largest_id(column: Column, manifest: ShardManifest) -> int:
    if column.kind.num_ids is not None:
        return column.kind.num_ids - 1
    found = [columns[column.name].maximum for columns in manifest.stats.values() if column.name in columns]
    filled = int(column.kind.value) if isinstance(column.kind, Padded) else 0
    return max(filled, *(int(maximum) for maximum in found if maximum is not None), 0)


def prepared_samples(
    config: TrainConfig, manifest: ShardManifest, objects: UserObjects
) -> Sequence[torch.Tensor]:
    """Returns the arguments of `forward` for `PROBE_ROWS` rows, prepared as for a prediction."""
    inputs = samples(config.input_columns, manifest)
    if objects.transform_in_prediction is None:
        return inputs
    layout = layout_in(manifest, config.input_columns)
    prepare = objects.transform_in_prediction
    return try_transform(prepare, "transformInPrediction", inputs, None, layout)[0]


def probe(
    module: nn.Module, config: TrainConfig, manifest: ShardManifest, objects: UserObjects
) -> tuple[torch.Tensor, ...]:
    """Returns the module's outputs for `PROBE_ROWS` rows of zeros, or of the first and the last id.

    The rows are prepared as for a prediction.

    Raises:
        ValueError: The module cannot take the input columns, or does not return one tensor per label
            with one entry per row.
    """
    name = type(module).__name__
    inputs = prepared_samples(config, manifest, objects)
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
