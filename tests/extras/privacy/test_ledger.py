"""Epsilon against opacus and dp-accounting, and the noise that keeps a promise."""

import itertools
import math
import warnings

import pytest
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant, RDPAccountant

from ringspark.estimators import Privacy
from ringspark.extras.privacy.ledger import Charged, compute_epsilon, find_noise_multiplier

DELTA = 1e-6
SETTINGS = list(itertools.product((0.8, 1.0, 1.5, 2.5, 4.0), (0.001, 0.01, 0.1), (10, 1000)))


WHOLE = tuple(range(2, 64))


@pytest.mark.parametrize("charged", SETTINGS, ids=str)
def test_epsilon_equals_opacus_and_dp_accounting(charged: Charged, monkeypatch: pytest.MonkeyPatch) -> None:
    """dp-accounting is compared at whole orders, because it only bounds fractional orders from above."""
    sigma, rate, steps = charged
    google = RdpAccountant(orders=WHOLE)
    google.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps))
    with monkeypatch.context() as patch:
        patch.setattr(RDPAccountant, "DEFAULT_ALPHAS", WHOLE)
        found = compute_epsilon.__wrapped__((charged,), DELTA, "rdp")
    assert found == pytest.approx(google.get_epsilon(DELTA), abs=1e-6)
    opacus = RDPAccountant()
    opacus.history = [(sigma, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best order may be the largest
        wanted = opacus.get_epsilon(DELTA)
    assert compute_epsilon((charged,), DELTA, "rdp") == pytest.approx(wanted, abs=1e-6)
    assert wanted <= found


def test_epsilon_of_one_step_without_sampling() -> None:
    assert compute_epsilon(((4.0, 1.0, 1),), 1e-5, "rdp") == pytest.approx(1.01255, abs=5e-6)


def test_random_variables_bound_epsilon_more_closely() -> None:
    charged = ((1.0, 0.01, 1000),)
    accountant = PRVAccountant()
    accountant.history = list(charged)
    found = compute_epsilon(charged, DELTA, "prv")
    assert found == pytest.approx(accountant.get_epsilon(DELTA), abs=1e-6)
    assert 0.8 < found / compute_epsilon(charged, DELTA, "rdp") < 0.95


def test_epsilon_grows_with_every_training() -> None:
    first, second = (1.2, 0.02, 500), (0.9, 0.01, 300)
    sums = [compute_epsilon(each, DELTA, "rdp") for each in ((first,), (second,), (first, second))]
    assert max(sums[:2]) < sums[2] < sums[0] + sums[1]
    assert compute_epsilon((first, (1.0, 0.1, 0)), DELTA, "rdp") == sums[0]
    halves = ((1.2, 0.02, 200), (1.2, 0.02, 300))
    assert compute_epsilon(halves, DELTA, "rdp") == pytest.approx(sums[0], abs=1e-9)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("before", [(), ((2.0, 0.05, 100),)], ids=["new", "continued"])
def test_the_noise_is_the_least_that_keeps_the_promise(accountant: str, before: tuple[Charged, ...]) -> None:
    privacy = Privacy(epsilon=3, delta=DELTA, max_grad_norm=1.0, accountant=accountant)
    sigma = find_noise_multiplier(privacy, 0.05, 60, before)

    def epsilon(noise: float) -> float:
        return compute_epsilon((*before, (noise, 0.05, 60)), DELTA, accountant)

    assert epsilon(sigma) <= 3 < epsilon(0.99 * sigma)


def test_a_given_noise_multiplier_is_taken() -> None:
    privacy = Privacy(noiseMultiplier=0.7, delta=DELTA, maxGradNorm=1.0)
    assert find_noise_multiplier(privacy, 0.5, 10, ((0.1, 1.0, 99),)) == 0.7


def test_a_promise_that_no_noise_keeps_is_refused() -> None:
    # The largest order of opacus, 63, bounds no epsilon below ln(1 / delta) / 62 or so.
    privacy = Privacy(epsilon=0.1, delta=DELTA, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"no noise is enough for 5 more steps; .*set accountant='prv'"):
        find_noise_multiplier(privacy, 0.1, 5)
    assert math.isnan(find_noise_multiplier(privacy, 0.1, 0))
