"""Networks for tables that predict quantiles: their order, their loss, their start and their members."""

from dataclasses import replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_one, run_ranks
from small_training import bare_config
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.losses import resolve_loss
from ringspark.estimators.training.objective.metric_set import MetricSet
from ringspark.extras.tables.tabm import TabM
from ringspark.extras.tables.tabpack import TabPack
from ringspark.models.quantiles import central, find_bounds, quantile_columns

LEVELS = (0.1, 0.5, 0.9)
EDGES = [[-1.0, 0.0, 1.0]]
PINBALL = "pinball_per_member"


def network(name: str, quantiles: tuple[float, ...] = LEVELS, seed: int = 0, **label: float) -> nn.Module:
    torch.manual_seed(seed)
    given: Any = {"width": 8, "unknown": 0.0, "quantiles": quantiles, **label}
    if name == "tabm":
        return TabM(EDGES, [50], 1, members=3, dropout=0.0, **given)
    return TabPack(EDGES, [50], 1, dropouts=[0.0] * 3, rates=[1.0, 0.3, 1.0], **given)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["tabm", "tabpack"]),
    seed=st.integers(0, 10**6),
    # Larger weights overflow fp32.
    size=st.floats(-4, 3),
    quantiles=st.lists(st.integers(1, 999), min_size=2, max_size=30, unique=True),
    numbers=st.lists(st.floats(width=32), min_size=1, max_size=40),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    is_bf16=st.booleans(),
)
def test_quantiles_never_cross(
    name: str, seed: int, size: float, quantiles: Any, numbers: Any, scale: float, is_bf16: bool
) -> None:
    levels = tuple(level / 1000 for level in sorted(quantiles))
    net = network(name, levels, seed, center=1e3, scale=scale)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 10**size)
    x = torch.tensor(numbers)[:, None]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
        found = net.eval()(x, torch.arange(len(x))[:, None] % 50)
    assert found.shape == (len(x), len(levels))
    assert (found.diff(dim=1) >= 0).all()


@pytest.mark.parametrize("name", ["tabm", "tabpack"])
def test_training_starts_at_the_quantiles_of_a_normal_label(name: str) -> None:
    levels = (0.001, 0.25, 0.26, 0.5, 0.999)
    net: Any = network(name, levels, center=5.0, scale=2.0)
    weights, biases = (net.heads, net.biases) if name == "tabm" else (net.head.weight, net.head.bias)
    with torch.no_grad():
        weights.zero_()
        if name == "tabpack":  # without the random start
            biases.copy_(net.initial_outputs / net.head.rates[:, None, None])
        found = net.eval()(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64))[0]
    assert found.tolist() == pytest.approx([NormalDist(5, 2).inv_cdf(level) for level in levels], abs=1e-4)


@pytest.mark.parametrize("name", ["tabm", "tabpack"])
def test_gradients_do_not_depend_on_the_unit_of_the_label(name: str) -> None:
    loss, target = resolve_loss(PINBALL, quantiles=LEVELS), torch.randn(40)
    x, ids = torch.randn(40, 1), torch.arange(40)[:, None]
    gradients = []
    for unit in (1.0, 1e-6):
        net = network(name, center=5 * unit, scale=unit).train()
        loss(net(x, ids), (5 + target) * unit).mean().backward()
        gradients.append([p.grad for p in net.parameters() if p.grad is not None])
    # A label near a quantile may lie on its other side after rounding.
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-3)


def test_loss_and_metrics_equal_those_of_scikit_learn() -> None:
    sk = pytest.importorskip("sklearn.metrics")
    pytest.importorskip("torchmetrics")
    output, label = torch.randn(50, 3).sort().values, torch.randn(50)
    pinball = [sk.mean_pinball_loss(label, output[:, i], alpha=level) for i, level in enumerate(LEVELS)]
    assert float(resolve_loss(PINBALL, quantiles=LEVELS)(output, label).mean()) == pytest.approx(
        np.mean(pinball)
    )
    # In training, the loss is the mean over the members.
    members = torch.stack([output, output], 1)
    assert float(resolve_loss(PINBALL, quantiles=LEVELS)(members, label).mean()) == pytest.approx(
        np.mean(pinball)
    )
    names = ["pinball_loss", "coverage", "mae", "r2"]
    metrics = MetricSet(names, 3, torch.device("cpu"), quantiles=LEVELS)
    for rows in (slice(0, 20), slice(20, 50)):
        metrics.update(output[rows], label[rows])
    inside = (output[:, 0] <= label) & (label <= output[:, 2])
    expected = {
        "pinball_loss": np.mean(pinball),
        "coverage": float(inside.float().mean()),
        "mae": sk.mean_absolute_error(label, output[:, 1]),
        "r2": sk.r2_score(label, output[:, 1]),
    }
    assert metrics.compute(LocalCollective()) == pytest.approx(expected)


def test_the_prediction_is_the_quantile_nearest_to_the_median() -> None:
    found = {levels: levels[central(levels)] for levels in [LEVELS, (0.2, 0.4, 0.6), (0.8, 0.9), (0.05,)]}
    assert list(found.values()) == [0.5, 0.4, 0.8, 0.05]
    assert find_bounds((0.05, 0.1, 0.5, 0.9, 0.95), 0.8) == (1, 3)
    assert find_bounds(LEVELS, 0.9) == (1, 1)
    assert find_bounds((), 0.9) == (0, 0)


def test_a_run_that_began_without_the_setting_can_be_resumed() -> None:
    # A resume compares the configs, and takes None for a setting that the run's version did not have.
    assert bare_config().quantiles is None


def test_a_correction_never_turns_an_interval_around() -> None:
    outputs = np.array([[0.0, 1.0, 4.0], [0.0, 5.0, 10.0]])
    prediction, _, lower, upper = quantile_columns(outputs, LEVELS, 0.8, -3.0)
    assert prediction.tolist() == [1.0, 5.0]
    assert list(zip(lower, upper, strict=True)) == [(2.0, 2.0), (3.0, 7.0)]


def _shares(collective: Collective) -> Any:
    """Chooses members by 30 held-out rows; the second of three ranks has none. Returns the shares."""
    net: Any = network("tabpack").eval()
    with torch.no_grad():
        # The first member predicts the label's quantiles best, and the second one's errors are skewed.
        net.head.bias += torch.tensor([0.0, 3.0, -1.0])[:, None, None] / net.head.rates[:, None, None]
    x, label = torch.linspace(-1, 1, 30)[:, None], torch.randn(30, generator=torch.Generator().manual_seed(1))
    weight = torch.arange(30) % 3 + 0.5
    dealt = [(0, 30)] if collective.size == 1 else [(0, 12), (12, 12), (12, 30)]
    start, stop = dealt[collective.rank]
    batches = [
        Batch(inputs=(x[rows], torch.arange(30)[rows, None]), labels=(label[rows],), weight=weight[rows])
        for rows in [slice(start, stop)]
    ]
    net.choose_on(batches, collective, is_classes=False)
    return net.shares.tolist()


def test_members_are_chosen_by_the_pinball_loss_on_all_ranks_alike() -> None:
    alone = run_one(_shares)
    assert sum(alone) == pytest.approx(1)
    assert max(alone) == alone[0] > 0.5
    for found in run_ranks(3, "torch", _shares):
        assert found == pytest.approx(alone)


def shifted_pack() -> Any:
    """Returns a pack whose members predict too much, too little, and far too much."""
    net: Any = network("tabpack").eval()
    with torch.no_grad():
        net.head.bias += torch.tensor([1.0, -1.0, 2.0])[:, None, None] / net.head.rates[:, None, None]
    return net


@torch.no_grad()
def test_the_greedy_choice_lowers_the_loss_of_the_mean() -> None:
    net = shifted_pack()
    x, ids, label = torch.randn(200, 1), torch.arange(200)[:, None] % 50, torch.randn(200)
    loss = partial(resolve_loss(PINBALL, quantiles=LEVELS), label=label)
    equal = float(loss(net(x, ids)).mean())
    single = [float(loss(net.to_label(each)).mean()) for each in net.candidates(x, ids)[:3]]
    batch = Batch(inputs=(x, ids), labels=(label,), weight=None)
    net.choose_on([batch], LocalCollective(), is_classes=False)
    assert float(loss(net(x, ids)).mean()) < min(equal, *single)
    # Rows of weight 0 do not count.
    other = shifted_pack()
    more = [
        replace(batch, weight=torch.ones(200)),
        replace(batch, labels=(label + 9,), weight=torch.zeros(200)),
    ]
    other.choose_on(more, LocalCollective(), is_classes=False)
    assert torch.equal(other.shares, net.shares)
