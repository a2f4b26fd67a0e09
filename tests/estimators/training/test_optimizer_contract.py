"""The whole contract of `torch.optim.Optimizer`: modes, and everything that `state_dict()` returns."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from awkward_networks import make_columns
from parity import equal_to_undisturbed
from small_training import Runs, state_of, train_in_threads
from torch import nn

from ringspark.estimators.options.sync import AllReduce, Zero
from ringspark.estimators.parallel.optimizer_state import place_value
from ringspark.estimators.training.settings.config import UserObjects


class CountsCalls(torch.optim.SGD):
    """Its `state_dict` has a key of its own."""

    calls = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"calls": self.calls}

    def load_state_dict(self, state_dict: Any) -> None:
        self.calls = state_dict.pop("calls")
        super().load_state_dict(state_dict)


class Modal(CountsCalls):
    """Steps ahead of the weights, as schedule-free optimizers do: `eval()` takes the look-ahead back.

    Its rate depends on numbers that belong to no parameter.
    """

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, lr)
        self.is_ahead = False
        self.state["common"] = {"sum": torch.zeros(3), "steps": 0}  # type: ignore[index]

    def train(self) -> None:
        self._move(not self.is_ahead, 1.0)
        self.is_ahead = True

    def eval(self) -> None:
        self._move(self.is_ahead, -1.0)
        self.is_ahead = False

    @torch.no_grad()
    def _move(self, moves: bool, sign: float) -> None:
        for parameter in self.param_groups[0]["params"] if moves else ():
            parameter.add_(sign * 0.25)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.is_ahead, "call train() first"
        common: Any = self.state["common"]  # type: ignore[index]
        self.calls += 1
        common["steps"] += 1
        common["sum"] += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.param_groups[0]["lr"] * parameter.grad / (self.calls + common["sum"][0]))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's check takes ten steps of an optimizer that counts, instead of a thousand."""
    monkeypatch.setattr("ringspark.extras.own_code.optimizer_check._MANY_STEPS", 10)


@pytest.mark.usefixtures("few_steps")
def test_an_optimizer_trains_and_is_saved_in_its_modes(runs: Runs) -> None:
    columns, plain = make_columns(83), _net()
    manifest = runs.shards(columns, num_files=1)
    result = runs.here(manifest, UserObjects(module=_net(), optimizer=Modal), shuffle=False)
    optimizer = Modal(plain.parameters())
    optimizer.train()
    x, y = torch.from_numpy(columns["x"]), torch.from_numpy(columns["y"])
    for _ in range(2):
        for rows in torch.arange(83).split(32):
            optimizer.zero_grad()
            (plain(x[rows])[:, 0] - y[rows]).square().mean().backward()
            optimizer.step()
    optimizer.eval()
    assert torch.allclose(state_of(result)["weight"], plain.weight, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.extras
def test_modes_of_a_sharded_optimizer_are_refused(runs: Runs) -> None:
    objects = UserObjects(module=_net(), optimizer=Modal)
    with pytest.raises(ValueError, match=r"Modal .* modes"):
        runs.check(83, objects, sync=Zero(stage=1), num_workers=2)


class Scaled(torch.optim.SGD):
    """Its groups hold a tensor and a nested value, and each step depends on both."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.05)
        self.param_groups[0] |= {"rates": torch.ones(3), "seen": {"rows": [0, (1.0, "a")]}}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["rates"][1] *= 0.7
        group["seen"]["rows"][0] += 1
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.sub_(0.01 * group["rates"].sum() / group["seen"]["rows"][0] * parameter.grad)


class Counted(CountsCalls):
    """Its `state` has a tensor and a number that belong to no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.05)
        self.state["common"] = {"sum": torch.zeros(3), "steps": 0}  # type: ignore[index]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        common: Any = self.state["common"]  # type: ignore[index]
        self.calls += 1
        common["steps"] += 2
        common["sum"] += self.calls
        self.param_groups[0]["weight_decay"] = self.calls / common["steps"] ** 2 / float(common["sum"][0])
        super().step()


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("make", [Scaled, Counted])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_resumed_run_of_two_workers_is_bitwise_the_same(runs: Runs, make: Any, stage: int) -> None:
    sync = Zero(stage=stage) if stage else AllReduce()
    config = runs.config(make_columns(83), num_workers=2, checkpoint_every_steps=1, sync=sync)
    objects = UserObjects(module=_net(), optimizer=make)
    for result in equal_to_undisturbed(config, objects, step=5, train=train_in_threads):
        assert result.checkpoint_errors == ()


class Hides(torch.optim.SGD):
    """Changes something that no checkpoint holds: an attribute, an array or a nested state."""

    def __init__(self, parameters: Any, place: str = "attribute") -> None:
        super().__init__(parameters, 0.05)
        self.place, self.calls = place, 0
        self.param_groups[0]["array"] = np.ones(2)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += self.place in ("attribute", "rare")
        self.param_groups[0]["array"] += self.place == "array"
        # A counter of "rare" has an effect in every fiftieth step only.
        calls = self.calls % 50 == 0 if self.place == "rare" else self.calls
        factor = calls + self.param_groups[0]["array"].sum()
        if self.place == "nested":
            self.state["all"] = {"history": [1, 2]}  # type: ignore[index]
        self.param_groups[0]["lr"] = 0.1 / factor
        super().step()


class Joint(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm(held)
        for gradient in held:
            gradient.div_(norm)
        super().step()


class _Sharpness(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        return super().step(closure)


OTHER_STEP = "Hides takes a different step after its state was saved and loaded"


@pytest.mark.extras
@pytest.mark.parametrize(
    ("make", "sentence", "changes", "allowed"),
    [
        *(
            (partial(Hides, place=place), words, {}, {"checkpoint_every_seconds": 0.0})
            for place, words in (
                *((place, OTHER_STEP) for place in ("attribute", "rare", "array")),
                ("nested", "the optimizer's state 'state:all:history' is a list"),
            )
        ),
        (
            partial(Joint, lr=0.1),
            r"Joint .*each worker's optimizer .*set sync=AllReduce\(\)",
            {"num_workers": 2, "sync": Zero(stage=1)},
            {"num_workers": 2},
        ),
        (partial(_Sharpness, lr=0.1), "closure", {}, None),
    ],
)
def test_an_optimizer_that_would_resume_or_shard_wrongly_is_refused(
    runs: Runs, make: Any, sentence: str, changes: Any, allowed: Any
) -> None:
    objects = UserObjects(module=_net(), optimizer=make)
    with pytest.raises(ValueError, match=sentence):
        runs.check(83, objects, **changes)
    if allowed is not None:
        runs.check(83, objects, **allowed)


def test_state_of_a_scalar_parameter_lies_on_its_device() -> None:
    temperature, group = nn.Parameter(torch.zeros((), device="meta")), {"fused": None}
    assert place_value(torch.ones(()), temperature, group, "exp_avg").is_meta  # type: ignore[union-attr]
    assert not place_value(torch.ones(()), temperature, group, "step").is_meta  # type: ignore[union-attr]
