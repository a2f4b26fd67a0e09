"""Pipelines compute what one process computes, by every schedule, whatever rows there are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.collectives import Collective
from ringspark.estimators.failures import WorkerError
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.parallel.mesh import Mesh
from ringspark.estimators.parallel.model.pipeline import (
    SCHEDULES,
    PipelineOptions,
    PipelinePasses,
    pipelined,
)
from ringspark.estimators.parallel.model.pipeline.delayed import late_by_depth
from ringspark.estimators.training.phase import Status
from ringspark.models import ModelSpec, apply_activation_checkpoint

pytestmark = pytest.mark.distributed

_TRANSFORMER = {"vocab_size": 11, "max_seq_len": 6, "dim": 8, "depth": 6, "num_heads": 2}
FAMILIES: dict[str, ModelSpec] = {
    "mlp": ModelSpec(
        "mlp", {"in_features": 5, "hidden": [8] * 7, "out_features": 3, "norm": "layer", "activation": "gelu"}
    ),
    "transformer_classifier": ModelSpec(
        "transformer_classifier", {**_TRANSFORMER, "out_features": 3, "padding_id": 0}
    ),
    "transformer_lm": ModelSpec("transformer_lm", _TRANSFORMER),
}
FLUSHED = [name for name, schedule in SCHEDULES.items() if schedule.order is not None]
Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]


def _batch(family: str, rows: int, seed: int, seq: int = 6) -> Batch:
    """Returns a network's arguments and labels."""
    draw = torch.Generator().manual_seed(seed)
    if family == "mlp":
        return (torch.randn(rows, 5, generator=draw),), torch.randint(0, 3, (rows,), generator=draw)
    ids = torch.randint(1, 11, (rows, seq), generator=draw)
    if family == "transformer_lm":
        return (ids,), torch.randint(0, 11, (rows, seq), generator=draw)
    ids[rows // 2 :, seq - 2 :] = 0  # filled up
    return (ids,), torch.randint(0, 3, (rows,), generator=draw)


def _split(batch: Batch, rows: Sequence[int]) -> list[Batch]:
    inputs, labels = batch
    pieces = zip(*(torch.split(value, list(rows)) for value in (*inputs, labels)), strict=True)
    return [(tuple(piece[:-1]), piece[-1]) for piece in pieces]


def _loss(output: torch.Tensor, label: torch.Tensor, divisor: float) -> torch.Tensor:
    return F.cross_entropy(output.float(), label, reduction="sum") / divisor


def _whole(network: nn.Module, micros: Sequence[Batch], around: Callable[[], Any] = nullcontext) -> float:
    """Adds the gradients of a step in one process; returns the loss."""
    divisor = float(sum(label.numel() for _, label in micros))
    total = 0.0
    for inputs, label in micros:
        with around():
            output = network(*inputs)
        loss = _loss(output, label, divisor)
        loss.backward()
        total += float(loss.detach())
    return total


def _piped(
    passes: PipelinePasses,
    micros: Sequence[Batch],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[bool, float]:
    divisor = float(sum(label.numel() for _, label in micros))
    seen: dict[int, float] = {}

    def loss(output: torch.Tensor, index: int) -> torch.Tensor:
        assert index not in seen
        value = _loss(output, micros[index][1], divisor)
        seen[index] = float(value.detach())
        return value

    has_gradients = passes.train([inputs for inputs, _ in micros], loss, around)
    assert sorted(seen) == (list(range(len(micros))) if passes.has_outputs else [])
    return has_gradients, sum(seen.values())


def _made(family: str, mesh: Mesh, schedule: str, **options: Any) -> tuple[nn.Module, PipelinePasses]:
    """Returns the whole network, and its pipeline."""
    torch.manual_seed(3)
    whole = FAMILIES[family].build()
    cut = FAMILIES[family].build()
    cut.load_state_dict(whole.state_dict())
    least, _ = SCHEDULES[schedule].virtual
    return whole, pipelined(cut, mesh, PipelineOptions(schedule=schedule, virtual=least, **options))


def _difference(one: Iterable[tuple[str, Any]], other: dict[str, Any]) -> float:
    """Returns the largest difference between tensors of the same names."""
    found = [0.0]
    for name, tensor in one:
        if tensor is None or other[name] is None:
            assert tensor is None
            assert other[name] is None
            continue
        found.append(float((tensor - other[name]).detach().abs().max()))
    return max(found)


def _gradients(network: nn.Module) -> list[tuple[str, torch.Tensor | None]]:
    return [(name, parameter.grad) for name, parameter in network.named_parameters()]


def _all_gradients(collective: Collective, device: str, status: Status) -> str:
    mesh = Mesh.of(collective, {"pipeline": collective.size})
    found: dict[str, float] = {}
    for schedule in FLUSHED:
        for family in FAMILIES:
            whole, passes = _made(family, mesh, schedule)
            # A short last micro-batch; fewer micro-batches than ranks; other lengths of rows; one row.
            for number, rows in enumerate([(3, 3, 3, 3, 1), (2,), (3, 3, 3, 3, 1), (1, 1, 1)]):
                micros = _split(_batch(family, sum(rows), number, seq=6 - number % 2), rows)
                whole.zero_grad()
                passes.network.zero_grad()
                want = _whole(whole, micros)
                has_gradients, loss = _piped(passes, micros)
                assert has_gradients
                assert not passes.has_outputs or abs(loss - want) < 1e-6
                name = f"{schedule} {family} {number} {rows}"
                found[name] = _difference(_gradients(passes.network), dict(_gradients(whole)))
            inputs, _ = _batch(family, 4, 9)
            passes.network.eval()
            whole.eval()
            output = passes.evaluate(inputs)
            passes.finish()
            assert (output is None) != passes.has_outputs
            if output is not None:
                assert not output.requires_grad
                found[f"{schedule} {family} evaluation"] = _difference([("", output)], {"": whole(*inputs)})
            # A step in which this copy of the network has no rows.
            assert passes.train([], _loss) is False
    return json.dumps(found)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_schedule_gives_the_gradients_of_one_process(size: int) -> None:
    texts = run_spawned(size, "torch", _all_gradients)
    for text in texts:
        # The whole network's outputs are on one rank alone, where the last stage is.
        assert len(json.loads(text)) == len(FLUSHED) * len(FAMILIES) * (5 if text is texts[0] else 4)
        assert max(json.loads(text).values()) < 1e-6, text
