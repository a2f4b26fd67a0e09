"""Every pipeline schedule computes the result of one process, for any row counts."""

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from simulation import count_live
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.options.mesh import Pipeline
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.extras.model_parallel.pipeline.partition import count_parameters, partition_by_cost
from ringspark.extras.model_parallel.pipeline.passes import PipelinePasses, build_pipeline
from ringspark.extras.model_parallel.pipeline.schedules import SCHEDULES
from ringspark.models import ModelSpec, apply_activation_checkpoint
from ringspark.models.chain import Link, belongs_to, links_of, run_links
from ringspark.models.reports import Reports, add_loss, collect_reports

pytestmark = pytest.mark.distributed

_TRANSFORMER = {"vocab_size": 11, "max_seq_len": 6, "dim": 8, "depth": 6, "num_heads": 2}
_CLASSIFIER = {**_TRANSFORMER, "out_features": 3, "padding_id": 0}
_MLP = {"in_features": 5, "hidden": [8] * 7, "out_features": 3, "norm": "layer", "activation": "gelu"}
# Layers in several stages add to the loss.
_EXPERTS = {"num_experts": 3, "router": "gshard", "balance_weight": 0.5, "z_weight": 0.1}
FAMILIES: dict[str, ModelSpec] = {
    "mlp": ModelSpec("mlp", _MLP),
    "transformer_classifier": ModelSpec("transformer_classifier", _CLASSIFIER),
    "transformer_lm": ModelSpec("transformer_lm", _TRANSFORMER),
    "mixture": ModelSpec("transformer_classifier", {**_CLASSIFIER, "experts": _EXPERTS}),
}
FLUSHED = [name for name, schedule in SCHEDULES.items() if schedule.order is not None]
Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]


def _batch(family: str, rows: int, seed: int, seq: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    if family == "mlp":
        return (torch.randn(rows, 5, generator=draw),), torch.randint(0, 3, (rows,), generator=draw)
    ids = torch.randint(1, 11, (rows, seq), generator=draw)
    if family == "transformer_lm":
        return (ids,), torch.randint(0, 11, (rows, seq), generator=draw)
    ids[rows // 2 :, seq - 2 :] = 0  # padding
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
        with around(), collect_reports() as reports:
            output = network(*inputs)
        loss = _loss(output, label, divisor)
        for values in reports.losses:
            loss = loss + values.sum() / divisor
        loss.backward()
        total += float(loss.detach())
    return total


def _piped(passes: PipelinePasses, micros: Any, around: Any = nullcontext) -> float:
    divisor = float(sum(label.numel() for _, label in micros))
    seen: dict[int, float] = {}
    reports = Reports()

    @contextmanager
    def collecting() -> Iterator[None]:
        nonlocal reports
        with around(), collect_reports() as reports:
            yield

    def added(index: int) -> torch.Tensor | None:
        return torch.stack(reports.losses).sum() / divisor if reports.losses else None

    def loss(output: torch.Tensor, index: int) -> torch.Tensor:
        assert index not in seen
        value = _loss(output, micros[index][1], divisor)
        seen[index] = float(value.detach())
        own = added(index)
        return value if own is None else value + own

    passes.train([inputs for inputs, _ in micros], loss, collecting, added)
    assert sorted(seen) == (list(range(len(micros))) if passes.has_outputs else [])
    return sum(seen.values())


def _made(family: str, mesh: RankMesh, schedule: str, num_micro: int = 1) -> tuple[nn.Module, PipelinePasses]:
    torch.manual_seed(3)
    whole = FAMILIES[family].build()
    cut = FAMILIES[family].build()
    cut.load_state_dict(whole.state_dict())
    least, _ = SCHEDULES[schedule].virtual
    return whole, build_pipeline(cut, mesh, Pipeline(schedule=schedule, virtual=least), num_micro)


def _difference(one: Iterable[tuple[str, Any]], other: dict[str, Any]) -> float:
    found = [0.0]
    for name, tensor in one:
        if tensor is None or other[name] is None:
            assert tensor is None
            assert other[name] is None
            continue
        found.append(float((tensor - other[name]).detach().abs().max()))
    return max(found)


def _gradients(network: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in network.named_parameters()}


def _far(passes: PipelinePasses, whole: nn.Module) -> float:
    return _difference(_gradients(passes.network).items(), _gradients(whole))


def _step(whole: nn.Module, passes: PipelinePasses, micros: Any, around: Any = nullcontext) -> Any:
    """Takes new gradients in both ways; returns both losses, see `_piped` and `_whole`."""
    whole.zero_grad()
    passes.network.zero_grad()
    loss = _whole(whole, micros, around)
    return _piped(passes, micros, around), loss


def _weights_far(passes: PipelinePasses, whole: nn.Module) -> float:
    return _difference(passes.network.named_parameters(), dict(whole.named_parameters()))


class _Counted(dict[Any, Any]):
    """Counts the entries that it has at most."""

    most = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.most = max(self.most, len(self))


# Rows per micro-batch: a short last one; fewer micro-batches than ranks; one row each.
_STEPS = [(3, 3, 3, 3, 1), (2,), (3, 3, 3, 3, 1), (1, 1, 1)]


def _all_gradients(collective: Collective, *, pairs: list[tuple[str, str]], steps: Any) -> Any:
    mesh = RankMesh.of(collective, {"pipeline": collective.size})
    found: dict[str, float] = {}
    for schedule, family in pairs:
        whole, passes = _made(family, mesh, schedule)
        passes.executor._live = held = _Counted()
        for number, rows in enumerate(steps):
            # Every other step has shorter rows.
            micros = _split(_batch(family, sum(rows), number, seq=6 - number % 2), rows)
            loss, want = _step(whole, passes, micros)
            # A stage knows only the losses that its own layers add.
            assert family == "mixture" or not passes.has_outputs or abs(loss - want) < 1e-6
            name = f"{schedule} {family} {number} {rows}"
            found[name] = _far(passes, whole)
        live = [
            count_live(SCHEDULES[schedule].orders_by_rank(collective.size, passes.virtual, len(rows)))
            for rows in steps
        ]
        assert held.most == max(by_rank[collective.rank] for by_rank in live)
        # Of the copies of a tied table, the one of the first stage counts.
        is_copy = passes.num_stages - 1 in passes.stages and 0 not in passes.stages
        assert passes.copies == ({"tokens.weight"} if is_copy and family == "transformer_lm" else set())
        passes.network.eval()
        whole.eval()
        inputs, _ = _batch(family, 4, 9)
        output = passes.evaluate(inputs)
        assert (output is None) != passes.has_outputs
        if output is not None:
            assert not output.requires_grad
            found[f"{schedule} {family} evaluation"] = _difference([("", output)], {"": whole(*inputs)})
        # An evaluation without rows, and a step without rows for this replica.
        output = passes.evaluate(_batch(family, 0, 9)[0])
        assert output is None or len(output) == 0
        passes.train([], _loss)
    return found


class _Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run_links(self.links(), (x,))
        return out


class _PassesOn(_Chain):
    """Stages pass on an argument in addition to their result, and return views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def links(self) -> list[Link]:
        first = Link("layers.0", lambda x: (x[:, :], self.layers[0](x)), ("layers.0",))
        return [first, *(Link(f"layers.{i}", partial(self._add, i), (f"layers.{i}",)) for i in (1, 2, 3))]

    def _add(self, index: int, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.layers[index](x + y)
        return (y, out) if index < 3 else out[:, 1:]


class _AddsLosses(_Chain):
    """A stage's own loss depends on weights through its inputs, around them, and after its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.sides = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def links(self) -> list[Link]:
        return [Link(f"layers.{i}", partial(self._add, i), (f"layers.{i}", f"sides.{i}")) for i in range(4)]

    def _add(self, index: int, x: torch.Tensor) -> torch.Tensor:
        layer, side = self.layers[index], self.sides[index]
        y: torch.Tensor = layer(x).tanh()
        add_loss(layer.weight.square().sum().expand(len(x)))
        add_loss(side(y).square().sum(1) + side(x).sum(1))
        return y


class _BringsWeights(_Chain):
    """Adds a token, and passes on a query and a bias that do not depend on the stage's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(6)})
        self.token, self.query, self.bias = (nn.Parameter(torch.randn(1, 4)) for _ in range(3))

    def links(self) -> list[Link]:
        runs = (self._first, self._start, self._use, self._use, self._use, self._end)
        own: dict[int, tuple[str, ...]] = {1: ("token", "query", "bias")}
        parts = [(f"layers.{i}", *own.get(i, ())) for i in range(6)]
        return [Link(parts[i][0], partial(run, i), parts[i]) for i, run in enumerate(runs)]

    def _first(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[str(index)](x).tanh()

    def _start(self, index: int, x: torch.Tensor) -> Any:
        query = self.query.tanh()
        rows = torch.cat([self.token.expand(1, 4), self.layers[str(index)](x) + query])
        return rows, query.expand(len(x), 4), self.bias

    def _use(self, index: int, x: torch.Tensor, query: torch.Tensor, bias: torch.Tensor) -> Any:
        return self.layers[str(index)](x).tanh() + bias, query * x[1:], bias

    def _end(self, index: int, x: torch.Tensor, query: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[str(index)](x[1:] + query) * x[:1] + bias
        return out


def _brought_gradients(collective: Collective) -> Any:
    torch.manual_seed(0)
    whole = _BringsWeights()
    micros = _split(((torch.randn(5, 4),), torch.randint(0, 4, (5,))), (2, 2, 1))
    _whole(whole, micros)
    found: dict[str, float] = {}
    for schedule in FLUSHED:
        network = copy.deepcopy(whole)
        network.zero_grad()
        least, _ = SCHEDULES[schedule].virtual
        cuts = [f"layers.{i}" for i in ((1, 2, 3) if least == 2 else (1,))]
        options = Pipeline(schedule=schedule, virtual=least, cuts=cuts)
        passes = build_pipeline(network, RankMesh.of(collective, {"pipeline": collective.size}), options)
        _piped(passes, micros)
        found[schedule] = _far(passes, whole)
    return found


def test_weights_that_meet_no_input_of_their_stage_get_their_gradients() -> None:
    for text in run_ranks(2, "torch", _brought_gradients):
        assert max(text.values()) < 1e-6, text


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_stages_that_pass_arguments_on_or_change_them_in_place(schedule: str) -> None:
    mesh = RankMesh.of(LocalCollective())
    torch.manual_seed(0)
    in_place = [nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(inplace=True), nn.Linear(4, 3)]
    for network in (_PassesOn(), _AddsLosses(), nn.Sequential(*in_place)):
        whole, links = copy.deepcopy(network), links_of(network)
        virtual = min(4, SCHEDULES[schedule].virtual[1])  # every link is a stage
        passes = build_pipeline(network, mesh, Pipeline(schedule=schedule, virtual=virtual))
        assert len(passes.stages) in (1, len(links))
        micros = _split(((torch.randn(5, 4),), torch.randint(0, 3, (5,))), (2, 2, 1))
        _step(whole, passes, micros)
        assert _far(passes, whole) < 1e-6
        assert any(gradient is not None for gradient in _gradients(whole).values())


_ALL_PAIRS = [(schedule, family) for schedule in FLUSHED for family in FAMILIES]
_SOME = [("1f1b", "transformer_classifier"), ("1f1b", "mixture"), ("zero_bubble", "mixture")]


@pytest.mark.parametrize(
    ("size", "pairs", "steps"),
    [
        (2, [*((schedule, "transformer_lm") for schedule in FLUSHED), *_SOME], _STEPS[:2]),
        pytest.param(4, _ALL_PAIRS, _STEPS, marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_every_schedule_gives_the_gradients_of_one_process(size: int, pairs: Any, steps: Any) -> None:
    for text in run_ranks(size, "torch", partial(_all_gradients, pairs=pairs, steps=steps)):
        assert len(text) >= len(pairs) * len(steps)
        assert max(text.values()) < 1e-6, text


def _stage_of(family: str, network: nn.Module, num_stages: int) -> dict[str, int]:
    """Returns the stage of every parameter; a tied parameter belongs to its first stage."""
    links = links_of(network)
    bounds = partition_by_cost(links, num_stages, count_parameters(network, links))
    stages = {}
    for name, _ in network.named_parameters():
        index = next(i for i, link in enumerate(links) if any(belongs_to(name, p) for p in link.parts))
        stages[name] = bisect_right(bounds, index) - 1
    return stages


def _late_trainings(collective: Collective, *, cases: list[tuple[str, str, int]]) -> Any:
    """Compares with one process that delays each stage's gradients by the same number of steps."""
    mesh = RankMesh.of(collective, {"pipeline": collective.size})
    found: dict[str, Any] = {}
    for schedule, family, num_micro in cases:
        whole, passes = _made(family, mesh, schedule, num_micro=num_micro)
        make: Any = SCHEDULES[schedule].delays
        delays, stage_of = make(collective.size, num_micro), _stage_of(family, whole, collective.size)
        optimizers = [torch.optim.SGD(net.parameters(), 0.05) for net in (whole, passes.network)]
        gradients: list[dict[str, torch.Tensor | None]] = []

        def apply(whole: nn.Module = whole, gradients: Any = gradients, optimizers: Any = optimizers) -> None:
            for name, parameter in whole.named_parameters():
                past = len(gradients) - 1 - delays[stage_of[name]]  # noqa: B023
                parameter.grad = gradients[past][name] if past >= 0 else None
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        for step in range(14):
            # Full steps, short steps and one without rows; the pipeline drains twice.
            rows = (2,) * num_micro if step % 5 else ((1,) if step else (2,) * num_micro)
            micros = [] if step == 8 else _split(_batch(family, sum(rows), step), rows)
            _whole(whole, micros)
            gradients.append(_gradients(whole))
            _piped(passes, micros)
            assert passes.steps_in_flight
            apply()
            if step in (6, 13):
                while passes.steps_in_flight:
                    gradients.append(dict.fromkeys(gradients[0]))
                    passes.drain()
                    apply()
                name = f"{schedule} {family} {num_micro} after {step}"
                found[name] = _weights_far(passes, whole)
    return found


_LATE = [(schedule, "mlp", m) for schedule in ("2bw", "pipedream") for m in (1, 2, 4)]
_LATE += [("2bw", "transformer_lm", 4), ("2bw", "transformer_classifier", 3), ("pipedream", "mixture", 2)]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, [("2bw", "transformer_lm", 3), ("pipedream", "mlp", 1)]),
        pytest.param(4, _LATE, marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_schedules_without_a_flush_are_training_with_late_gradients(size: int, cases: Any) -> None:
    for found in run_ranks(size, "torch", partial(_late_trainings, cases=cases)):
        assert len(found) == 2 * len(cases)
        assert max(found.values()) < 1e-6, found


def _special(collective: Collective) -> Any:
    mesh = RankMesh.of(collective, {"pipeline": collective.size})
    found: dict[str, float] = {}
    for schedule in ("1f1b", "zero_bubble", "2bw"):
        for case in ("recomputed", "autocast", "frozen"):
            family: str = "mixture" if case == "recomputed" else "transformer_classifier"
            around: Any = nullcontext
            whole, passes = _made(family, mesh, schedule)
            if case == "recomputed":
                apply_activation_checkpoint(passes.network, "all")
            if case == "autocast":
                around = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
            if case == "frozen":
                # Only the layers from the last block on are trained, so no gradient reaches the first stage.
                for network in (whole, passes.network):
                    for name, parameter in network.named_parameters():
                        parameter.requires_grad_(name.startswith(("blocks.5", "norm", "head")))
            rows = (3, 3, 2)
            for step in range(2):
                micros = _split(_batch(family, sum(rows), step), rows)
                _step(whole, passes, micros, around)
                if passes.steps_in_flight:
                    # Meanwhile the optimizer changes the weights of the step in progress.
                    with torch.no_grad():
                        kept = [p.clone() for p in passes.network.parameters()]
                        for parameter in passes.network.parameters():
                            parameter.mul_(3)
                    passes.drain()
                    assert not passes.steps_in_flight
                    with torch.no_grad():
                        for parameter, old in zip(passes.network.parameters(), kept, strict=True):
                            parameter.copy_(old)
                found[f"{schedule} {case} {step}"] = _far(passes, whole)
    return found


def test_recomputed_autocast_and_frozen_layers() -> None:
    for found in run_ranks(2, "torch", _special):
        assert len(found) == 18
        assert max(found.values()) < 1e-6, found
