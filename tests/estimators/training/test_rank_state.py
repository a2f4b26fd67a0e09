"""Rank states in a checkpoint; they need no more memory in a larger gang."""

import io
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peak_memory import memory_use
from ranks import run_ranks
from short_sync import sync_of
from small_training import Runs, columns_of

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.in_process import run_in_turns
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.rank_state import RankState, gather_ranks
from ringspark.estimators.training.checkpoint.resume import Recovery
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.worker import train_worker
from ringspark.models import ModelSpec

WIDTH = 1024
# Weights and momentum of a rank.
STATE_BYTES = 2 * WIDTH * WIDTH * 4


def _peaks(config: TrainConfig, collective: Collective) -> dict[str, int]:
    """Trains one epoch, then resumes for another; returns the peak bytes of `save` and `load`."""
    found = {}

    def measure(name: str, function: Callable[..., None]) -> None:
        def measured(*arguments: Any) -> None:
            found[name] = memory_use(lambda: function(*arguments)).peak

        setattr(Recovery, name, measured)

    measure("save", Recovery.save)
    measure("load", Recovery.load)
    for epochs in (1, 2):
        train_worker(replace(config, epochs=epochs), collective)
    return found


@pytest.mark.telling
@pytest.mark.distributed
@pytest.mark.extras
def test_a_rank_holds_the_state_of_one_other_rank_at_most(runs: Runs) -> None:
    """In addition to its own state, and the copy that rank 0 writes."""
    config = runs.config(
        columns_of(64, WIDTH),
        model=ModelSpec("mlp", {"in_features": WIDTH, "hidden": [WIDTH], "out_features": 1}),
        optimizer="momentum",
        num_workers=5,
        sync=sync_of(local="training"),
        checkpoint_every_steps=1,
        collective="torch",
    )
    peaks = run_ranks(5, "torch", partial(_peaks, config))
    assert {name for own in peaks for name in own} == {"save", "load"}
    assert max(peak for own in peaks for peak in own.values()) < 3 * STATE_BYTES, peaks


def _state(rank: int) -> RankState:
    """Returns the state of a rank; rank 1 has too many bytes to share a gather."""
    tensors = {
        "bytes": torch.full((5,), rank, dtype=torch.uint8),
        "flag": torch.tensor(True),
        "none": torch.zeros(0),
        "turned": torch.arange(6.0).view(2, 3).t() + rank,
        "weights": torch.rand(1 << 18 if rank == 1 else 3, dtype=torch.float64),
    }
    return RankState(tensors=tensors, values={"rank": rank})


def test_the_gathered_states_are_the_file_of_all_tensors() -> None:
    states = [_state(rank) for rank in range(4)]
    first, *others = run_in_turns(4, lambda world: gather_ranks(states[world.rank], world))
    assert [own["rank"] for own in first.values] == [0, 1, 2, 3]
    assert not any(ranks.values for ranks in others)
    whole = {f"{rank}/{k}": t for rank, own in enumerate(states) for k, t in own.tensors.items()}
    expected, found = io.BytesIO(), io.BytesIO()
    tensor_file.write(whole, expected)
    first.write(found)
    assert found.getvalue() == expected.getvalue()


def test_a_full_temporary_folder_costs_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    first, _ = run_in_turns(2, lambda world: gather_ranks(_state(world.rank), world))
    with pytest.raises(OSError, match="missing"):
        first.write(io.BytesIO())
