"""Activation checkpointing: the same results, keys and types, less memory, at most one more forward pass."""

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peak_memory import memory_use
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ringspark.models import MLP, ModelSpec, apply_activation_checkpoint
from ringspark.models.activation_checkpoint import compile_segments

DIM = 16
_TEXT = {"vocab_size": 20, "max_seq_len": 6, "dim": DIM, "depth": 9, "num_heads": 2}
_TRANSFORMER = {**_TEXT, "dropout": 0.2, "attention_dropout": 0.1}


class Layer(nn.Module):
    """A block with keyword arguments, several outputs, all random generators, and a changing buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.3)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, *, scale: float, extra: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, float]:
        y = self.dropout(self.linear(self.norm(x)).tanh()) * mask * scale
        y = y * extra["factor"] * random.uniform(0.9, 1.1) * float(np.random.rand() + 0.5)
        return x + y, scale


class Normed(nn.Module):
    """A block with spectral norm, whose buffers change in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(DIM, DIM))
        self.norm = nn.BatchNorm1d(DIM, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x)).tanh()


class Looped(nn.Module):
    """Runs a list of blocks, with everything that a loop may do between them."""

    def __init__(self, num_layers: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.factor = nn.Parameter(torch.tensor(1.1))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x > -1).float()
        states = [x]
        for i, layer in enumerate(self.layers):
            if i == 3 and torch.rand(()) < 0.5:  # a skipped block
                continue
            x, scale = layer(x, mask, scale=0.9, extra={"factor": self.factor})
            if i == 1:
                x, _ = layer(x, mask=mask, scale=scale, extra={"factor": self.factor})  # called twice
            if i == 4:
                x += 0.1  # changed in place
            if i == 5:
                x = x + 0.1 * torch.randn_like(x) * states[2]
            states.append(x)
        out: torch.Tensor = self.head(torch.stack(states).mean(0))
        return out


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=DIM,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        num_labels=2,
    )
    net: nn.Module = transformers.BertForSequenceClassification(config)
    # Transformers networks start in evaluation mode.
    return net.train()


NETS: dict[str, Callable[[], nn.Module]] = {
    name: ModelSpec(name, arguments).build
    for name, arguments in {
        "transformer_classifier": {**_TRANSFORMER, "out_features": 2, "padding_id": 0},
        "transformer_lm": _TRANSFORMER,
        "resnet": {"in_channels": 2, "out_features": 2, "depths": [2, 2, 2], "width": 4},
        "mlp": {"in_features": DIM, "hidden": [DIM] * 9, "out_features": 2, "dropout": 0.2, "norm": "batch"},
        "tabular": {
            "cardinalities": [5, 7],
            "num_numeric": 3,
            "hidden": [DIM] * 4,
            "out_features": 2,
            "dropout": 0.2,
            "embedding_dropout": 0.2,
        },
    }.items()
}
NETS |= {
    "looped": Looped,
    "normed": lambda: nn.Sequential(*(Normed() for _ in range(6)), nn.Linear(DIM, 2)),
    "bert": bert,
}
POLICIES: list[str | int] = ["all", "sqrt", 2]
# For tests of all networks.
SQRT_AND_SLOW_OTHERS = ["sqrt", *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("all", 2))]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name]()


def inputs(name: str, step: int = 0, rows: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    if name == "resnet":
        return (torch.randn(rows, 2, 8, 8, generator=generator),)
    if name in ("mlp", "looped", "normed"):
        return (torch.randn(rows, DIM, generator=generator),)
    if name == "tabular":
        categories = torch.randint(0, 5, (rows, 2), generator=generator)
        return categories, torch.randn(rows, 3, generator=generator)
    ids = torch.randint(0, 20, (rows, 6), generator=generator)
    return (ids, (ids > 4).long()) if name == "bert" else (ids,)


def logits(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


def kept_bytes(step: Callable[[], object]) -> int:
    return memory_use(step).kept


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def train(net: nn.Module, name: str, steps: int, autocast: bool = False) -> list[torch.Tensor]:
    """Runs optimizer steps; returns all results and the next random numbers."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    made = []
    seed()
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = logits(net(*inputs(name, step)))
            loss = output.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        made += [output.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
    made += net.state_dict().values()
    return [*made, torch.rand(3), torch.tensor(random.random()), torch.tensor(np.random.rand())]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        # NaN never equals itself, and an infinity would hide differences.
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.extras
@pytest.mark.parametrize("policy", SQRT_AND_SLOW_OTHERS)
@pytest.mark.parametrize("name", NETS)
def test_two_steps_under_bf16_autocast_are_bitwise_equal(name: str, policy: str | int) -> None:
    recomputed = apply_activation_checkpoint(build(name), policy)
    assert_same(train(build(name), name, 2, autocast=True), train(recomputed, name, 2, autocast=True))


@pytest.mark.extras
@pytest.mark.parametrize("policy", SQRT_AND_SLOW_OTHERS)
@pytest.mark.parametrize("name", NETS)
def test_at_most_one_more_forward_pass_is_computed(name: str, policy: str | int) -> None:
    if name == "looped":
        pytest.skip("the number of its blocks is random")

    def flops(net: nn.Module) -> tuple[int, int]:
        with FlopCounterMode(display=False) as forward:
            loss = logits(net(*inputs(name))).sum()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
        return forward.get_total_flops(), backward.get_total_flops()

    plain_forward, plain_backward = flops(build(name))
    forward, backward = flops(apply_activation_checkpoint(build(name), policy))
    assert forward == plain_forward
    assert 0 < backward - plain_backward <= plain_forward


@pytest.mark.extras
@pytest.mark.parametrize("policy", SQRT_AND_SLOW_OTHERS)
@pytest.mark.parametrize("name", NETS)
def test_fewer_bytes_are_alive_between_forward_and_backward(name: str, policy: str | int) -> None:
    def kept(net: nn.Module) -> int:
        net(*inputs(name, rows=64))
        seed()
        return kept_bytes(lambda: logits(net(*inputs(name, rows=64))))

    assert kept(apply_activation_checkpoint(build(name), policy)) < 0.8 * kept(build(name))


class Around(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_sqrt_keeps_the_inputs_of_the_segments_and_the_last_one() -> None:
    net = Around(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(9)))
    x = torch.randn(1024, DIM)
    row_bytes = 1024 * DIM * 4
    plain = kept_bytes(lambda: net(x))
    apply_activation_checkpoint(net, "sqrt")
    kept = kept_bytes(lambda: net(x))
    assert plain // row_bytes == 9
    # The inputs of the second and third segment (x is the input of the first), and three activations of the
    # third. The rest, the random state, does not grow with the rows.
    assert kept // row_bytes == 5
    assert kept % row_bytes < 20_000


def two_passes(net: nn.Module) -> None:
    first, second = (net(*inputs("looped", step)) for step in range(2))
    first.sum().backward()
    second.square().sum().backward()


def a_second_backward_pass(net: nn.Module) -> None:
    out = net(*inputs("looped"))
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()


def derivatives_of_derivatives(net: nn.Module) -> None:
    (x,) = inputs("looped")
    (slope,) = torch.autograd.grad(net(x.requires_grad_()).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


@pytest.mark.parametrize("run", [two_passes, a_second_backward_pass, derivatives_of_derivatives])
def test_passes_over_several_or_the_same_graph(run: Callable[[nn.Module], None]) -> None:
    grads = []
    for net in (build("looped"), apply_activation_checkpoint(build("looped"), "sqrt")):
        seed()
        run(net)
        grads.append([p.grad for p in net.parameters() if p.grad is not None])
    assert_same(*grads)


class CheckpointsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Dropout(0.2), nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, x.tanh(), use_reentrant=False)
        return out.tanh()


class DifferentiatesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0 if x.requires_grad else x.clone().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(y).square().sum(), y, create_graph=True)
        return y + force


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", [CheckpointsItself, DifferentiatesItself])
def test_blocks_that_checkpoint_or_derive_themselves(block: type[nn.Module], policy: str | int) -> None:
    torch.manual_seed(0)
    plain = Around(*(block() for _ in range(4)))
    nets = plain, apply_activation_checkpoint(copy.deepcopy(plain), policy)
    assert_same(*(train(net, "mlp", 3) for net in nets))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_network_that_is_checkpointed_as_a_whole_from_outside(policy: str | int) -> None:
    class Outer(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.net, x, use_reentrant=False)
            return out

    nets = build("transformer_lm"), Outer(apply_activation_checkpoint(build("transformer_lm"), policy))
    assert_same(*(train(net, "transformer_lm", 3) for net in nets))


def test_a_block_in_several_places_and_a_list_of_pairs() -> None:
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList([nn.Linear(DIM, DIM), nn.Sequential(nn.LayerNorm(DIM), nn.GELU())])
                for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for first, second in self.layers:
                x = x + second(first(x))
            return x

    for plain in (Around(*[shared] * 9), Pairs()):
        recomputed = apply_activation_checkpoint(copy.deepcopy(plain), "sqrt")
        assert_same(train(plain, "mlp", 3), train(recomputed, "mlp", 3))


def test_outer_hooks_see_what_segments_keep_and_may_replace_it() -> None:
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
        seen.append(tensor.numel())
        return [tensor.clone()]

    nets = build("transformer_lm"), apply_activation_checkpoint(build("transformer_lm"), "sqrt")
    grads, counts = [], []
    for net in nets:
        seed()
        with saved_tensors_hooks(pack, lambda packed: packed[0]):
            out = net(*inputs("transformer_lm"))
        out.sum().backward()
        grads.append([p.grad for p in net.parameters() if p.grad is not None])
        counts.append(sum(seen))
        seen.clear()
    assert_same(*grads)
    assert 8 * 6 * DIM * 3 < counts[1] < counts[0] / 2


@pytest.mark.parametrize("policy", POLICIES)
def test_tensors_without_numbers_go_through(policy: str | int) -> None:
    with FakeTensorMode():
        net = apply_activation_checkpoint(build("transformer_lm"), policy)
        net(torch.zeros(8, 6, dtype=torch.long)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_graph_without_a_backward_pass_is_freed_at_once() -> None:
    net = apply_activation_checkpoint(build("looped"), "sqrt")
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(8, DIM, requires_grad=True)
        middle = x * 2
        alive = weakref.ref(middle)
        out = net(middle)
        del middle, out
        assert alive() is None
    finally:
        gc.enable()


def test_a_kept_input_that_is_changed_in_place_is_an_error() -> None:
    net = apply_activation_checkpoint(Around(*(CheckpointsItself() for _ in range(4))), "sqrt")
    x = torch.randn(8, DIM)
    out = net(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Caches(nn.Module):
    """Keeps its inputs, and computes with all of them the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.seen = nn.Linear(DIM, DIM), nn.LayerNorm(DIM), []  # type: ignore[var-annotated]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        out: torch.Tensor = self.norm(self.linear(torch.cat(self.seen))).tanh()[: len(x)]
        return out


def test_a_block_that_does_something_else_when_run_again_is_named() -> None:
    net = apply_activation_checkpoint(Around(*(Caches() for _ in range(4))), "sqrt")
    with pytest.raises(RuntimeError, match=r"Caches must do the same when run again .* saved tensor 0 is"):
        net(torch.randn(8, DIM)).sum().backward()


def test_a_switch_to_evaluation_before_the_backward_pass_is_noticed() -> None:
    net = apply_activation_checkpoint(build("mlp"), "sqrt")
    out = net(*inputs("mlp"))
    net.eval()
    with pytest.raises(RuntimeError, match=r"switch between train\(\) and eval\(\)"):
        out.sum().backward()


def test_blocks_called_from_outside_of_the_network_are_recomputed_too() -> None:
    def forward(net: nn.Module) -> torch.Tensor:
        x = inputs("mlp", rows=64)[0]
        for block in net.trunk:
            x = block(x)
        return x

    plain, recomputed = build("mlp"), apply_activation_checkpoint(build("mlp"), "sqrt")
    for net in (plain, recomputed):
        seed()
        forward(net).sum().backward()
    assert_same([p.grad for p in plain.trunk.parameters()], [p.grad for p in recomputed.trunk.parameters()])
    assert kept_bytes(lambda: forward(recomputed)) < kept_bytes(lambda: forward(plain))


def test_a_bare_list_has_no_pass_to_cut() -> None:
    with pytest.raises(ValueError, match="needs a network with a forward pass"):
        apply_activation_checkpoint(nn.ModuleList(CheckpointsItself() for _ in range(4)), "sqrt")


NAMED_POLICIES: list[Any] = ["all", "sqrt", 2, 6, ["trunk.1", "trunk.4"], ["trunk"]]


def deep_net(norm: str = "batch") -> MLP:
    torch.manual_seed(3)
    return MLP(DIM, [32] * 6, 2, activation="gelu", dropout=0.3, norm=norm)


@pytest.mark.parametrize("policy", NAMED_POLICIES, ids=str)
@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
def test_results_are_bitwise_equal_and_keys_and_types_stay(policy: Any, norm: str) -> None:
    plain, net = deep_net(norm), apply_activation_checkpoint(deep_net(norm), policy)
    assert type(net) is MLP
    assert not any("forward" in vars(module) for module in net.modules())
    assert list(net.state_dict()) == list(plain.state_dict())
    assert_same(train(plain, "mlp", 2), train(net, "mlp", 2))


@pytest.mark.parametrize("policy", NAMED_POLICIES, ids=str)
def test_copies_and_pickles_recompute_on_their_own_weights(policy: Any) -> None:
    net = apply_activation_checkpoint(deep_net("none"), policy)
    others = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    for p in net.parameters():
        p.data.zero_()
    (x,) = inputs("mlp", rows=1024)
    plain = deep_net("none")
    for other in others:
        assert kept_bytes(lambda net=other: net(x)) < kept_bytes(lambda: plain(x))
        assert_same(train(deep_net("none"), "mlp", 1), train(other, "mlp", 1))


@pytest.mark.parametrize("policy", NAMED_POLICIES, ids=str)
def test_nothing_is_recomputed_in_evaluation_or_without_gradients(policy: Any) -> None:
    net = apply_activation_checkpoint(deep_net(), policy)
    calls: list[None] = []
    net.trunk[0].register_forward_hook(lambda *_: calls.append(None))
    x = torch.randn(16, DIM)
    with torch.no_grad():
        net(x)
    net.eval()(x).sum().backward()
    assert len(calls) == 2
    net.train()(x).sum().backward()
    assert len(calls) in (3, 4)  # Four if the first block is recomputed.


def test_gradient_hooks_fire_once_per_parameter() -> None:
    # DDP and Horovod start all-reduces in these hooks; a second call would give a wrong result.
    net = apply_activation_checkpoint(deep_net("none"), "all")
    fired: list[str] = []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    net(torch.randn(4, DIM)).sum().backward()
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
def test_policies_that_fit_nothing_are_refused(policy: Any, message: str) -> None:
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


# torch warns about its own modules when it imports its compiler.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_only_innermost_recomputed_modules_are_compiled_by_themselves() -> None:
    assert not compile_segments(deep_net(), None)
    net = apply_activation_checkpoint(deep_net(), ["trunk", "trunk.0"])
    assert compile_segments(net, None)
    stand_ins: list[Any] = [vars(module)["_call_impl"] for module in (net.trunk, net.trunk[0])]
    assert [stand_in.compiled is not None for stand_in in stand_ins] == [False, True]
