"""ZeRO buckets: many small ones, three ranks, and gradients that arrive after their bucket was sent."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from ranks import TORCH_AND_SLOW_OTHERS, run_one, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.sharded.zero import SyncGroup, ZeroSync
from ringspark.estimators.training.precision import LossScaler


class Twice(nn.Module):
    """Two reentrant checkpoints use one layer, so its gradient arrives twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = nn.Linear(3, 7), nn.Linear(7, 7), nn.Linear(7, 1)
        self.precise = nn.Parameter(torch.ones(5, dtype=torch.double))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        return self.last(hidden) + self.precise.float().sum()


def _train(is_even: bool, rounds: int | None, collective: Collective) -> Any:
    net = Twice()
    kind = torch.optim.AdamW if is_even else torch.optim.Adafactor
    optimizer = kind(net.parameters(), lr=0.01)
    sync: GradientSync = GradientSync(net, optimizer)
    if collective.size > 1:
        # 64 bytes: one bucket per parameter, except for the smallest ones.
        sync = ZeroSync(
            net, optimizer, [SyncGroup(RankMesh.of(collective).shard_group)], rounds, bucket_bytes=64
        )
    for step in range(4):
        rows = torch.rand(5, 3, generator=torch.Generator().manual_seed(step))
        mine = rows[collective.rank :: collective.size]
        sync.optimizer.zero_grad()
        # On GPUs, flatten_parameters() of a recurrent layer moves weights in memory; a callback may too.
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
    return [{name: p.tolist() for name, p in net.named_parameters()}, state]


def _flat(value: object) -> list[float]:
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in _flat(value[key])]
    if isinstance(value, list):
        return [number for entry in value for number in _flat(entry)]
    assert isinstance(value, int | float)
    return [float(value)]


CASES = [(True, 2), (False, 2), (True, None)]


def _train_each(collective: Collective) -> list[Any]:
    return [_train(is_even, rounds, collective) for is_even, rounds in CASES]


@cache
def _ranks(collective: str) -> list[Any]:
    return run_ranks(3, collective, _train_each)


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
@pytest.mark.parametrize("case", CASES)
def test_many_buckets_and_late_gradients_give_the_weights_and_state_of_one_worker(collective, case):
    weights, state = run_one(partial(_train, *case))
    for rank, cases in enumerate(_ranks(collective)):
        own_weights, own_state = cases[CASES.index(case)]
        assert _flat(own_weights) == pytest.approx(_flat(weights), abs=1e-5)
        assert own_state.keys() == (set() if rank else state.keys())
        assert _flat(own_state) == pytest.approx([] if rank else _flat(state), abs=1e-5)
