"""The user's functions on batches: `transformBatch` in training, `transformInPrediction` in prediction.

`transformBatch` gets all rows of a rank's step. Its random numbers depend only on seed, step and rank. A
parameter `step_seed` gets a number that depends on seed and step only, for random numbers that are equal on
all ranks. If the attribute `changes_held_out` is true, the function also changes held-out rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.estimators.training.arguments import InputLayout, count_rows
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.user_code import signature_of
from ringspark.models.generators import common_seed, keep_shared_generators, seed_rank
from ringspark.models.meta_device import copy_module

Tensors = tuple[torch.Tensor, ...]

# Dropout uses the seed itself; the offset keeps both sequences of random numbers apart.
_SEED_OFFSET = 0x62617463


class BatchTransform:
    def __init__(self, function: Any, seed: int, rank: int, device: torch.device) -> None:
        self._function = prepare_function(function, device, training=True)
        self._seed, self._rank, self._device = seed + _SEED_OFFSET, rank, device
        self.changes_held_out = bool(getattr(function, "changes_held_out", False))

    def held_out(self, batch: Batch) -> Batch:
        """Changes held-out rows with the same random numbers after every epoch. Runs on every rank."""
        return self(batch, -1) if self.changes_held_out else batch

    def __call__(self, batch: Batch, step: int) -> Batch:
        """Returns the changed batch; `step` counts from 0 over all epochs. Runs on every rank."""
        gpus = [self._device] if self._device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=gpus), keep_shared_generators():
            seed_rank(self._seed, step, self._rank)
            function = self._function
            if takes(function, "step_seed"):
                function = partial(function, step_seed=common_seed(self._seed, step))
            given = (batch.inputs, batch.labels, batch.layout)
            inputs, labels = apply_transform(function, "transformBatch", *given)
        return replace(batch, inputs=inputs, labels=labels)


class PreparedNetwork(nn.Module):
    def __init__(self, function: Any, network: nn.Module, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.prepare = prepare_function(function, torch.device(device), training=False)
        self.network = network

    def forward(self, *inputs: torch.Tensor) -> Any:
        result = self.prepare(*inputs)
        # Unchecked, because torch.export would make the number of rows a constant.
        return self.network(*((result,) if isinstance(result, torch.Tensor) else result))


def prepare_inputs(function: Any, inputs: Tensors, layout: InputLayout = ()) -> Tensors:
    if function is None:
        return inputs
    return apply_transform(function, "transformInPrediction", inputs, layout=layout)[0]


def prepare_function(function: Any, device: torch.device, training: bool) -> Any:
    """Returns the user's function. A module is copied to `device` and frozen; `training` sets its mode."""
    if not isinstance(function, nn.Module):
        return function
    return copy_module(function).to(device).train(training).requires_grad_(False)


def apply_transform(
    function: Any, setting: str, inputs: Tensors, labels: Tensors | None = None, layout: InputLayout = ()
) -> tuple[Tensors, Tensors]:
    """Calls the function on a batch, and checks that it returns the expected number of tensors and rows."""
    num_rows = count_rows(inputs, layout)
    if not num_rows:
        # Only shapes and dtypes matter; a row of zeros shows them.
        zeros = _row_of_zeros(inputs), labels and _row_of_zeros(labels)
        found, others = apply_transform(function, setting, *zeros, layout)
        return tuple(t[:0] for t in found), tuple(t[:0] for t in others)
    # The number of values may change if rows vary in length.
    of_inputs = [num_rows if not layout or layout[i] in (None, i) else None for i in range(len(inputs))]
    if labels is None or not takes(function, "labels"):
        return _check_result(function(*inputs), setting, "inputs", of_inputs), labels or ()
    result = function(*inputs, labels=labels[0] if len(labels) == 1 else labels)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(f"{setting} takes labels and must return (inputs, labels), got {_describe(result)}")
    return (
        _check_result(result[0], setting, "inputs", of_inputs),
        _check_result(result[1], setting, "labels", [num_rows] * len(labels)),
    )


def takes(function: Any, name: str) -> bool:
    return name in signature_of(function).parameters


def try_transform(
    function: Any, setting: str, inputs: Tensors, labels: Tensors | None, layout: InputLayout = ()
) -> tuple[Tensors, Tensors]:
    """Calls the function on the driver, on copies of a few rows. Raises ValueError if it fails."""
    function = prepare_function(function, torch.device("cpu"), training=labels is not None)
    copies = tuple(t.clone() for t in inputs)
    given = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in inputs)
    try:
        with torch.no_grad(), keep_shared_generators():
            copied_labels = labels and tuple(t.clone() for t in labels)
            if labels is not None and takes(function, "step_seed"):
                function = partial(function, step_seed=0)
            return apply_transform(function, setting, copies, copied_labels, layout)
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(f"{setting} "):
            raise
        raise ValueError(
            f"{setting} cannot take inputs [{given}]: {type(error).__name__}: {error}; it is called on a "
            "whole batch, as transform(*inputs)"
        ) from error


def _row_of_zeros(tensors: Tensors) -> Tensors:
    return tuple(torch.zeros((1, *t.shape[1:]), dtype=t.dtype, device=t.device) for t in tensors)


def _check_result(result: Any, setting: str, what: str, rows: Sequence[int | None]) -> Tensors:
    """Returns the tensors as a tuple; `rows`: length of each, None for any; `what`: their name in errors."""
    tensors = (result,) if isinstance(result, torch.Tensor) else result
    if (
        not isinstance(tensors, tuple | list)
        or len(tensors) != len(rows)
        or not all(isinstance(t, torch.Tensor) and t.dim() for t in tensors)
        or any(n not in (None, len(t)) for t, n in zip(tensors, rows, strict=True))
    ):
        raise ValueError(
            f"{setting} must return {len(rows)} {what} of {max(filter(None, rows))} rows, as in its "
            f"input, got {_describe(result)}; change rows, but neither drop nor repeat them"
        )
    return tuple(tensors)


def _describe(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor {tuple(result.shape)}"
    if isinstance(result, tuple | list):
        return f"({', '.join(_describe(part) for part in result)})"
    return f"a {type(result).__name__}"
