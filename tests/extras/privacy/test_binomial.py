"""Tests the account of cpSGD against the exact privacy loss of binomial noise on one number."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, chisquare

from ringspark.estimators import CpSGD
from ringspark.extras.compressors.cpsgd import CpSgdCompressor, rotate
from ringspark.extras.privacy import binomial


def _exact_delta(epsilon: float, trials: int, shift: int) -> float:
    """Returns delta of one number plus Binomial(trials, 1/2), for two numbers that differ by `shift`."""
    places = np.arange(-shift, trials + shift + 1)
    one, other = binom.pmf(places, trials, 0.5), binom.pmf(places - shift, trials, 0.5)
    gains = (np.maximum(p - math.exp(epsilon) * q, 0).sum() for p, q in ((one, other), (other, one)))
    return float(max(gains))


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("shift", [1, 3, 15])
def test_the_epsilon_of_the_theorem_is_an_upper_bound_of_the_exact_one(delta: float, shift: int) -> None:
    sensitivity = binomial.Sensitivity(l1=shift, l2=shift, largest=shift)
    for factor in (1, 4, 64):
        trials = factor * binomial.find_least_trials(sensitivity, 1, delta)
        epsilon = binomial.binomial_epsilon(trials, sensitivity, 1, delta)
        assert _exact_delta(epsilon, trials, shift) <= delta
        # Not a bound that holds for any noise: a tenth of it is too little.
        assert _exact_delta(epsilon / 10, trials, shift) > delta


@pytest.mark.parametrize("shift", [1, 4])
def test_composition_is_an_upper_bound_of_the_exact_loss_of_several_steps(shift: int) -> None:
    """The numbers of several steps tell as much as their sum, because binomial noise of all has one p."""
    steps, delta, slack = 50, 1e-8, 1e-6
    sensitivity = binomial.Sensitivity(l1=shift, l2=shift, largest=shift)
    trials = 40 * binomial.find_least_trials(sensitivity, 1, delta)
    total = binomial.compose(binomial.binomial_epsilon(trials, sensitivity, 1, delta), steps, slack)
    assert total < steps * binomial.binomial_epsilon(trials, sensitivity, 1, delta)
    assert _exact_delta(total, steps * trials, steps * shift) <= steps * delta + slack


def test_epsilon_falls_with_trials_and_workers_and_grows_with_steps() -> None:
    def epsilon(trials: int = 10**5, steps: int = 10, workers: int = 4) -> float:
        options = CpSGD(levels=16, trials=trials, max_norm=3.0)
        return binomial.account_cpsgd(
            options, steps=steps, workers=workers, elements=1000, delta=1e-6
        ).epsilon

    assert epsilon(4 * 10**5) < epsilon(2 * 10**5) < epsilon()
    assert epsilon(workers=8) < epsilon()
    assert epsilon(steps=10) < epsilon(steps=20) <= 2.2 * epsilon(steps=10)
    options = CpSGD(levels=16, trials=10**5, max_norm=3.0)
    own = binomial.account_cpsgd(options, steps=10, workers=4, elements=1000, delta=1e-6, view="messages")
    assert (own.trials, own.epsilon) == (10**5, epsilon(workers=1))
    assert str(own).startswith(f"epsilon {own.epsilon:.4g} at delta 1e-06 for each worker's gradients")


@pytest.mark.parametrize("is_rotated", [False, True])
def test_the_integers_of_two_gradients_differ_by_no_more_than_the_bounds(is_rotated: bool) -> None:
    """Opposite gradients, rounded with the same uniform numbers, are the farthest apart."""
    levels, elements, draws = 16, 400, 300
    bounds = binomial.bound_sensitivity(levels, elements, 0.01, rotate=is_rotated)
    reach = binomial.find_range(elements, rotate=is_rotated)
    rng, worst = np.random.default_rng(0), np.zeros(3)
    for _ in range(draws):
        # Dense and sparse gradients.
        vector = rng.standard_normal(elements) * (rng.random(elements) < rng.choice([0.01, 0.1, 1.0]))
        vector[0] = 1.0
        one = torch.from_numpy(vector / np.linalg.norm(vector))
        signs = torch.from_numpy(rng.choice([-1.0, 1.0], elements))
        uniform = rng.random(elements)
        rounded = []
        for each in (one, -one):
            values = rotate(each, signs).numpy() if is_rotated else each.numpy()
            assert not is_rotated or np.abs(values).max() < reach
            scaled = (np.clip(values, -reach, reach) + reach) * ((levels - 1) / (2 * reach))
            rounded.append(np.floor(scaled + uniform))
        difference = np.abs(rounded[0] - rounded[1])
        norms = [difference.sum(), math.sqrt((difference**2).sum()), difference.max()]
        worst = np.maximum(worst, norms)
    assert (worst <= [bounds.l1, bounds.l2, bounds.largest]).all()
    # Near enough to the bounds to notice a factor of 2.
    assert worst[0] > bounds.l1 / 3
    assert worst[1] > bounds.l2 / 3


def test_the_integers_have_the_distribution_that_the_account_assumes() -> None:
    """Zero lies between two of four levels: both are equally likely, as by one more trial."""
    elements, trials = 40_000, 6
    options = CpSGD(levels=4, trials=trials, max_norm=1.0, rotate=False)
    compressor = CpSgdCompressor([torch.Size((elements,))], 0, options)
    vector = torch.zeros(elements, dtype=torch.float64)
    codes = compressor.encode(vector, 1, torch.ones(elements, dtype=torch.float64))
    counts = np.bincount(codes - 1, minlength=trials + 2)
    expected = elements * binom.pmf(np.arange(trials + 2), trials + 1, 0.5)
    assert chisquare(counts, expected).pvalue > 1e-6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"elements": 0}, "elements must be at least 1, got 0"),
        ({"delta": 1.0}, "delta must lie between 0 and 1, got 1.0"),
        ({"view": "all"}, "view must be 'sums' or 'messages', got 'all'"),
        ({"trials": 100}, r"needs at least \d+ trials for 1000 elements .*, got 200; raise"),
    ],
)
def test_arguments_out_of_range_are_refused(changes: dict[str, Any], words: str) -> None:
    given = {"steps": 1, "workers": 2, "elements": 1000, "delta": 1e-6, "trials": 10**5, **changes}
    with pytest.raises(ValueError, match=words):
        binomial.account_cpsgd(CpSGD(trials=given.pop("trials"), max_norm=1.0), **given)
