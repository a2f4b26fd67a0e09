"""Activation checkpointing changes stored activations, never results, state dict keys or types."""

import copy
import io
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from ringspark.models import MLP, apply_activation_checkpoint
from ringspark.models.activation_checkpoint import segment_bounds

Policy = str | int | Sequence[str]
POLICIES: list[Policy] = ["all", "sqrt", 2, 6, ["trunk.1", "trunk.4"], ["trunk"]]


def deep_net(norm: str = "batch") -> MLP:
    torch.manual_seed(3)
    return MLP(8, [32] * 6, 2, activation="gelu", dropout=0.3, norm=norm)


def train_step(net: nn.Module, *inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Runs a forward and backward pass; returns output, gradients and bytes kept, without parameters."""
    saved: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(11)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = net(*inputs)
    # The hooks end here, so tensors that the backward pass recomputes are not counted.
    out.square().sum().backward()
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return out.detach(), grads, sum(saved.values())


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
def test_outputs_gradients_and_buffers_are_bitwise_equal(policy: Policy, norm: str) -> None:
    plain = deep_net(norm)
    checkpointed = apply_activation_checkpoint(copy.deepcopy(plain), policy)
    for step in range(2):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        out, grads, _ = train_step(plain, x)
        again, same_grads, _ = train_step(checkpointed, x)
        assert torch.equal(out, again)
        assert all(torch.equal(a, b) for a, b in zip(grads, same_grads, strict=True))
    for key, value in plain.state_dict().items():
        assert torch.equal(value, checkpointed.state_dict()[key]), key


def test_sqrt_keeps_the_segment_inputs_and_the_last_segment() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(9)))
    x = torch.randn(64, 16)
    rows_bytes = 64 * 16 * 4
    _, _, plain = train_step(net, x)
    _, _, kept = train_step(apply_activation_checkpoint(net, "sqrt"), x)
    assert plain == 10 * rows_bytes  # The input and nine tanh outputs.
    assert kept == 6 * rows_bytes  # The inputs of three segments, and the three outputs of the last one.


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_type_keys_and_forward_stay(policy: Policy) -> None:
    net = deep_net()
    keys = list(net.state_dict())
    assert type(apply_activation_checkpoint(net, policy)) is MLP
    assert list(net.state_dict()) == keys
    assert not any("forward" in vars(module) for module in net.modules())


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_copies_and_pickles_recompute_on_their_own_weights(policy: Policy) -> None:
    net = apply_activation_checkpoint(deep_net("none"), policy)
    buffer = io.BytesIO()
    pickle.dump(net, buffer)
    for other in (copy.deepcopy(net), pickle.loads(buffer.getvalue())):
        for p in net.parameters():
            p.data.zero_()
        x = torch.randn(16, 8)
        out, grads, kept = train_step(other, x)
        plain, plain_grads, all_kept = train_step(deep_net("none"), x)
        assert torch.equal(out, plain)
        assert all(torch.equal(a, b) for a, b in zip(grads, plain_grads, strict=True))
        assert kept < all_kept


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_nothing_is_recomputed_in_evaluation_or_without_gradients(policy: Policy) -> None:
    net = apply_activation_checkpoint(deep_net(), policy)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    net.trunk[0].register_forward_hook(count)
    x = torch.randn(16, 8)
    with torch.no_grad():
        net(x)
    net.eval()(x).sum().backward()
    assert calls == 2
    net.train()(x).sum().backward()
    assert calls in (3, 4)  # Four if the first block is recomputed.


@pytest.mark.extras
def test_a_network_of_two_inputs_and_a_bf16_autocast() -> None:
    from ringspark.models import TabularNet

    torch.manual_seed(0)
    net = TabularNet([5, 7], 3, [16, 16, 16, 16], 2, dropout=0.2, embedding_dropout=0.2)
    inputs = torch.randint(0, 5, (32, 2)), torch.randn(32, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, grads, plain = train_step(net, *inputs)
        again, same_grads, kept = train_step(apply_activation_checkpoint(net, "sqrt"), *inputs)
    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, same_grads, strict=True))
    assert kept < plain


def test_gradient_hooks_fire_once_per_parameter() -> None:
    # DDP and Horovod start all-reduces in these hooks; a second call would give a wrong result.
    net = apply_activation_checkpoint(deep_net("none"), "all")
    fired: list[str] = []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    net(torch.randn(4, 8)).sum().backward()
    assert sorted(fired) == sorted(name for name, _ in net.named_parameters())


def test_none_leaves_the_network_alone() -> None:
    net = deep_net()
    before = [set(vars(module)) for module in net.modules()]
    assert apply_activation_checkpoint(net, "none") is net
    assert [set(vars(module)) for module in net.modules()] == before


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("sqr", "gradientCheckpointing='sqr' is unknown; give 'none', 'all', 'sqrt'"),
        (True, "gradientCheckpointing=True is unknown"),
        (1, "must be from 2 to 6, the number of blocks in MLP.trunk"),
        (7, "must be from 2 to 6"),
        ([], "names no submodule"),
        (["trunk.9"], "names 'trunk.9', which MLP does not have; did you mean 'trunk"),
    ],
)
def test_policies_that_fit_nothing_are_refused(policy: Policy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_activation_checkpoint(deep_net(), policy)


@pytest.mark.extras
def test_containers_without_a_forward_and_second_calls_are_refused() -> None:
    from ringspark.models import TabularNet

    net = TabularNet([5], 3, [4, 4], 2)
    with pytest.raises(ValueError, match="names 'embeddings', a container without a forward"):
        apply_activation_checkpoint(net, ["embeddings"])
    apply_activation_checkpoint(net, "all")
    with pytest.raises(ValueError, match="checkpointed already"):
        apply_activation_checkpoint(net, "sqrt")


@pytest.mark.parametrize(("blocks", "segments"), [(9, 3), (10, 3), (5, 5), (7, 2)])
def test_segments_cover_the_chain_evenly(blocks: int, segments: int) -> None:
    bounds = segment_bounds(blocks, segments)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(blocks))
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1


class _Drawing(nn.Linear):
    """Draws one normal number from NumPy, which makes pairs and caches the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * np.random.normal())


def test_a_block_that_draws_an_odd_number_of_normals_draws_them_again() -> None:
    plain = nn.Sequential(*(_Drawing(3, 3) for _ in range(5)))
    x, gradients = torch.randn(4, 3), []
    for network in (plain, apply_activation_checkpoint(copy.deepcopy(plain), "all")):
        np.random.seed(0)
        network(x).sum().backward()
        gradients.append([p.grad for p in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
