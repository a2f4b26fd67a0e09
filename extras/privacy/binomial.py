"""The privacy account of cpSGD: the binomial mechanism, and its composition over steps.

Agarwal, Suresh, Yu, Kumar, McMahan 2018, "cpSGD: Communication-efficient and differentially-private
distributed SGD", Theorem 1. The unit of privacy is the whole gradient of one worker in every step.

The bounds of the rounding's sensitivity differ from the paper's in constants. Two gradients are rounded with
the same uniform numbers. Then the integers of an element differ by floor(|x|) or ceil(|x|), if the scaled
gradients differ by x, and Bernstein's inequality bounds the norms of the difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ringspark.extras.privacy.cpsgd_options import CpSGD

# Largest probability that the range of the levels cuts off an element of a rotated gradient.
_CUT_OFF = 1e-6
# A gradient of norm C can have a slightly larger norm after the rotation, which rounds.
_SLACK = 1 + 1e-9
View = Literal["sums", "messages"]


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Bounds of the difference between the integers of two gradients of a worker, by norm."""

    l1: float
    l2: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class BinomialAccount:
    """The privacy loss of cpSGD over a training.

    Attributes:
        epsilon: Bound of the privacy loss of a worker's gradients over all steps.
        delta: Probability with which the bound may fail.
        steps: Number of steps.
        step_epsilon: Epsilon of one step.
        step_delta: Delta of one step.
        trials: Trials of the noise in the numbers that the observer sees.
    """

    epsilon: float
    delta: float
    steps: int
    step_epsilon: float
    step_delta: float
    trials: int

    def __str__(self) -> str:
        return (
            f"epsilon {self.epsilon:.4g} at delta {self.delta:g} for each worker's gradients over "
            f"{self.steps} steps; one step has epsilon {self.step_epsilon:.4g} at delta "
            f"{self.step_delta:.3g} by noise of {self.trials} trials"
        )


def find_range(elements: int, *, rotate: bool) -> float:
    """Returns the largest level, relative to the largest norm.

    A rotated gradient has the norm spread over all elements. By Hoeffding's inequality, an element is
    larger than the range with a probability of 1e-6 / elements.
    """
    if not rotate:
        return 1.0
    return min(1.0, 2 * math.sqrt(math.log(2 * elements / _CUT_OFF) / elements))


def bound_sensitivity(levels: int, elements: int, delta: float, *, rotate: bool) -> Sensitivity:
    """Returns bounds for replacing a worker's gradient, which hold with probability 1 - delta.

    They do not depend on the largest norm, because the distance of two levels grows with it.
    """
    # Two gradients of norm C have a distance of up to 2 C, and the levels reach from -range C to range C.
    apart = (levels - 1) / find_range(elements, rotate=rotate) * _SLACK
    absolute = min(math.sqrt(elements) * apart, elements * (levels - 1.0))
    # A Bernoulli number has at most this variance: its mean, and a quarter.
    variance = min(absolute, elements / 4)
    log = math.log(2 / delta)
    spread = math.sqrt(2 * variance * log) + 2 / 3 * log
    return Sensitivity(l1=absolute + spread, l2=apart + math.sqrt(variance + spread), largest=levels - 1.0)


def find_least_trials(sensitivity: Sensitivity, elements: int, delta: float) -> int:
    """Returns the least number of trials for which `binomial_epsilon` holds."""
    return math.ceil(4 * max(23 * math.log(10 * elements / delta), 2 * sensitivity.largest))


def binomial_epsilon(trials: int, sensitivity: Sensitivity, elements: int, delta: float) -> float:
    """Returns epsilon of one release of integers with binomial noise, p = 1/2, by Theorem 1 of the paper.

    Raises ValueError if the theorem does not hold for so few trials.
    """
    least = find_least_trials(sensitivity, elements, delta)
    if trials < least:
        raise ValueError(
            f"the bound for binomial noise needs at least {least} trials for {elements} elements at "
            f"delta={delta:.3g}, got {trials}; raise CpSGD's trials, or train with more workers"
        )
    variance = trials / 4
    b, c, d = 1 / 3, math.sqrt(2) * 7 / 4, 2 / 3  # b_p, c_p and d_p of the paper for p = 1/2
    gaussian = sensitivity.l2 * math.sqrt(2 * math.log(1.25 / delta) / variance)
    shape = (sensitivity.l2 * c * math.sqrt(math.log(10 / delta)) + sensitivity.l1 * b) / (1 - delta / 10)
    tail = 2 / 3 * math.log(1.25 / delta) + d * math.log(20 * elements / delta) * math.log(10 / delta)
    return gaussian + (shape + sensitivity.largest * tail) / variance


def compose(epsilon: float, steps: int, slack: float) -> float:
    """Returns epsilon of several steps by strong composition, which adds `slack` to the sum of the deltas.

    Kairouz, Oh, Viswanath 2015, "The Composition Theorem for Differential Privacy", Theorem 3.4.
    """
    mean = steps * epsilon * math.tanh(epsilon / 2)
    return min(steps * epsilon, mean + epsilon * math.sqrt(2 * steps * math.log(1 / slack)))


def account_cpsgd(
    compression: CpSGD,
    *,
    steps: int,
    workers: int,
    elements: int,
    delta: float,
    view: View = "sums",
) -> BinomialAccount:
    """Returns the privacy loss of a worker's gradients over a training with cpSGD.

    Args:
        steps: Steps of the training, with the steps that a restart or rollback takes again.
        workers: Number of workers.
        elements: Number of trained parameters.
        delta: Probability with which the bound may fail over all steps.
        view: "sums" for an observer of the sums of all workers, such as a reader of the weights. "messages"
            for an observer of single messages, such as another worker, from whom only a worker's own noise
            protects it.

    Raises:
        ValueError: There are too few trials for the bound, or an argument is out of range.
    """
    for name, value in {"steps": steps, "workers": workers, "elements": elements}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}")
    if view not in ("sums", "messages"):
        raise ValueError(f"view must be 'sums' or 'messages', got {view!r}")
    trials = compression.trials * (workers if view == "sums" else 1)

    def one_step(step_delta: float) -> float:
        # Half is for the rounding, and half for the noise.
        sensitivity = bound_sensitivity(
            compression.levels, elements, step_delta / 2, rotate=compression.rotate
        )
        return binomial_epsilon(trials, sensitivity, elements, step_delta / 2)

    found = []
    # Either all of delta is for the steps, whose epsilons add up, or half of it is for the composition.
    for step_delta, slack in ((delta / steps, 0.0), (delta / (2 * steps), delta / 2)):
        own = one_step(step_delta)
        found.append(
            BinomialAccount(
                epsilon=compose(own, steps, slack) if slack else steps * own,
                delta=delta,
                steps=steps,
                step_epsilon=own,
                step_delta=step_delta,
                trials=trials,
            )
        )
    return min(found, key=lambda account: account.epsilon)
