"""Batches as tensors: memory alignment of a column changes nothing."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from torch import nn

from ringspark.estimators.training.feed import Batch, to_batch, to_tensor
from ringspark.estimators.training.settings.config import TrainConfig


def test_rows_give_the_same_bits_wherever_they_lie_in_memory() -> None:
    """The reader slices batches from larger blocks, at different offsets after a resume."""
    rows = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    network = nn.Linear(6, 8)
    found = set()
    for offset in range(16):
        column = np.empty(rows.size + offset, np.float32)[offset:].reshape(rows.shape)
        column[:] = rows
        found.add(network(to_tensor(column, torch.device("cpu"))).detach().numpy().tobytes())
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
    batch = to_batch({"x": torch.ones(4, 3).numpy()}, config, torch.device("cpu"))
    batch.inputs[0].zero_()
    assert batch.labels[0].tolist() == [[1.0] * 3] * 4
