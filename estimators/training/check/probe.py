"""Makes a few rows in the shapes and types of the data, and runs a module on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ringspark.estimators.training.arguments import read_layout
from ringspark.estimators.training.batch_transforms import try_transform
from ringspark.estimators.training.feed import zeros
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models.outputs import as_outputs
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Array, Padded

PROBE_ROWS = 2

Shape = tuple[int, ...]


def samples(names: Sequence[str], manifest: ShardManifest) -> tuple[torch.Tensor, ...]:
    """Returns `PROBE_ROWS` rows of zeros per input; in the last row, categories have their largest number.

    A row of varying length holds one value.
    """

    def fill(name: str, values: torch.Tensor, column: Column) -> None:
        if name == column.kind.arguments(column.name)[0] and not values.is_floating_point():
            # The largest id shows now if an embedding table has too few rows. Not in an array, whose elements
            # may hold different things, while its statistics count them together.
            values[-1] = 0 if isinstance(column.kind, Array) else _largest_id(column, manifest)

    return _make_rows(names, manifest, PROBE_ROWS, fill)


def random_samples(
    names: Sequence[str], manifest: ShardManifest, num_rows: int, *, zero_ids: bool = False
) -> tuple[torch.Tensor, ...]:
    """Returns random rows per input; a row of varying length holds one value.

    `zero_ids` sets all integers to 0, because random integers may be too large for an embedding table.
    """
    generator = torch.Generator().manual_seed(0)

    def fill(name: str, values: torch.Tensor, column: Column) -> None:
        if name not in column.kind.arguments(column.name):
            # The length of a padded row (full), or a null mask (no nulls).
            values[:] = column.kind.length or 0 if isinstance(column.kind, Padded) else 0
        elif values.is_floating_point():
            values.normal_(generator=generator)
        elif not zero_ids:
            values.random_(0, _largest_id(column, manifest) + 1, generator=generator)

    return _make_rows(names, manifest, num_rows, fill)


def _make_rows(
    names: Sequence[str],
    manifest: ShardManifest,
    num_rows: int,
    fill: Callable[[str, torch.Tensor, Column], None],
) -> tuple[torch.Tensor, ...]:
    """Returns rows of zeros; `fill` then changes the rows of each input."""
    layout, inputs = read_layout(manifest, names), []
    for number, name in enumerate(names):
        array, column = manifest.described(name), manifest.column_of(name)
        values = zeros(array, num_rows)
        if layout and layout[number] == number:
            values[:] = torch.arange(num_rows)  # where each row starts
        else:
            fill(name, values, column)
        inputs.append(values)
    return tuple(inputs)


def _largest_id(column: Column, manifest: ShardManifest) -> int:
    if column.kind.num_ids is not None:
        return column.kind.num_ids - 1
    largest = [columns[column.name].maximum for columns in manifest.stats.values() if column.name in columns]
    filled = int(column.kind.value) if isinstance(column.kind, Padded) else 0
    return max(filled, *(int(maximum) for maximum in largest if maximum is not None), 0)


def run_module(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """Calls the module in evaluation mode, and leaves it in training mode."""
    module.eval()
    try:
        with torch.no_grad():
            return module(*inputs)
    finally:
        module.train()


def probe(
    module: nn.Module, config: TrainConfig, manifest: ShardManifest, objects: UserObjects
) -> tuple[torch.Tensor, ...]:
    """Returns the module's outputs for a few sample rows, which transformInPrediction prepares.

    Raises ValueError if the module fails, or does not return one tensor per label with one entry per row.
    """
    name = type(module).__name__
    inputs, prepare = samples(config.input_columns, manifest), objects.transform_in_prediction
    if prepare is not None:
        layout = read_layout(manifest, config.input_columns)
        inputs, _ = try_transform(prepare, "transformInPrediction", inputs, None, layout)
    given = ", ".join(
        f"{column} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for column, t in zip(config.input_columns, inputs, strict=True)
    )
    try:
        output = run_module(module, inputs)
    except Exception as error:
        remedy = "match the model's input size to the columns"
        if len(inputs) > 1 and "positional argument" in str(error):
            remedy = "forward gets one argument per column; join the columns by VectorAssembler or F.array"
        if others := {p.dtype for p in module.parameters() if p.is_floating_point()} - {torch.float32}:
            remedy = f"its weights are {', '.join(map(str, others))}, so cast the network with .float()"
        else:
            with suppress(Exception):  # user code may raise anything
                module.eval()(*inputs)
                remedy = (
                    "forward works only with gradients, but predictions run under torch.no_grad(); put `with "
                    "torch.enable_grad():` around the code in forward that calls autograd"
                )
        raise ValueError(
            f"model {name} cannot take the input columns [{given}]: {type(error).__name__}: {error}; {remedy}"
        ) from error
    outputs = as_outputs(output, f"model {name}")
    if len(outputs) != len(config.label_columns):
        raise ValueError(
            f"model {name} returns {len(outputs)} tensors for the labels {list(config.label_columns)}, but "
            "must return one each; set labelCols of TorchEstimator, or return only the logits or values"
        )
    for tensor in outputs:
        if tensor.dim() == 0 or tensor.shape[0] != PROBE_ROWS:
            raise ValueError(
                f"model {name} must return one output per row, shape ({PROBE_ROWS}, ...) for {PROBE_ROWS} "
                f"rows, got {tuple(tensor.shape)}; keep the batch dimension first"
            )
    return outputs
