"""Small parts of the training package, each against torch or its definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ringspark.estimators.training.checkpoint.weights import (
    WEIGHTS,
    load_checkpoint,
    read_info,
    save_checkpoint,
)
from ringspark.estimators.training.feed import move_batches, to_batch, to_network_input, to_tensor
from ringspark.estimators.training.settings.config import TrainConfig

CPU = torch.device("cpu")


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


def test_a_checkpoint_gives_the_weights_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, other = nn.Linear(3, 2), nn.Linear(3, 2)
    info = save_checkpoint(str(tmp_path / "c"), module, epoch=2, step=5)
    assert load_checkpoint(str(tmp_path / "c"), other) == info
    assert info.epoch == 2
    assert info.step == 5
    assert all(a.equal(b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.ModuleDict:
        module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        module["b"].weight = module["a"].weight
        return module

    saved, loaded = tied(), tied()
    save_checkpoint(str(tmp_path / "c"), saved)
    load_checkpoint(str(tmp_path / "c"), loaded)
    assert loaded["a"].weight is loaded["b"].weight
    assert loaded["a"].weight.equal(saved["a"].weight)


def test_a_folder_without_checkpoint_a_damaged_one_and_a_foreign_one_are_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        read_info(uri)
    save_checkpoint(uri, nn.Linear(3, 2))
    with pytest.raises(ValueError, match="is not of this model"):
        load_checkpoint(uri, nn.Linear(4, 2))
    weights = tmp_path / "c" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ValueError, match="the file is damaged"):
        load_checkpoint(uri, nn.Linear(3, 2))


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
