"""Recurrent layers with pipelined sequence chunks equal one process, for any chunk size."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.options.mesh import Pipeline
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.extras.model_parallel.pipeline.partition import count_parameters, measure_costs
from ringspark.extras.model_parallel.pipeline.passes import PipelinePasses, build_pipeline
from ringspark.extras.model_parallel.pipeline.sections import StageSection, chunk_lengths, split_into_sections
from ringspark.models import Link, ModelSpec, add_loss, apply_activation_checkpoint
from ringspark.models.chain import links_of, run_links
from ringspark.models.reports import collect_reports

pytestmark = pytest.mark.distributed
TIMES = 7
SIZES = {"hidden": 5, "depth": 4, "out_features": 2}
IDS = {"vocab_size": 9, **SIZES, "padding_id": 0}
NETWORKS: dict[str, ModelSpec] = {
    "gru": ModelSpec("recurrent", {**IDS, "kind": "gru"}),
    "lstm": ModelSpec("recurrent", {**IDS, "kind": "lstm", "pool": "mean"}),
    "numbers": ModelSpec("recurrent", {"in_features": 3, **SIZES, "kind": "rnn"}),
}


class Between(nn.Module):
    """Layers that need whole rows come before, between and after the layers over time."""

    def __init__(self, *, adds: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))
        self._adds = adds

    def links(self) -> list[Link]:
        # A stage keeps some of the list, under other numbers.
        layers = list(self.layers)

        def whole(i: int, x: torch.Tensor) -> torch.Tensor:
            return layers[i](x + x.mean(1, keepdim=True)).tanh()

        def along(i: int, state: Any, x: torch.Tensor) -> Any:
            y = layers[i](x).tanh().cumsum(1) + (0 if state is None else state[0])
            if self._adds:
                add_loss(y.square().sum((1, 2)))
            return y, (y[:, -1:],)

        kinds = "wttwttwt"
        return [
            Link(str(i), partial(whole, i), (f"layers.{i}",))
            if kind == "w"
            else Link(str(i), lambda x, i=i: along(i, None, x)[0], (f"layers.{i}",), partial(along, i))
            for i, kind in enumerate(kinds)
        ]

    def forward(self, x: torch.Tensor) -> Any:
        return run_links(self.links(), (x,))


def _network(name: str) -> nn.Module:
    torch.manual_seed(5)
    # Its sums have many terms, so rounding in single precision would hide real differences.
    return Between().double() if name == "between" else NETWORKS[name].build()


def _rows(name: str, rows: Sequence[int], times: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    draw = torch.Generator().manual_seed(seed)
    if name in ("numbers", "between"):
        dtype = torch.float64 if name == "between" else torch.float32
        x = torch.randn(sum(rows), times, 3, generator=draw, dtype=dtype)
    else:
        x = torch.randint(1, 9, (sum(rows), times), generator=draw)
        x[-1, times // 2 :] = 0
    return [(own,) for own in torch.split(x, list(rows))]


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.sin().square().sum()


def _compare(whole: nn.Module, passes: PipelinePasses, rows: list[tuple[torch.Tensor, ...]]) -> float:
    """Returns the largest difference of gradients and of evaluation outputs."""
    whole.zero_grad()
    passes.network.zero_grad()
    for own in rows:
        _loss(whole(*own)).backward()
    passes.train(rows, lambda y, index: _loss(y))
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    found = [0.0]
    for name, parameter in passes.network.named_parameters():
        want = wanted[name]
        if want is None or parameter.grad is None:
            assert want is parameter.grad
        else:
            found.append(float((parameter.grad - want).abs().max()))
    assert len(found) > 1
    for network in (whole, passes.network):
        network.eval()
    for own in (rows[0], tuple(value[:0] for value in rows[0])):
        output = passes.evaluate(own)
        if output is not None and len(output):
            with torch.no_grad():
                found.append(float((output - whole(*own)).abs().max()))
    for network in (whole, passes.network):
        network.train()
    return max(found)


def _gradients(collective: Collective, *, cases: Sequence[Any]) -> Any:
    mesh = RankMesh.of(collective, {"pipeline": collective.size})
    found: dict[str, float] = {}
    for name, schedule, chunks, options in cases:
        whole, cut = _network(name), _network(name)
        recomputes = options.pop("recomputes", "none")
        chosen = Pipeline(schedule=schedule, sequence_chunks=chunks, **options)
        passes = build_pipeline(cut, mesh, chosen, num_micro=3)
        apply_activation_checkpoint(passes.network, recomputes)
        for number, rows in enumerate([(2, 2, 1), (3,)]):
            # The second step has rows of other lengths, some shorter than the number of chunks.
            micros = _rows(name, rows, TIMES if number == 0 else 2, number)
            calls: list[bool] = []
            counting = cut.register_forward_pre_hook(lambda net, _, calls=calls: calls.append(net.training))
            key = f"{name} {schedule} {chunks} {recomputes} {options} {number}"
            found[key] = _compare(whole, passes, micros)
            counting.remove()
            # The first rank has the last stage. The last rank has the first stage, which sends its chunks one
            # by one.
            if name != "between" and passes.num_stages == 2 and not collective.rank:
                num = len(rows) * min(chunks, micros[0][0].shape[1])
                assert sum(calls) == num + len(rows) * (chunks > 1)  # chunks, and the head
    return found


def _every(*cuts: str) -> list[Any]:
    return [(n, s, c, {"cuts": [*cuts]}) for n in NETWORKS for s in ("gpipe", "1f1b") for c in (1, 2, 3)]


VIRTUAL = {"virtual": 2, "cuts": ["layers.0", "layers.1", "layers.2", "layers.3", "head"]}
CASES: dict[str, tuple[int, list[Any]]] = {
    "2": (2, [("gru", "gpipe", 2, {}), ("lstm", "1f1b", 3, {}), ("between", "1f1b", 3, {"cuts": ["2"]})]),
    "2, other chunks": (
        2,
        [
            *((name, schedule, 3, {}) for name in NETWORKS for schedule in ("gpipe", "1f1b")),
            ("gru", "1f1b", 1, {}),
            ("gru", "naive", 2, {}),
            ("gru", "1f1b", 3, {"recomputes": "all"}),
            ("lstm", "1f1b", 3, {"recomputes": "sqrt"}),
            ("between", "gpipe", 2, {"cuts": ["5"]}),
        ],
    ),
    "3": (3, [*_every("layers.1", "layers.3"), ("between", "1f1b", 3, {"cuts": ["2", "4"]})]),
    "3, virtual": (3, [("gru", "interleaved", 3, VIRTUAL)]),
    "4": (
        4,
        [*_every("layers.1", "layers.2", "layers.3"), ("between", "1f1b", 3, {"cuts": ["2", "4", "5"]})],
    ),
}


@pytest.mark.parametrize(
    "stages", [pytest.param(name, marks=[pytest.mark.slow] * (name != "2")) for name in CASES]
)
def test_stages_in_chunks_have_the_gradients_of_one_process(stages: str) -> None:
    size, cases = CASES[stages]
    for text in run_ranks(size, "torch", partial(_gradients, cases=cases)):
        assert len(text) == 2 * len(cases)
        assert max(text.values()) < 1e-6, text


def _late(collective: Collective, *, schedule: str) -> Any:
    """Returns the largest difference of weights between delayed gradients of whole rows and of chunks."""
    mesh = RankMesh.of(collective, {"pipeline": collective.size})
    weights = []
    for chunks in (1, 3):
        options = Pipeline(schedule=schedule, sequence_chunks=chunks)
        passes = build_pipeline(_network("lstm"), mesh, options, num_micro=2)
        optimizer = torch.optim.SGD(passes.network.parameters(), 0.1)
        for number in range(6):
            if number < 4:
                passes.train(_rows("lstm", (2, 1), TIMES, number), lambda y, index: _loss(y))
            elif passes.steps_in_flight:
                passes.drain()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(nn.utils.parameters_to_vector(passes.network.parameters()).detach())
    start = nn.utils.parameters_to_vector(_network("lstm").parameters()).detach()
    assert not torch.isin(weights[0], start).all()
    return float((weights[1] - weights[0]).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_late_gradients_are_the_same_in_chunks(schedule: str) -> None:
    for text in run_ranks(2, "torch", partial(_late, schedule=schedule)):
        assert text < 1e-6


@pytest.mark.slow  # Some imports of torch import its compiler.
def test_stages_of_one_rank_hand_chunks_to_each_other() -> None:
    mesh = RankMesh.of(LocalCollective())
    for name, cuts in (("gru", ["layers.0", "layers.2", "layers.3"]), ("between", ["2", "5", "7"])):
        whole, cut = _network(name), _network(name)
        options = Pipeline(schedule="interleaved", virtual=4, cuts=cuts, sequence_chunks=3)
        passes = build_pipeline(cut, mesh, options)
        assert _compare(whole, passes, _rows(name, (2, 1), TIMES, 0)) < 1e-6


def test_cuts_that_pass_no_chunks_are_refused() -> None:
    class Two(LocalCollective):
        size = 2

    mesh = RankMesh.of(LocalCollective())
    object.__setattr__(mesh, "axes", {**mesh.axes, "pipeline": Two()})
    with pytest.raises(ValueError, match="stages begin at tokens, head; set Pipeline's cuts"):
        build_pipeline(_network("gru"), mesh, Pipeline(sequence_chunks=2, cuts=["head"]))


@pytest.mark.slow
def test_losses_of_layers_that_work_in_chunks_are_refused() -> None:
    passes = _in_one_process(Between(adds=True).double(), "2")
    with pytest.raises(ValueError, match="sequence_chunks does not support layers that add to the loss"):
        passes.train(_rows("between", (2,), 4, 0), lambda y, _: _loss(y), added=lambda _: torch.ones(()))


class Along(nn.Module):
    """A layer over time. It can add to the loss once per chunk, or return a value without time."""

    def __init__(self, *, adds: bool = False, sums: bool = False) -> None:
        super().__init__()
        self.along, self._adds, self._sums = nn.Linear(3, 3), adds, sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.over_time(None, x)[0]

    def over_time(self, state: Any, x: torch.Tensor) -> Any:
        if self._adds:
            add_loss(x.square().mean((1, 2)))
        y = self.along(x)
        return (y.sum(1) if self._sums else y), None


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.head = first, second, nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return run_links(self.links(), (x,))

    def links(self) -> list[Link]:
        layers = {"first": self.first, "second": self.second}
        along = [Link(name, layer, (name,), layer.over_time) for name, layer in layers.items()]
        return [*along, Link("head", self.pooled, ("head",))]

    def pooled(self, y: torch.Tensor) -> Any:
        return self.head(y[:, -1])


def _in_one_process(network: nn.Module, cut: str = "second") -> PipelinePasses:
    options = Pipeline(schedule="interleaved", virtual=2, cuts=[cut], sequence_chunks=2)
    return build_pipeline(network, RankMesh.of(LocalCollective()), options)


def test_losses_of_chunks_in_the_last_stage_are_refused() -> None:
    passes = _in_one_process(Pair(Along(), Along(adds=True)))
    with pytest.raises(ValueError, match="sequence_chunks does not support layers that add to the loss"):
        passes.train([(torch.ones(2, 4, 3),)], lambda y, _: _loss(y), around=collect_reports)


def test_values_without_time_are_refused_where_they_come_from() -> None:
    passes = _in_one_process(Pair(Along(sums=True), Along()))
    with pytest.raises(ValueError, match=r"with 2 time steps, .*, got shape \(2, 3\)"):
        passes.train([(torch.ones(2, 4, 3),)], lambda y, _: _loss(y))


def test_the_loss_is_outside_of_what_is_around_the_passes() -> None:
    seen = []

    def loss(y: torch.Tensor, _: int) -> torch.Tensor:
        seen.append((y.dtype, torch.is_autocast_enabled("cpu")))
        return _loss(y)

    around = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    _in_one_process(Pair(Along(), Along())).train([(torch.ones(2, 4, 3),)] * 2, loss, around=around)
    assert seen == [(torch.bfloat16, False)] * 2


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_a_layers_products_count_in_the_cut(kind: str) -> None:
    network = ModelSpec("recurrent", {**IDS, "hidden": 64, "kind": kind}).build()
    links = links_of(network)
    costs = measure_costs(network, links, [torch.ones(4, 16, dtype=torch.long)])
    # At least each weight once per row and time step, besides the parameters.
    for link, cost, own in zip(links[1:5], costs[1:5], count_parameters(network, links)[1:5], strict=True):
        assert cost > 4 * 16 * own, link.name


def test_rows_are_cut_into_chunks_of_nearly_one_length() -> None:
    assert chunk_lengths([torch.zeros(2, 8)], 3) == [3, 3, 2]
    assert chunk_lengths([torch.zeros(2, 2)], 3) == [1, 1]
    with pytest.raises(ValueError, match="splits the network's first argument along its second dimension"):
        chunk_lengths([torch.zeros(3)], 2)


def test_a_stage_works_in_chunks_where_they_pass() -> None:
    links = Between().links()  # whole, along, along, whole, along, along, whole, along
    for first, last, streams_in, streams_out, sections in (
        (1, 6, True, True, [(0, 2, True), (2, 3, False), (3, 5, True)]),
        (1, 3, True, False, [(0, 2, True), (2, 2, False)]),
        (1, 6, False, True, [(0, 3, False), (3, 5, True)]),
        (0, 8, False, False, [(0, 8, False)]),
    ):
        found = split_into_sections(links[first:last], streams_in=streams_in, streams_out=streams_out)
        assert found == [StageSection(*section) for section in sections]
