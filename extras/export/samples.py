"""Sample inputs of a network, and programs recorded from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ringspark.estimators.columns.inputs import ModelInput, layout_of_inputs
from ringspark.estimators.training.arguments import InputLayout
from ringspark.estimators.training.batch_transforms import prepare_function, prepare_inputs
from ringspark.estimators.training.feed import zeros
from ringspark.extras.export.recording import record_program
from ringspark.models.program import NoProgramError, Program

# Without a maximum, torch 2.6 cannot export a mixture of experts.
MAX_ROWS = 2**31 - 1
# Values per row of varying length in a sample.
_VALUES = 3


def make_samples(inputs: Sequence[ModelInput], prepare: Any) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns a function from a number of rows to example inputs of the network."""
    if any(item.column is None for item in inputs):
        raise NoProgramError("the types of its inputs are not known")
    function = prepare_function(prepare, torch.device("cpu"), training=False)

    def samples(rows: int, length: int | None = None) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return prepare_inputs(function, zeros_of(inputs, rows, length))

    return samples


def record_module(
    module: nn.Module, inputs: Sequence[ModelInput], prepare: Any = None, inner: Iterable[str] = ()
) -> Program:
    """Records the module as a program for any number of rows; raises NoProgramError if that fails.

    Args:
        prepare: The user's function transformInPrediction; the program takes the results of `prepare`.
        inner: Names of modules whose outputs the program keeps.
    """
    samples = make_samples(inputs, prepare)
    arrays = [item.array for item in inputs]
    longest = max((array.shape[0] for array in arrays if array.varies), default=0)
    # A trace may follow a branch on the length that holds only for the traced length.
    every, some = range(1, longest + 1), max(1, longest // 16)
    return record_program(
        module, samples, varying_sizes(inputs), [*every[:32], *every[32::some]], tuple(inner)
    )


def zeros_of(inputs: Sequence[ModelInput], rows: int, length: int | None = None) -> tuple[torch.Tensor, ...]:
    """Returns inputs of zeros, and offsets for ragged columns.

    A ragged row has `_VALUES` values, a padded row at most `length` values.
    """
    made = []
    for number, (item, place) in enumerate(zip(inputs, _places(inputs), strict=True)):
        array = item.array
        if place == number:
            made.append(torch.arange(rows) * _VALUES)
            continue
        sample = zeros(array, rows if place is None else rows * _VALUES)
        if array.varies:
            # A single row has full length; several rows differ in length.
            sample = sample[:, : length or (rows + _VALUES if rows > 1 else None)]
        made.append(sample)
    return tuple(made)


def varying_sizes(inputs: Sequence[ModelInput], max_rows: int = MAX_ROWS) -> list[dict[int, Any]]:
    # Equal dimensions share a name: the rows, and the concatenated arrays of one column.
    batch = torch.export.Dim("batch", min=1, max=max_rows)
    ends: dict[int, Any] = {}
    dims = []
    for number, (item, place) in enumerate(zip(inputs, _places(inputs), strict=True)):
        if place is not None and place != number:
            dims.append({0: ends.setdefault(place, torch.export.Dim(f"values{place}", min=0))})
        else:
            # torch may refuse a bound on a length that the network does not treat specially.
            dims.append({0: batch} | ({1: torch.export.Dim.AUTO} if item.array.varies else {}))
    return dims


def _places(inputs: Sequence[ModelInput]) -> InputLayout:
    return layout_of_inputs(inputs) or (None,) * len(inputs)
