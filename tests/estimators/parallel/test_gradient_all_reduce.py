"""Which gradients a rank sends and which it refuses, without a second rank."""

import os
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # a late import by an optimizer would keep the process group alive
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from small_networks import Net
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringspark.estimators.collectives import Collective, Member, RendezvousInfo
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.torch_collective import TorchCollective
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.data.gradient_all_reduce import (
    FLAT_BYTES,
    NETWORK_FLAT_BYTES,
    GradientAllReduce,
    choose_bucket_bytes,
)
from ringspark.estimators.parallel.data.gradient_buckets import BUCKET_BYTES
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.sharded.zero import SyncGroup, ZeroSync


def _twice(network: Net, x: torch.Tensor) -> torch.Tensor:
    """Recomputes its layer twice, each time in a separate backward pass."""
    for _ in range(2):
        x = checkpoint(network.layer, x, use_reentrant=True)
    return x


@pytest.mark.parametrize("bucket_bytes", [1, None])
def test_a_gradient_that_comes_again_after_its_bucket_left_is_refused(bucket_bytes):
    """A single all-reduce starts after the backward pass, so its gradients may come in several parts."""
    module = Net(_twice, layer=nn.Linear(2, 2))
    rows = torch.ones(3, 2, requires_grad=True)
    expected = torch.autograd.grad(module.layer(module.layer(rows)).sum(), module.layer.weight)[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sync = GradientAllReduce(module, optimizer, LocalCollective(), bucket_bytes=bucket_bytes)
    with sync.micro_batch(last=True):
        loss = sync.module(rows).sum()
        if bucket_bytes is not None:
            refusal = r"a parameter got a second gradient .*; checkpoint .* use_reentrant=False"
            with pytest.raises(ValueError, match=refusal):
                loss.backward()
            return
        loss.backward()
    sync.reduce()
    assert torch.allclose(module.layer.weight.grad, expected)


class InPlace(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


@pytest.mark.parametrize("bucket_bytes", [1 << 20, None])
def test_gradients_that_an_optimizer_zeroes_in_place_stay_beside_a_missing_one(bucket_bytes):
    """The zeroed gradients stay in the buffer; the unused gradient stays None."""
    module = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1)])
    optimizer = InPlace(module.parameters(), lr=0.1)
    sync = GradientAllReduce(module, optimizer, LocalCollective(), bucket_bytes=bucket_bytes)
    gradients = []
    for _ in range(3):
        optimizer.zero_grad()
        with sync.micro_batch(last=True):
            module[0](torch.ones(3, 2)).sum().backward()
        sync.reduce()
        gradients.append(module[0].weight.grad.tolist())
    assert gradients == [[[3.0, 3.0]]] * 3
    assert module[1].weight.grad is None


@given(st.integers(1, 1 << 34))
def test_buckets_over_a_network_leave_the_backward_pass_something_to_hide(num_bytes):
    """Overlap does not help over shared memory, and small networks lose more on extra messages."""
    size = choose_bucket_bytes(num_bytes, by_network=True)
    assert (size is None) == (num_bytes <= NETWORK_FLAT_BYTES)
    if size is not None:
        assert 1 << 20 <= size <= BUCKET_BYTES
        assert num_bytes >= 2 * size
    if num_bytes <= FLAT_BYTES:
        assert choose_bucket_bytes(num_bytes, by_network=False) is None


def _summed(module: nn.Module, optimizer: torch.optim.Optimizer, collective: Collective) -> GradientSync:
    return GradientAllReduce(module, optimizer, collective, bucket_bytes=1)


def _zero(module: nn.Module, optimizer: torch.optim.Optimizer, collective: Collective) -> GradientSync:
    return ZeroSync(module, optimizer, [SyncGroup(RankMesh.of(collective).shard_group)], 1, bucket_bytes=8)


@pytest.mark.parametrize("tie", [_summed, _zero])
def test_a_callback_may_differentiate_between_steps(tie):
    """A backward pass outside a step sends nothing and does not affect the next step."""
    layers = {"first": nn.Linear(2, 2), "last": nn.Linear(2, 1)}
    module = Net(lambda net, x: net.last(checkpoint(net.first, x, use_reentrant=False)), **layers)
    alone = deepcopy(module)
    sync = tie(module, torch.optim.SGD(module.parameters(), lr=0.1), LocalCollective())
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    x = torch.ones(3, 2)
    for _ in range(3):
        sync.optimizer.zero_grad()
        with sync.micro_batch(last=True):
            sync.module(x).sum().backward()
        sync.reduce()
        sync.step(torch.amp.GradScaler("cpu", enabled=False))
        module(x).sum().backward()
        plain.zero_grad()
        alone(x).sum().backward()
        plain.step()
    assert torch.equal(*(nn.utils.parameters_to_vector(m.parameters()) for m in (module, alone)))


def _sockets() -> int:
    # The descriptor of listdir is closed before its link is read.
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum("socket:" in os.readlink(link) for link in links if os.path.islink(link))


@pytest.mark.parametrize("tie", [_summed, _zero])
def test_a_rank_that_fails_in_its_backward_pass_closes_its_connections(tie):
    """The error keeps the frames alive; a running all-reduce would keep the group and block its peers."""
    before = _sockets()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    info = RendezvousInfo(address="", secret=b"")
    collective = TorchCollective(Member(), info, SimpleNamespace(close=lambda: None))
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def fails(gradient: torch.Tensor) -> None:
        raise KeyError("lost")

    module[0].weight.register_hook(fails)
    sync = tie(module, torch.optim.SGD(module.parameters(), lr=0.1), collective)
    with pytest.raises(KeyError), sync.micro_batch(last=True):
        sync.module(torch.ones(3, 2)).sum().backward()
    collective.abort()
    assert _sockets() == before
