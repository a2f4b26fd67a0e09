"""Converts the reader's NumPy columns to tensors on the device, in the dtypes that a network gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ringspark.estimators.training.arguments import InputLayout, slice_rows
from ringspark.pipelines.kinds.base import BatchArray

if TYPE_CHECKING:
    from ringspark.estimators.training.settings.config import TrainConfig

Array = npt.NDArray[Any]

# Bytes to which torch aligns tensors on CPUs.
ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's rows of one step, possibly none.

    Attributes:
        inputs: One tensor per argument of `forward`, each (rows, ...). The module `arguments` describes rows
            of varying length.
        labels: One tensor per output of the network, each (rows, ...).
        weight: Row weights, (rows,) fp32; None if every row has weight 1.
        soft_labels: Column `soft_label_column`, (rows,) or (rows, width); None without one.
    """

    inputs: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    weight: torch.Tensor | None
    layout: InputLayout = ()
    soft_labels: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return int(self.labels[0].shape[0])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields the tensors of all attributes."""
        for value in (getattr(self, each.name) for each in fields(self)):
            every = value if isinstance(value, tuple) else (value,)
            yield from (each for each in every if isinstance(each, torch.Tensor))

    def split(self, parts: int) -> list[Batch]:
        """Splits the batch into at most `parts` micro-batches, none of them empty."""
        parts = max(1, min(parts, self.num_rows))
        if parts == 1:
            return [self]
        ends = accumulate(len(part) for part in torch.tensor_split(self.labels[0], parts))
        return [self._slice(start, stop) for start, stop in pairwise([0, *ends])]

    def _slice(self, start: int, stop: int) -> Batch:
        return replace(
            self,
            inputs=tuple(slice_rows(self.inputs, self.layout, start, stop)),
            labels=tuple(values[start:stop] for values in self.labels),
            weight=None if self.weight is None else self.weight[start:stop],
            soft_labels=None if self.soft_labels is None else self.soft_labels[start:stop],
        )


def network_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Returns the dtype in which a network gets a column in training, in transform and in checks.

    Floating values and booleans become fp32. Integers become int64: in fp32 an id of 16,777,217 would become
    16,777,216, and int8 would overflow in a network's arithmetic. Raises ValueError for other dtypes.
    """
    kind = np.dtype(dtype).kind
    if kind not in "fbiu":
        raise ValueError(
            f"a network takes numbers and booleans, got dtype {np.dtype(dtype)}; give real and "
            "imaginary parts as two columns, or decode the values into numbers"
        )
    return np.dtype(np.float32 if kind in "fb" else np.int64)


def to_network_input(values: Array) -> Array:
    return np.require(values, network_dtype(values.dtype), ["C", "W"])


def zeros(array: BatchArray, rows: int) -> torch.Tensor:
    """Returns rows of zeros with a column's shape and `network_dtype`."""
    return torch.from_numpy(np.zeros((rows, *array.shape), network_dtype(array.dtype)))


def move_batches(
    device: torch.device, columns: Iterable[dict[str, Array]], config: TrainConfig, layout: InputLayout = ()
) -> Iterator[Batch]:
    """Yields the reader's batches on `device`; to a GPU, a second stream copies each batch in advance."""
    if device.type != "cuda":
        yield from (to_batch(columns_of, config, device, layout) for columns_of in columns)
        return
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for columns_of in columns:
        with torch.cuda.stream(stream):
            batch = to_batch(columns_of, config, device, layout)
            copied = stream.record_event()
        if ahead is not None:
            yield _wait_for_copy(*ahead, device)
        ahead = batch, copied
    if ahead is not None:
        yield _wait_for_copy(*ahead, device)


def _wait_for_copy(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for tensor in batch.tensors():
        # Its memory belongs to the other stream, which must not reuse it before this stream has used it.
        tensor.record_stream(current)
    return batch


def to_tensor(values: Array, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(to_network_input(values))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    # A matrix product rounds differently if rows are not aligned, and a resumed reader may split its blocks
    # elsewhere. The copy is aligned like all of torch's own tensors.
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def to_batch(
    columns: dict[str, Array], config: TrainConfig, device: torch.device, layout: InputLayout = ()
) -> Batch:
    def given(number: int, name: str) -> torch.Tensor:
        values = columns[name]
        # The reader appends the end of the last row to the starts.
        return to_tensor(values[:-1] if layout and layout[number] == number else values, device)

    def label(name: str) -> torch.Tensor:
        # A copy if the column is also an input: a network or a transform may change its inputs in place.
        values = columns[name]
        return to_tensor(values.copy() if name in config.input_columns else values, device)

    weight = None
    if config.weight_column is not None:
        weight = to_tensor(columns[config.weight_column].astype(np.float32), device)
    soft = config.soft_label_column
    return Batch(
        inputs=tuple(given(number, name) for number, name in enumerate(config.input_columns)),
        labels=tuple(label(name) for name in config.label_columns),
        weight=weight,
        layout=layout,
        soft_labels=None if soft is None else to_tensor(columns[soft], device),
    )
