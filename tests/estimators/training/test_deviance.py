"""Deviances as losses and metrics against scikit-learn, also at the ends of fp32."""

import math

import pytest
import sklearn.metrics as sk
import torch
from torch import nn

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.training.objective.deviance import find_power, half_deviance
from ringspark.estimators.training.objective.losses import resolve_loss
from ringspark.estimators.training.objective.metric_set import MetricSet

POWERS = {"poisson": 1.0, "tweedie": 1.5, "tweedie_1.9": 1.9, "gamma": 2.0}


def rows(power: float) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    mean = torch.rand(31, generator=g) * 5 + 0.01
    label = torch.poisson(mean, generator=g)
    return mean, label + (power == 2)


@pytest.mark.parametrize("name", POWERS)
def test_losses_and_metrics_are_the_deviance_of_scikit_learn(name: str) -> None:
    power = POWERS[name]
    mean, label = rows(power)
    expected = sk.mean_tweedie_deviance(label.double(), mean.double(), power=power)
    assert find_power(name) == power
    assert 2 * float(resolve_loss(name)(mean[:, None], label).mean()) == pytest.approx(expected, rel=1e-5)
    metric = name.replace("tweedie", "tweedie_deviance") if "_" in name else f"{name}_deviance"
    # Two ranks with different numbers of rows.
    sets = [MetricSet([metric], 1, torch.device("cpu")) for _ in range(3)]
    sets[0].update(mean[:20, None], label[:20])
    sets[1].update(mean[20:, None], label[20:])
    sets[2].load_states([states for each in sets[:2] for states in each.states()], carried=True)
    assert sets[2].compute(LocalCollective())[metric] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_gradients_stay_finite_for_tiny_and_huge_means(power: float) -> None:
    logs = torch.tensor([-40.0, -20.0, 0.0, 20.0, 40.0], requires_grad=True)
    loss = half_deviance(logs.exp(), torch.full((5,), 3.0), power)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logs.grad is not None
    # The derivative by the logarithm of the mean, in closed form.
    mean = logs.detach().double().exp()
    torch.testing.assert_close(logs.grad.double(), mean ** (1 - power) * (mean - 3), rtol=1e-4, atol=0.0)


def test_a_mean_of_zero_is_finite_and_a_negative_mean_is_not() -> None:
    assert float(half_deviance(torch.zeros(1), torch.zeros(1), 1.0)) == 0
    assert math.isfinite(half_deviance(torch.zeros(1), torch.ones(1), 1.0))
    assert math.isnan(half_deviance(-torch.ones(1), torch.ones(1), 1.0))


def test_members_are_compared_one_by_one() -> None:
    mean, label = rows(1.0)
    members = torch.stack([mean, 2 * mean], 1)[:, :, None]
    both = resolve_loss("poisson_per_member")(members, label)
    expected = (resolve_loss("poisson")(mean, label) + resolve_loss("poisson")(2 * mean, label)) / 2
    torch.testing.assert_close(both, expected)


@pytest.mark.parametrize("name", ["poisson", "tweedie_1.3", "gamma"])
def test_a_linear_network_finds_the_coefficients_of_scikit_learn(name: str) -> None:
    from sklearn.linear_model import TweedieRegressor

    g = torch.Generator().manual_seed(2)
    x = torch.randn(200, 2, generator=g, dtype=torch.float64)
    label = torch.poisson((x @ torch.tensor([0.5, -0.3], dtype=torch.float64)).exp() * 2, generator=g)
    power = find_power(name) or 0.0
    label += power == 2
    weight = torch.arange(200) % 3 + 1.0
    reference = TweedieRegressor(power=power, alpha=0, link="log", tol=1e-10, max_iter=1000)
    reference.fit(x.numpy(), label.numpy(), sample_weight=weight.numpy())
    net = nn.Linear(2, 1, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (resolve_loss(name)(net(x).exp(), label) * weight).sum() / weight.sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert net.weight[0].tolist() == pytest.approx(reference.coef_, abs=1e-4)
    assert net.bias.item() == pytest.approx(reference.intercept_, abs=1e-4)
