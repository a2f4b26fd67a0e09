"""Counts the private steps of a run, and finds the noise that keeps its epsilon.

The ledger charges a step before the step begins. If the process is then killed and the step is repeated with
new noise, both count: somebody may have seen the first result in a metric, a tracker or a checkpoint. So the
ledger is written ahead, a block of steps at a time. A resumed run charges the blocks of earlier starts, and
adds more noise to its remaining steps, so that the total stays within epsilon.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict
from functools import lru_cache

from opacus.accountants import create_accountant
from scipy.optimize import brentq

from ringspark.estimators import run_layout
from ringspark.estimators.options.privacy import Privacy, PrivacySpent
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import parse_object, record

Charged = tuple[float, float, int]
"""Noise multiplier, share of the rows that a step samples, number of steps."""

# The ledger is written about this often in a training.
_WRITES = 100
_LARGEST = 1e6
_PRECISION = 1e-4


@lru_cache(maxsize=256)
def compute_epsilon(charged: tuple[Charged, ...], delta: float, accountant: str) -> float:
    """Returns epsilon of several series of steps by an accountant of opacus; 0 without steps."""
    history = [each for each in charged if each[2]]
    if not history:
        return 0.0
    made = create_accountant(accountant)
    made.history = history
    with warnings.catch_warnings():
        # A hint that more orders might give a smaller bound; the bound is right.
        warnings.filterwarnings("ignore", "Optimal order is the")
        return float(made.get_epsilon(delta))


def find_noise_multiplier(
    privacy: Privacy, sample_rate: float, steps: int, before: tuple[Charged, ...] = ()
) -> float:
    """Returns the least noise multiplier for `steps` further steps after the steps `before`.

    Raises ValueError if the steps `before` leave too little of the promised epsilon.
    """
    if privacy.noise_multiplier is not None or not steps:
        return privacy.noise_multiplier or math.nan
    assert privacy.epsilon is not None
    goal, delta, accountant = privacy.epsilon, privacy.delta, privacy.accountant
    spent = compute_epsilon(before, delta, accountant)

    def rest(sigma: float) -> float:
        return goal - compute_epsilon((*before, (sigma, sample_rate, steps)), delta, accountant)

    high = 1.0
    while spent >= goal or rest(high) < 0:
        high *= 2
        if spent >= goal or high > _LARGEST:
            hint = ", set accountant='prv', whose bound is lower" * (accountant == "rdp")
            taken = sum(each[2] for each in before)
            raise ValueError(
                f"privacy promises epsilon={goal:g} at delta={delta:g}"
                + f", and the {taken} earlier steps have spent {spent:.4g}" * (taken > 0)
                + f", so no noise is enough for {steps} more steps; raise epsilon{hint}, or train fewer steps"
            )
    while rest(high / 2) >= 0:
        high /= 2
    sigma = float(brentq(rest, high / 2, high, rtol=_PRECISION))
    while rest(sigma) < 0:  # the solver may stop on the other side
        sigma *= 1 + _PRECISION
    return sigma


class Ledger:
    """The charged steps of one run, in the file `privacy.json`. Only rank 0 has one."""

    def __init__(
        self, run_uri: str, privacy: Privacy, sample_rate: float, before: tuple[Charged, ...]
    ) -> None:
        """Reads the steps of earlier starts; `before` are the steps of the initial model."""
        self._uri = storage.join(run_uri, run_layout.PRIVACY)
        self._privacy, self._sample_rate = privacy, sample_rate
        self._charged = before
        self._num_before = sum(steps for *_, steps in before)
        if storage.exists(self._uri):
            self._charged = read_ledger(run_uri).charged
        self._taken = self._reserved = self._block = 0
        self._planned = math.inf
        self.noise_multiplier = math.nan

    def begin(self, steps: int, taken: int = 0) -> None:
        """Finds the noise of the `steps` that this start is going to take.

        Raises ValueError if the ledger has fewer steps than the `taken` steps of the run's checkpoint.
        """
        known = sum(count for *_, count in self._charged) - self._num_before
        if known < taken:
            raise ValueError(
                f"the run has taken {taken} private steps, and its ledger {storage.redact(self._uri)} is "
                f"missing or counts {known} of them, so epsilon is unknown; put the run's own ledger back, "
                "or train again in another folder and count the steps of this run too"
            )
        privacy = self._privacy
        self.noise_multiplier = find_noise_multiplier(privacy, self._sample_rate, steps, self._charged)
        self._planned = compute_epsilon(self._with(steps), privacy.delta, privacy.accountant)
        self._block = max(1, steps // _WRITES)

    def charge_step(self) -> None:
        """Charges the next step, before it begins. Raises OSError if the ledger cannot be written."""
        self._taken += 1
        if self._taken > self._reserved:
            self._reserved = self._taken + self._block - 1
            self._write(self._with(self._reserved), self._planned)

    def close(self) -> PrivacySpent:
        """Takes back the reserved steps that were not begun; returns the privacy loss so far."""
        charged = self._with(self._taken)
        return self._write(charged, compute_epsilon(charged, self._privacy.delta, self._privacy.accountant))

    def _with(self, steps: int) -> tuple[Charged, ...]:
        own = ((self.noise_multiplier, self._sample_rate, steps),) if steps else ()
        return self._charged + own

    def _write(self, charged: tuple[Charged, ...], epsilon: float) -> PrivacySpent:
        spent = PrivacySpent(
            epsilon=epsilon, delta=self._privacy.delta, accountant=self._privacy.accountant, charged=charged
        )
        storage.write_atomic(self._uri, json.dumps(asdict(spent)).encode())
        return spent


def read_ledger(run_uri: str) -> PrivacySpent:
    """Returns the privacy loss of a run so far. Raises ValueError if the file is damaged."""
    uri = storage.join(run_uri, run_layout.PRIVACY)
    try:
        return record(PrivacySpent, parse_object(storage.read_bytes(uri)))
    except ValueError as error:
        raise ValueError(
            f"the ledger {storage.redact(uri)} is damaged ({error}), so earlier private steps are unknown; "
            "train again in another folder, and count the steps of this run too"
        ) from error
