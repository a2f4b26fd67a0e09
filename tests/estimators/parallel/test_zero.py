"""Buckets: many small ones, on three ranks, and gradients that come after their bucket has left."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringspark.estimators.collectives import COLLECTIVES, Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.parallel.base import GradientSync, PlainSync
from ringspark.estimators.parallel.sharded.zero import ShardedSync, whole_gang
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.precision import LossScaler

GANGS = [name for name in COLLECTIVES if name != "local"]


class Twice(nn.Module):
    """Its layer is used by two reentrant checkpoints: two backward passes, so its gradient comes twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = nn.Linear(3, 7), nn.Linear(7, 7), nn.Linear(7, 1)
        self.precise = nn.Parameter(torch.ones(5, dtype=torch.double))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        return self.last(hidden) + self.precise.float().sum()  # type: ignore[no-any-return]


def _train(is_even: bool, rounds: int | None, collective: Collective, device: str, status: Status) -> str:
    net = Twice()
    kind = torch.optim.AdamW if is_even else torch.optim.Adafactor
    optimizer = kind(net.parameters(), lr=0.01)
    sync: GradientSync = PlainSync(net, optimizer)
    if collective.size > 1:
        # 64 bytes: a bucket for each parameter but the smallest ones.
        sync = ShardedSync(net, optimizer, [whole_gang(collective)], rounds, bucket_bytes=64)
    for step in range(4):
        rows = torch.rand(5, 3, generator=torch.Generator().manual_seed(step))
        mine = rows[collective.rank :: collective.size]
        sync.optimizer.zero_grad()
        # On GPUs a recurrent layer's flatten_parameters() moves weights to other memory; a callback may too.
        net.first.weight.data = net.first.weight.data.clone()
        if step == 2:
            net.shared.weight.data = net.shared.weight.data.t().contiguous().t()
        for i, part in enumerate(mine.tensor_split(min(2, len(mine)))):
            with sync.micro_batch(last=i == min(2, len(mine)) - 1):
                (sync.module(part).square().sum() / len(rows)).backward()
        sync.reduce()
        sync.clip_gradients(1.0)
        sync.step(LossScaler("fp32", torch.device("cpu")))
    state = {
        name: {key: torch.as_tensor(value).tolist() for key, value in own.items()}
        for name, own in sync.optimizer_state().items()
    }
    return json.dumps([{name: p.tolist() for name, p in net.named_parameters()}, state])


def _flat(value: object) -> list[float]:
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in _flat(value[key])]
    if isinstance(value, list):
        return [number for entry in value for number in _flat(entry)]
    assert isinstance(value, int | float)
    return [float(value)]


@pytest.mark.distributed
@pytest.mark.parametrize("collective", GANGS)
@pytest.mark.parametrize(("is_even", "rounds"), [(True, 2), (False, 2), (True, None)])
def test_many_buckets_and_late_gradients_give_the_weights_and_state_of_one_worker(
    collective: str, is_even: bool, rounds: int | None
) -> None:
    work = partial(_train, is_even, rounds)
    weights, state = json.loads(work(LocalCollective(), "cpu", Status("here")))
    for rank, text in enumerate(run_spawned(3, collective, work, timeout_seconds=120)):
        own_weights, own_state = json.loads(text)
        assert _flat(own_weights) == pytest.approx(_flat(weights), abs=1e-5)
        assert own_state.keys() == (set() if rank else state.keys())
        assert _flat(own_state) == pytest.approx([] if rank else _flat(state), abs=1e-5)
