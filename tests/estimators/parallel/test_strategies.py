"""One contract for every strategy and collective; one gang of real processes runs all cases."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from held_bytes import held_bytes
from ranks import run_one, run_ranks
from registries import EXTRAS, list_available
from torch import nn

from ringspark.estimators.collectives import COLLECTIVES, Collective
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.parallel import STRATEGIES, SyncSettings
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.build import build_optimizer
from ringspark.estimators.training.precision import LossScaler

pytestmark = pytest.mark.distributed

# Ranks of these strategies step independently, so their weights differ from one worker's: see
# test_parameter_server.py and the folder local.
APART = {"local_average", "diloco", "elastic", "parameter_server", "hogwild"}
# Its weights have noise: see test_cpsgd.py.
APART |= {"cpsgd"}
CASES = [
    (strategy, collective)
    for strategy in list_available(STRATEGIES)
    if strategy not in APART
    for collective in COLLECTIVES
    if collective != "local" and (strategy, collective) != ("zero3", "horovod")
]
SHARDED = [case for case in CASES if case[0] != "data_parallel"]


def _for(cases: list[tuple[str, str]]) -> Any:
    """Returns a decorator with the parameters `strategy` and `collective`; extras have their mark."""
    extra = [strategy for strategy, path in STRATEGIES.paths.items() if path.startswith(EXTRAS)]
    params = [pytest.param(*case, marks=[pytest.mark.extras] if case[0] in extra else []) for case in cases]
    return pytest.mark.parametrize(("strategy", "collective"), params)


STEPS = 20
# Rows per step: uneven counts, and single rows that leave all other ranks without any.
ROWS = [5, 4, 1, 7, 3] * (STEPS // 5)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Net(nn.Module):
    """Blocks in sequence, with many types of parameters around them."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(3)))
        self.head = nn.Linear(dim, 1)
        self.never, self.sometimes = nn.Linear(dim, 1), nn.Linear(dim, 1)
        self.frozen = nn.Linear(dim, 1)
        self.frozen.requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(dim, 5).t())  # not contiguous, but dense
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        hidden = self.blocks(self.stem(x)) + self.frozen(self.stem(x))
        output = self.head(hidden) + (hidden @ self.turned.t()).sum(1, keepdim=True)
        chosen = x[:, :1] > 0.8
        if chosen.any():  # depends on the data, so only one rank may use it
            output = output + torch.where(chosen, self.sometimes(hidden), 0.0)
        return output


Make = Callable[[nn.Module], torch.optim.Optimizer]


def _settings(strategy: str, micro_batches: int) -> SyncSettings:
    """Returns settings under which every strategy computes the result of one rank."""
    settings: dict[str, Any] = {"micro_batches": micro_batches}
    if strategy == "compressed":
        settings["sync"] = AllReduce(compression=Compression.of({"name": "topk", "ratio": 1.0, "least": 1}))
    return SyncSettings(**settings)


def _by_name(name: str, groups: Any = None, rate: float = 0.01) -> Make:
    return lambda module: build_optimizer(name, module, groups, rate, 0.1)


def _adafactor(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for p in module.parameters() if p.requires_grad], lr=0.01)


def _train(
    collective: Collective,
    strategy: str,
    make: Make,
    *,
    steps: int = STEPS,
    micro_batches: int = 1,
    max_norm: float | None = None,
    scaler: LossScaler | None = None,
    inspect: Callable[[GradientSync, int], None] | None = None,
    poison: Callable[[int], float] = lambda step: 1.0,
) -> GradientSync:
    """Runs the trainer's steps on this rank's share of the rows."""
    sync = STRATEGIES[strategy].prepare(
        Net(), make, RankMesh.of(collective), _settings(strategy, micro_batches)
    )
    scaler = scaler or LossScaler("fp32", torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        rows = torch.rand(ROWS[step % len(ROWS)], 3, generator=generator)
        mine = rows[collective.rank :: collective.size]
        sync.optimizer.zero_grad()
        parts = [part for part in mine.tensor_split(micro_batches) if len(part)]
        for i, part in enumerate(parts):
            with sync.micro_batch(last=i == len(parts) - 1):
                loss = (sync.module(part) - part.sum(1, keepdim=True)).square().sum() / len(rows)
                scaler.scale(loss * sync.loss_factor * poison(step)).backward()
        if not parts:
            sync.backward_without_rows((mine,))
        sync.reduce()
        if inspect is not None:
            inspect(sync, step)
        if max_norm is not None:
            scaler.unscale(sync.optimizer)
            sync.clip_gradients(max_norm)
        sync.step(scaler)
        scaler.update()
    return sync


def _weights(sync: GradientSync) -> list[float]:
    if hasattr(sync.network, "reshard"):
        sync.network.reshard()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in sync.network.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def _scaler(collective: Collective, strategy: str) -> LossScaler:
    combine = partial(collective.all_reduce, op="max") if strategy != "data_parallel" else None
    return LossScaler("fp16", torch.device("cpu"), combine, init_scale=8.0)


def _overflowing(collective: Collective, strategy: str) -> dict[str, Any]:
    """Runs fp16 loss scaling; in step 3, the rows of one rank give infinite gradients."""
    scaler, last = _scaler(collective, strategy), collective.rank == collective.size - 1

    def poison(step: int) -> float:
        return float("inf") if step == 3 and last else 1.0

    sync = _train(collective, strategy, _by_name("adamw"), steps=5, scaler=scaler, poison=poison)
    return {"weights": _weights(sync), "skipped": scaler.skipped_steps, "scale": scaler.current_scale}


def _one_element(collective: Collective, strategy: str) -> dict[str, Any]:
    """Runs fp16 loss scaling; one element of the reduced gradient overflows, in one rank's shard."""
    scaler = _scaler(collective, strategy)

    def poison(sync: GradientSync, step: int) -> None:
        held = [p for group in sync.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if step == 1 and collective.rank == 0:
            gradient: Any = held[0].grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local[(0,) * local.dim()] = float("inf")

    sync = _train(collective, strategy, _by_name("sgd"), steps=2, scaler=scaler, inspect=poison)
    return {"weights": _weights(sync), "skipped": scaler.skipped_steps}


GROUPS = [{"params": "head.bias", "learningRate": 0.05}, {"params": "blocks.*", "weightDecay": 0.0}]
TRAININGS: dict[str, dict[str, Any]] = {
    "adamw": {"make": _by_name("adamw")},
    "momentum, micro-batches and clipping": {
        "make": _by_name("momentum"),
        "micro_batches": 3,
        "max_norm": 0.2,
        "steps": 10,
    },
    "groups": {"make": _by_name("adamw", GROUPS), "steps": 10},
    "adagrad": {"make": _by_name("adagrad"), "steps": 10},
    "adafactor": {"make": _adafactor, "steps": 10},
}


def _bytes(collective: Collective, strategy: str) -> dict[str, Any]:
    sent: list[int] = []
    counted: list[dict[str, int]] = []

    def count(sync: GradientSync, step: int) -> None:
        if step == 3:
            counted.append(held_bytes(sync))
        sent.append(collective.bytes_sent)

    sync = _train(collective, strategy, _by_name("adamw"), steps=8, inspect=count)
    return {"state": counted[0], "sent": sent[7] - sent[6], "loss factor": sync.loss_factor}


def _refusals(collective: Collective) -> list[str]:
    """Returns the messages of cases that sharded parameters do not support."""
    scalar = nn.Linear(2, 1)
    scalar.temperature = nn.Parameter(torch.ones(()))
    cases: list[tuple[nn.Module, Make]] = [(Net(), _adafactor), (scalar, _by_name("sgd"))]
    messages = []
    for module, make in cases:
        try:
            STRATEGIES["zero3"].prepare(module, make, RankMesh.of(collective), SyncSettings())
        except ValueError as error:
            messages.append(str(error))
    return messages


def _work(strategy: str, collective: Collective) -> Any:
    result: dict[str, Any] = {}
    for name, options in TRAININGS.items():
        if (strategy, name) == ("zero3", "adafactor"):
            continue
        result[name] = _weights(_train(collective, strategy, **options))
    result["overflow"] = _overflowing(collective, strategy)
    if strategy != "data_parallel":
        result["overflow of one element"] = _one_element(collective, strategy)
    if strategy == "zero3":
        result["refusals"] = _refusals(collective)
    result["bytes"] = _bytes(collective, strategy)
    return result


@cache
def _results(strategy: str, collective: str) -> list[dict[str, Any]]:
    return run_ranks(2, collective, partial(_work, strategy))


@cache
def _alone() -> dict[str, Any]:
    result: dict[str, Any] = run_one(partial(_work, "data_parallel"))
    return result


@_for(CASES)
@pytest.mark.parametrize("training", TRAININGS)
def test_weights_after_twenty_steps_are_those_of_one_worker(strategy, collective, training):
    if (strategy, training) == ("zero3", "adafactor"):
        pytest.skip("refused: see test_an_optimizer_that_looks_at_whole_parameters_is_refused")
    first, second = (result[training] for result in _results(strategy, collective))
    assert first == second
    assert first == pytest.approx(_alone()[training], abs=1e-5)


@_for(CASES)
def test_a_step_that_overflows_is_skipped_by_all_ranks(strategy, collective):
    first, second = (result["overflow"] for result in _results(strategy, collective))
    assert first == second
    assert (first["skipped"], first["scale"]) == (1, 4.0)
    assert first["weights"] == pytest.approx(_alone()["overflow"]["weights"], abs=1e-5)


@_for(CASES)
def test_no_rank_multiplies_its_loss_and_overflows_where_one_worker_does_not(strategy, collective):
    assert [result["bytes"]["loss factor"] for result in _results(strategy, collective)] == [1.0, 1.0]


@_for(SHARDED)
def test_an_overflow_in_one_ranks_part_skips_the_step_on_all(strategy, collective):
    first, second = (result["overflow of one element"] for result in _results(strategy, collective))
    assert first == second
    assert first["skipped"] == 1


@_for(CASES)
def test_a_rank_holds_half_of_what_its_strategy_cuts(strategy, collective):
    whole = _alone()["bytes"]["state"]
    cut = {"data_parallel": [], "compressed": [], "zero1": ["optimizer"], "zero2": ["optimizer", "gradients"]}
    for result in _results(strategy, collective):
        for kind, num_bytes in result["bytes"]["state"].items():
            if kind in cut.get(strategy, whole):
                assert num_bytes == pytest.approx(whole[kind] / 2, rel=0.1), kind
            elif (strategy, kind) != ("zero1", "gradients"):
                assert num_bytes == whole[kind], kind


def test_an_optimizer_that_looks_at_whole_parameters_is_refused():
    for result in _results("zero3", "torch"):
        optimizer, scalar = result["refusals"]
        assert "optimizer Adafactor needs whole parameters; take one of" in optimizer
        assert "cannot shard the scalar parameter 'temperature'; give it shape (1,)" in scalar


@_for([case for case in CASES if case[0] in ("zero1", "zero2")])
def test_zero_sends_what_data_parallelism_sends(strategy, collective):
    """Reduce-scatter plus all-gather send an all-reduce's bytes, plus flags for missing gradients."""
    num_bytes = _alone()["bytes"]["state"]["gradients"]
    num_parameters = len([p for p in Net().parameters() if p.requires_grad])
    for result in _results(strategy, collective):
        flags = 4 * (num_parameters + 1)
        # The gradient of the parameter that no rank uses is sent too.
        assert num_bytes <= result["bytes"]["sent"] - flags <= num_bytes + 4 * 9 + 16
