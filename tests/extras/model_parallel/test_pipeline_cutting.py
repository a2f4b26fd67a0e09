"""Splitting a network into stages, the layers that a stage keeps, and backward passes in two halves."""

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.options.mesh import AXES, Mesh, Pipeline
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.extras.model_parallel.pipeline import partition, wire
from ringspark.extras.model_parallel.pipeline.passes import build_pipeline
from ringspark.extras.model_parallel.pipeline.split_backward import run_input_pass, run_weight_passes
from ringspark.extras.model_parallel.pipeline.stage import keep_stages
from ringspark.extras.model_parallel.pipeline.ties import find_ties
from ringspark.extras.model_parallel.pipeline.wire import TensorForm, _decode_forms, _encode_forms
from ringspark.extras.model_parallel.shard_network import check_shardable
from ringspark.models import ModelSpec, apply_activation_checkpoint
from ringspark.models.chain import Link, links_of

SIZES = {"vocab_size": 50, "max_seq_len": 8, "dim": 8, "depth": 4, "num_heads": 2, "dropout": 0.1}
LM = ModelSpec("transformer_lm", SIZES)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_the_cut_is_the_best_of_all(costs: list[int], num_stages: int) -> None:
    links = [Link(str(i), abs, ()) for i in range(len(costs))]
    if num_stages > len(costs):
        with pytest.raises(ValueError, match="take fewer stages, or a deeper network"):
            partition.partition_by_cost(links, num_stages, costs)
        return

    def judged(bounds: list[int]) -> tuple[int, int]:
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        return max(sums), sum(s * s for s in sums)

    found = partition.partition_by_cost(links, num_stages, costs)
    assert [found[0], found[-1]] == [0, len(costs)]
    assert len(found) == num_stages + 1
    assert found == sorted(set(found))
    # Among splits with the same largest cost, this one has the smallest sum of squares.
    inner = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert judged(found)[0] == min(judged([0, *cut, len(costs)]) for cut in inner)[0]


def test_stages_are_cut_at_the_links_that_are_named() -> None:
    links = links_of(LM.build())
    assert partition.partition_by_names(links, 3, ["blocks.1", "head"]) == [0, 2, 5, 6]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["block.1", "head"], "head, got 'block.1'; did you mean 'blocks.1'?"),
        (["blocks.1"], "3 stages need the names of 2 layers"),
        (["head", "blocks.1"], "in the network's order and none twice"),
        (["blocks.1", "blocks.1"], "in the network's order and none twice"),
        (["tokens", "blocks.1"], "in the network's order and none twice"),
    ],
)
def test_wrong_names_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        partition.partition_by_names(links_of(LM.build()), 3, names)


def test_costs_are_operations_and_parameters_and_leave_no_trace() -> None:
    network = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    links = links_of(network)
    x = torch.randn(6, 4)
    before, state = torch.get_rng_state(), copy.deepcopy(network.state_dict())
    # 2 operations per weight and row, and one per parameter.
    assert partition.measure_costs(network, links, (x,)) == [2 * 6 * 32 + 32, 16, 0, 2 * 6 * 16 + 18]
    assert partition.count_parameters(network, links) == [32, 16, 0, 18]
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in state.items())
    assert network[2].training


def test_a_stage_keeps_its_own_tensors_under_their_names() -> None:
    torch.manual_seed(0)
    network = LM.build().eval()
    whole = copy.deepcopy(network)
    links = links_of(network)
    keep_stages(network, {0: links[:2], 2: links[4:5]})
    names = {name for name in whole.state_dict() if name.startswith(("tokens", "positions"))}
    names |= {name for name in whole.state_dict() if name.startswith(("blocks.0.", "blocks.3."))}
    assert set(network.state_dict()) == names
    assert type(network) is type(whole)
    ids = torch.randint(0, 50, (3, 8))
    want = whole.blocks[0](whole._embed(ids))
    alone = copy.deepcopy(whole)
    keep_stages(alone, {0: links[:2]})
    with pytest.raises(RuntimeError, match=r"a callback cannot call .* holds only stages \[0\] of "):
        alone(ids)
    # A copy runs with its own weights.
    for made in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        for parameter in network.parameters():
            parameter.data.zero_()
        # The hidden states travel with data about the rows; here there is none.
        hidden, told = made(ids, stage=0)
        assert torch.equal(hidden, want)
        assert told is None
        assert torch.equal(made(want, None, stage=2)[0], whole.blocks[3](want))
        network.load_state_dict({name: whole.state_dict()[name] for name in names})


def test_a_rank_frees_the_layers_of_other_stages() -> None:
    class Two(LocalCollective):
        size = 2

    network = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    others = [weakref.ref(parameter) for parameter in network[:2].parameters()]
    mesh = RankMesh.of(LocalCollective())
    object.__setattr__(mesh, "axes", {**mesh.axes, "pipeline": Two()})
    passes = build_pipeline(network, mesh, Pipeline(cuts=["2"]))
    gc.collect()
    assert passes.stages == [1]
    assert all(parameter() is None for parameter in others)


def test_a_parameter_of_several_ranks_is_owned_by_the_first_stage_that_uses_it() -> None:
    network = LM.build()
    links = links_of(network)
    stages = [links[:2], links[2:3], links[3:4], links[4:]]
    (tie,) = find_ties(network, stages, [3, 2, 1, 0])
    assert (tie.stages, tie.ranks, tie.names) == ((0, 3), (3, 0), ("tokens.weight", "tokens.weight"))
    # A rank with both stages has one parameter, not two copies.
    assert find_ties(network, stages, [0, 1, 1, 0]) == []
    shared = nn.Linear(3, 3)
    thrice = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared)
    links = links_of(thrice)
    (first, second) = find_ties(thrice, [links[:2], links[2:4], links[4:]], [0, 1, 0])
    assert first.stages == second.stages == (0, 1)
    # Two names of one parameter: each rank uses the name from its own stage.
    tied = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    (tie,) = find_ties(tied, [links_of(tied)[:2], links_of(tied)[2:]], [1, 0])
    assert (tie.ranks, tie.names) == ((1, 0), ("0.weight", "2.weight"))


def test_the_forms_of_values_survive_their_description() -> None:
    forms = (
        *(
            TensorForm(dtype, (3, 0, i), i % 2 == 0)
            for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.complex64))
        ),
        None,
        TensorForm(torch.bool, (), False),
    )
    described = _encode_forms(forms)
    assert _decode_forms(described) == forms
    assert _encode_forms(()).shape == described.shape
    with pytest.raises(ValueError, match="can return about"):
        _encode_forms(forms * 50)


def test_hooks_that_a_pipeline_would_repeat_or_lose_are_refused() -> None:
    """One process runs a network hook once; a pipeline would run it in every stage."""
    sizes = dict.fromkeys(AXES, 1) | {"pipeline": 2}
    network = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    # A Sequential with a hook stays one link.
    network[1].register_full_backward_hook(lambda *_: None)
    assert [link.name for link in links_of(network)] == ["0", "1"]
    check_shardable(network, sizes, Mesh())
    network[0].weight.register_hook(torch.abs)
    check_shardable(network, sizes, Mesh())
    with pytest.raises(ValueError, match="gradient hooks on its weights, which schedule 'pipedream'"):
        check_shardable(network, sizes, Mesh(pipeline=Pipeline(schedule="pipedream")))
    network.register_forward_hook(lambda *_: None)
    with pytest.raises(
        ValueError, match="Sequential has a forward hook, which a pipeline would run once per"
    ):
        check_shardable(network, sizes, Mesh())


class Cable:
    """In-memory send and receive between two ranks."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def start_send(self, tensor: torch.Tensor, to: int) -> Callable[[], None]:
        self.sent.append(tensor)
        return lambda: None

    def start_receive(self, tensor: torch.Tensor, source: int) -> Callable[[], None]:
        tensor.copy_(self.sent.pop(0))
        return lambda: None


def test_neighbours_forget_the_same_shapes_and_describe_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full key cache must not grow, and both sides must forget the same keys."""
    monkeypatch.setattr(wire, "MOST_KEYS", 2)
    cable = Cable()
    sender, receiver = (wire.Wire(cable, torch.device("cpu")) for _ in range(2))
    for length in (1, 2, 1, 3, 1, 2, 3):
        sender.send((torch.full((length,), float(length)),), length, 1)
        (values,) = receiver.start_receive(length, 0)()
        assert values.tolist() == [length] * length
        assert not cable.sent
        assert sender._known == receiver._known
        assert len(sender._known) <= 2


Weights = Sequence[torch.Tensor]
Stage = Callable[[torch.Tensor, torch.Tensor, Weights], tuple[torch.Tensor, ...]]


def _used_twice(x: torch.Tensor, y: torch.Tensor, w: Weights) -> tuple[torch.Tensor, ...]:
    return (F.linear(F.linear(F.linear(x, w[0]).tanh(), w[1]).tanh(), w[0]) + y,)


def _shared_by_layers(x: torch.Tensor, y: torch.Tensor, w: Weights) -> tuple[torch.Tensor, ...]:
    # Two additions: w[0] enters the first, w[2] the second, and w[1] both.
    return ((x + (w[0] + w[1])).tanh() @ y + (w[2] + w[1]),)


def _handed_on(x: torch.Tensor, y: torch.Tensor, w: Weights) -> tuple[torch.Tensor, ...]:
    query = w[0].tanh()
    return x + query * w[1], w[0], query, query.exp()[:2], x, y


STAGES: dict[str, Stage] = {
    "used twice": _used_twice,
    "shared": _shared_by_layers,
    "handed on": _handed_on,
    "not reached": lambda x, y, w: (w[0] * 2, w[0] @ w[1]),
    "inputs alone": lambda x, y, w: (x * y,),
}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_both_halves_give_the_gradients_of_a_whole_backward_pass(stage: Stage) -> None:
    leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(5)]
    results = stage(*leaves[:2], leaves[2:])
    gradients = [torch.randn_like(result) for result in results]
    want = torch.autograd.grad(results, leaves, gradients, allow_unused=True, retain_graph=True)
    passes = run_input_pass(results, gradients, leaves[:2])
    assert all(leaf.grad is None for leaf in leaves[2:])
    run_weight_passes(passes)
    for leaf, gradient in zip(leaves, want, strict=True):
        assert (leaf.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(leaf.grad, gradient)


def test_the_second_half_computes_no_gradient_of_values_again() -> None:
    """The split must compute each gradient only once."""
    calls = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            calls.append(gradient)
            return gradient

    x = torch.randn(4, 4, requires_grad=True)
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    y = x
    for weight in weights:
        y = Watched.apply(F.linear(y, weight))
    passes = run_input_pass([y], [torch.ones_like(y)], [x])
    assert len(calls) == 3
    run_weight_passes(passes)
    assert len(calls) == 3


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "GraphExecGroup"), reason="torch is before 2.10")
def test_each_half_runs_a_recomputed_layer_once() -> None:
    calls: list[nn.Module] = []
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(4)))
    net[0].register_forward_pre_hook(lambda layer, _: calls.append(layer))
    y = apply_activation_checkpoint(net, 2)(x := torch.randn(4, 4, requires_grad=True))
    passes = run_input_pass([y], [torch.ones_like(y)], [x])
    assert len(calls) == 2
    run_weight_passes(passes)
    assert len(calls) == 3
