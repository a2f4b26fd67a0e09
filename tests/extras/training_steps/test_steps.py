"""What a step computes on one rank, and what is refused on the driver."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import own_training_steps as steps
import pytest
import torch
from small_training import bare_config, columns_of, config_of
from torch import nn
from torch.nn import functional as F

from ringspark.estimators import TorchEstimator, TorchRegressor
from ringspark.estimators.collectives.in_process import InProcessCollective, RankError, run_in_turns
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.stages.to_config import config_of as config_of_stage
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.extras.planning.memory.columns import shard_columns
from ringspark.extras.planning.memory.plan import Planner
from ringspark.extras.training_steps.engine import Engine
from ringspark.extras.training_steps.gathering import StepRows
from ringspark.extras.training_steps.losses import hard_triplet, info_nce, nt_xent
from ringspark.extras.training_steps.named_optimizers import NamedOptimizers
from ringspark.extras.training_steps.runner import StepRunner
from ringspark.extras.training_steps.step import Step
from ringspark.pipelines.epoch_plan import plan_epoch

CPU = torch.device("cpu")
ROWS = 7


def make_step(collective: Any, every: torch.Tensor, shuffle: bool) -> tuple[Step, StepRows]:
    """Returns a rank's step of `every`, rows of all ranks in their common order."""
    settings = {"batch_size": len(every), "epoch": 0, "seed": 3, "shuffle": shuffle}
    plan = plan_epoch([len(every)], num_shards=collective.size, **settings)
    rows = StepRows(plan, 0, collective, CPU)
    own = every[rows.own] if len(rows.own) else every[:1].exp()  # a row that must count nowhere
    given = {"module": nn.Identity(), "batch": Batch(inputs=(own,), labels=(own,), weight=None), "rows": rows}
    nothing: dict[str, Any] = {"optimizers": {}, "engine": None, "log": lambda *_: None}
    numbers = {"num_rows": len(rows.own), "divisor": float(len(every)), "seed": 1, "epoch": 1}
    return Step(**given, **nothing, **numbers), rows


def _losses(step: Step, weight: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the shares of all losses of pairs, of embeddings x @ weight."""
    (x,) = step.inputs
    z, other = x @ weight, (x + 0.5).sin() @ weight
    kinds = (x[:, 0] > 0).long()
    share = step.mean(info_nce(step, z, other, 0.3) + nt_xent(step, z, other) + hard_triplet(step, z, kinds))
    return share + step.whole((step.gather(z) ** 3).sum())


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("ranks", "num_rows"), [(2, ROWS), (3, ROWS), (5, 3)])
def test_losses_over_pairs_have_the_gradients_of_one_rank(ranks: int, num_rows: int, shuffle: bool) -> None:
    """Also with unequal numbers of rows per rank, and with ranks without rows."""
    generator = torch.Generator().manual_seed(0)
    every = torch.randn(num_rows, 4, generator=generator)
    start = torch.randn(4, 3, generator=generator)

    def work(collective: InProcessCollective) -> tuple[float, torch.Tensor, torch.Tensor]:
        weight = start.clone().requires_grad_()
        step, _ = make_step(collective, every, shuffle)
        loss = _losses(step, weight)
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        # A penalty on the gradient needs the derivative of the gathering's derivative.
        total = collective.all_reduce(gradient.detach())
        (second,) = torch.autograd.grad((gradient * total).sum(), weight)
        return float(loss.detach()), gradient.detach(), second

    ((expected, first, second),) = run_in_turns(1, work)
    found = run_in_turns(ranks, work)
    assert sum(loss for loss, _, _ in found) == pytest.approx(expected, rel=1e-5)
    scale = first.abs().max()
    assert (sum(gradient for _, gradient, _ in found) - first).abs().max() < 1e-5 * scale
    assert (sum(other for _, _, other in found) - second).abs().max() < 1e-5 * second.abs().max()


def test_losses_over_pairs_equal_their_formulas() -> None:
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.randn(ROWS, 3, generator=generator) for _ in range(2))
    ((step, _),) = run_in_turns(1, lambda collective: make_step(collective, first, shuffle=False))
    a, b = F.normalize(first, dim=1), F.normalize(second, dim=1)
    each = [-torch.log((a[i] @ b[i] / 0.2).exp() / (b @ a[i] / 0.2).exp().sum()) for i in range(ROWS)]
    assert torch.allclose(info_nce(step, first, second, 0.2), torch.stack(each), atol=1e-5)
    views, expected = torch.cat([a, b]), torch.zeros(ROWS)
    for i in range(2 * ROWS):
        others = [k for k in range(2 * ROWS) if k != i]
        scores = (views @ views[i] / 0.5).exp()
        expected[i % ROWS] -= torch.log(scores[(i + ROWS) % (2 * ROWS)] / scores[others].sum()) / 2
    assert torch.allclose(nt_xent(step, first, second), expected, atol=1e-5)
    kinds = torch.tensor([0, 0, 0, 1, 1, 2, 1])
    triplets = torch.zeros(ROWS)
    for i in range(ROWS):
        far = [float((first[i] - first[k]).norm()) for k in range(ROWS) if kinds[k] == kinds[i] and k != i]
        near = [float((first[i] - first[k]).norm()) for k in range(ROWS) if kinds[k] != kinds[i]]
        triplets[i] = max(0.0, max(far) - min(near) + 0.2) if far else 0.0
    assert torch.allclose(hard_triplet(step, first, kinds), triplets, atol=1e-5)


@pytest.mark.parametrize("shuffle", [True, False])
def test_random_numbers_of_a_row_do_not_depend_on_the_ranks(shuffle: bool) -> None:
    every = torch.arange(ROWS * 2.0).view(ROWS, 2)

    def work(collective: InProcessCollective) -> tuple[torch.Tensor, torch.Tensor]:
        step, _ = make_step(collective, every, shuffle)
        step.rand(1)
        return step.gather(step.inputs[0]), step.gather(step.randn(2))

    ((_, numbers),) = run_in_turns(1, work)
    for gathered, found in run_in_turns(3, work):
        assert torch.equal(gathered, every)
        assert torch.equal(found, numbers)


def test_named_optimizers_share_groups_and_state() -> None:
    modules = {name: nn.Linear(2, 2) for name in ("a", "b")}
    kinds = {"a": torch.optim.Adagrad, "b": torch.optim.Adam}
    each = {name: kind(modules[name].parameters(), lr=0.1) for name, kind in kinds.items()}
    union = NamedOptimizers.of(each)
    assert type(union).__name__ == "a: Adagrad, b: Adam"
    union.param_groups[1]["lr"] = 0.5
    assert each["b"].param_groups[0]["lr"] == 0.5
    sum((m(torch.ones(1, 2)).sum() for m in modules.values()), torch.zeros(())).backward()
    union.step()
    for name, module in modules.items():
        assert union.state[module.weight] is each[name].state[module.weight]
        assert union.state[module.weight]["step"] == 1


def _unnamed(step: Any) -> None:
    step.minimize(step.mean(step.module(*step.inputs)[:, 0]), "discriminat")


def _unreduced(step: Any) -> None:
    step.minimize(step.module(*step.inputs)[:, 0], "generator")


def _of_a_matrix(step: Any) -> None:
    step.minimize(step.mean(step.module(*step.inputs)), "generator")


def _twice(gan: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.SGD(gan.parameters(), lr=0.1) for name in ("generator", "discriminator")}


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("training_step", _unnamed, r"'discriminat'; give one of \['generator', 'discriminator'\]"),
        ("training_step", _unreduced, r"needs a loss without dimensions, got \(2,\); use step.mean"),
        ("training_step", _of_a_matrix, r"step.mean needs one value per row, shape \(2,\), got \(2, 2\)"),
        ("training_step", lambda step: None, "called neither step.minimize nor step.record_loss"),
        ("training_step", lambda step: step.log("loss", 1.0), "step.log got the name 'loss'"),
        ("training_step", None, "UserObjects has training_step=None; set both"),
        ("optimizer", lambda gan: {}, "optimizer must return optimizers by name"),
        ("optimizer", lambda gan: {"generator": 3}, "must return a torch.optim.Optimizer, got int"),
        ("optimizer", _twice, "optimizer holds a parameter twice"),
    ],
)
def test_a_wrong_function_fails_on_the_driver(
    name: str, function: Any, message: str, make_shards: Any, tmp_path: Path
) -> None:
    manifest = make_shards({"x": np.ones((8, 4), np.float32), "y": np.ones((8, 2), np.float32)})
    config = config_of(manifest, tmp_path, task="any", losses=("auto",), training_step="own")
    good = UserObjects(module=steps.Gan(), training_step=steps.gan_step, optimizer=steps.gan_optimizers)
    with pytest.raises(ValueError, match=message) as caught:
        check_training(config, replace(good, **{name: function}), manifest)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noiseScale": True}, "but trainingStep runs its own; leave trainingStep unset"),
        ({"memoryBudget": "1g"}, "measure a step, which trainingStep replaces, .* leave both unset"),
        ({"parallelism": "auto"}, "measure a step, which trainingStep replaces, .* leave both unset"),
        ({"parameterGroups": [{"params": "*.weight"}]}, "the function gets the module; set the rates in"),
        ({"trainingStep": "lightnings"}, "got 'lightnings'; did you mean 'lightning'"),
        ({"trainingStep": "lightning", "weightCol": "w"}, "mean over rows .* leave weightCol unset"),
    ],
)
def test_what_a_step_cannot_be_combined_with_is_refused(changes: dict[str, Any], message: str) -> None:
    settings = {"model": steps.Gan(), "trainingStep": steps.gan_step, "optimizer": steps.gan_optimizers}
    settings |= {"labelCols": ["point"], "featuresCol": "noise"}
    with pytest.raises(ValueError, match=message):
        config_of_stage(TorchEstimator(**settings | changes), "any", ["point"])


def test_a_stage_returns_its_step() -> None:
    stage = TorchRegressor(model=nn.Linear(4, 1), trainingStep=steps.ordinary_step)
    assert stage.getTrainingStep() is steps.ordinary_step


class Reports(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from ringspark.models.reports import add_loss

        if self.training:
            add_loss(x.square().mean(1))
        return super().forward(x)


def test_one_optimizer_adds_losses_of_layers_several_refuse_them(make_shards: Any, tmp_path: Path) -> None:
    manifest = make_shards(columns_of(8))
    config = config_of(manifest, tmp_path, training_step="own", epochs=1)
    train_here(config, UserObjects(module=Reports(4, 1), training_step=steps.ordinary_step))
    objects = UserObjects(
        module=Reports(4, 1),
        training_step=lambda step: step.minimize(step.mean(step.module(*step.inputs)[:, 0]), "weight"),
        optimizer=lambda net: {n: torch.optim.SGD([p], lr=0.1) for n, p in net.named_parameters()},
    )
    with pytest.raises(ValueError, match=r"add losses by add_loss, and only step\.minimize of a single"):
        check_training(config, objects, manifest)


def test_a_plan_of_the_memory_is_refused(make_shards: Any, tmp_path: Path) -> None:
    manifest = make_shards(columns_of(8))
    config = config_of(manifest, tmp_path, training_step="own")
    objects = UserObjects(module=nn.Linear(4, 1), training_step=steps.ordinary_step)
    planner = Planner(config, objects, *shard_columns(config, manifest, 8))
    with pytest.raises(ValueError, match="trainingStep is 'own'; measure a short training instead"):
        planner.plan(None, "budget")


def _engine(precision: str) -> tuple[nn.Linear, Engine]:
    """Returns a layer, and an engine with one optimizer for its weight and one for its bias."""
    layer = nn.Linear(2, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    syncs = {
        name: GradientSync(layer, torch.optim.SGD([parameter], lr=0.1))
        for name, parameter in layer.named_parameters()
    }
    # The scale grows in every update.
    return layer, Engine(syncs, LossScaler(precision, CPU, growth_interval=1), None, CPU)


def test_a_new_scale_in_fp16_keeps_the_gradients_that_wait_for_a_step() -> None:
    """A LightningModule may call one backward pass for two optimizers."""
    found = []
    for precision in ("fp32", "fp16"):
        layer, engine = _engine(precision)
        for _ in range(2):
            engine.zero_grad("weight")
            engine.zero_grad("bias")
            engine.backward((layer(torch.ones(3, 2)) - 1).square().mean())
            engine.step("weight")
            engine.step("bias")
        found.append([parameter.detach().clone() for parameter in layer.parameters()])
    torch.testing.assert_close(found[0], found[1])


def test_clipped_gradients_are_not_added_to() -> None:
    layer, engine = _engine("fp16")
    engine.backward(layer(torch.ones(3, 2)).mean())
    engine.clip("weight", 0.1)
    with pytest.raises(ValueError, match="'weight' clips its gradients before a backward pass adds"):
        engine.backward(layer(torch.ones(3, 2)).mean())
    with pytest.raises(ValueError, match="optimizer 'bias' clips or steps before optimizer 'weight', whose"):
        engine.step("bias")
    engine.step("weight")
    engine.step("bias")


@pytest.mark.parametrize("in_turns", [False, True])
def test_ranks_that_step_in_different_steps_are_found(in_turns: bool) -> None:
    """The ranks send equally many gradients of equal sizes, so no collective call fails."""

    def work(collective: InProcessCollective) -> float:
        def train(step: Step) -> None:
            takes_two = step.number == collective.rank if in_turns else step.number == 0
            for _ in range(1 + takes_two):
                step.minimize(step.mean(step.module(step.inputs[0])[:, 0]))

        network, objects, mesh = nn.Linear(2, 1), UserObjects(training_step=train), RankMesh.of(collective)
        sync = GradientSync(network, torch.optim.SGD(network.parameters(), lr=0.1))
        config = bare_config(training_step="own")
        runner = StepRunner(config, objects, sync, LossScaler("fp32", CPU), mesh, CPU)
        plan = plan_epoch([4], num_shards=2, batch_size=2, epoch=0, seed=0, shuffle=False)
        batch = Batch(inputs=(torch.ones(1, 2),), labels=(torch.ones(1),), weight=None)
        for number in range(2):
            runner.train(batch, plan, number, number, 1)
        runner.take("train", collective)
        return float(network.weight.detach().sum())

    refusal = pytest.raises(RankError, match="trainingStep took other optimizer steps on some ranks")
    with refusal if in_turns else nullcontext():
        assert len(run_in_turns(2, work)) == 2
