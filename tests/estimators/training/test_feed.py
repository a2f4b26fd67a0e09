"""Batches as tensors: their dtypes, their rows, and the memory of a column."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ringspark.estimators.training.feed import Batch, move_batches, to_batch, to_network_input, to_tensor
from ringspark.estimators.training.settings.config import TrainConfig

CPU = torch.device("cpu")


def test_rows_give_the_same_bits_wherever_they_lie_in_memory() -> None:
    """The reader slices batches from larger blocks, at different offsets after a resume."""
    rows = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    network = nn.Linear(6, 8)
    found = set()
    for offset in range(16):
        column = np.empty(rows.size + offset, np.float32)[offset:].reshape(rows.shape)
        column[:] = rows
        found.add(network(to_tensor(column, CPU)).detach().numpy().tobytes())
    assert len(found) == 1, f"{len(found)} results of the same rows"


def test_every_tensor_of_a_batch_is_recorded_on_the_computing_stream() -> None:
    one = {name: torch.zeros(2) for name in ("weight", "soft_labels")}
    batch = Batch(inputs=(torch.zeros(2), torch.ones(2)), labels=(torch.zeros(2),), **one)
    held = [value for each in fields(batch) for value in (getattr(batch, each.name),) if value != ()]
    tensors = [tensor for value in held for tensor in (value if isinstance(value, tuple) else (value,))]
    assert len(tensors) == 5
    assert {id(tensor) for tensor in batch.tensors()} == {id(tensor) for tensor in tensors}


def test_a_label_that_is_also_an_input_has_its_own_memory() -> None:
    """Without a copy, both share an aligned array, and a network may change its inputs in place."""
    config = TrainConfig(shards_uri="", run_uri="", input_columns=("x",), label_columns=("x",))
    batch = to_batch({"x": torch.ones(4, 3).numpy()}, config, CPU)
    batch.inputs[0].zero_()
    assert batch.labels[0].tolist() == [[1.0] * 3] * 4


def test_integers_stay_exact_and_floats_become_fp32() -> None:
    ids = np.array([16_777_217, -(2**53) - 1], dtype=np.int64)
    assert to_tensor(ids, CPU).tolist() == ids.tolist()
    assert to_tensor(np.array([100], dtype=np.int8), CPU).dtype == torch.int64
    assert to_tensor(np.array([0.5], dtype=np.float64), CPU).dtype == torch.float32
    assert to_tensor(np.array([True, False]), CPU).tolist() == [1.0, 0.0]


def test_micro_batches_hold_every_row_once_and_none_is_empty() -> None:
    columns = {"x": np.arange(10, dtype=np.float32).reshape(5, 2), "y": np.arange(5), "w": np.ones(5)}
    names: dict[str, Any] = {"input_columns": ("x",), "label_columns": ("y",), "weight_column": "w"}
    batch = to_batch(columns, TrainConfig(shards_uri="", run_uri="", **names), CPU)
    parts = batch.split(3)
    assert [p.num_rows for p in parts] == [2, 2, 1]
    assert torch.cat([p.inputs[0] for p in parts]).equal(batch.inputs[0])
    assert torch.cat([p.weight for p in parts if p.weight is not None]).equal(batch.weight)
    assert len(batch.split(9)) == 5


def test_what_no_network_dtype_holds_is_refused() -> None:
    """As int64, a complex number would lose its imaginary part and its fraction."""
    with pytest.raises(ValueError, match="got dtype complex64; give real and imaginary parts as two columns"):
        to_network_input(np.array([1.5 + 2j], dtype="complex64"))


def test_on_the_cpu_a_batch_is_made_when_its_step_comes() -> None:
    read: list[int] = []

    def columns() -> Iterator[dict[str, np.ndarray]]:
        for number in range(3):
            read.append(number)
            yield {"x": np.full((2, 1), number, np.float32), "y": np.full(2, number)}

    config = TrainConfig(shards_uri="", run_uri="", input_columns=("x",), label_columns=("y",))
    for number, batch in enumerate(move_batches(CPU, columns(), config)):
        assert read == list(range(number + 1))
        assert torch.equal(batch.labels[0], torch.full((2,), number))
