"""`fit_scaling`: predicts the time of a training from measured times on a few numbers of workers.

    T(n) = (C + K f(n)) / n

The number of rows per worker and step is constant, so n workers need 1/n of the steps. C is the time of
computation. K is the time of communication, which grows with n as the function f says. Any f fits two
measured times exactly, so measure a third time, or choose f by the algorithm of the all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from ringspark.estimators.names import check_name
from ringspark.pipelines.notebook_table import align_table, notebook_table

# Growth of the communication with the ranks; each form is 0 for one rank and 1 for two.
FORMS: dict[str, Callable[[int], float]] = {
    # Bytes of a ring: 2(n-1)/n of the buffer.
    "ring": lambda n: 2 * (n - 1) / n,
    # Messages of a ring, and Amdahl's serial part.
    "latency": lambda n: float(n - 1),
    # Rounds of a tree; the wait for the slowest of n ranks grows similarly.
    "tree": lambda n: math.log2(n),
}
WORKERS = tuple(2**power for power in range(11))
_HEADER = ("workers", "time", "efficiency", "measured", "error")


@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """A fitted function f; times have the unit of the measured times.

    Attributes:
        form: Name of f, a key of `FORMS`.
        compute: C, the time that one worker needs for the work.
        exchange: K, the communication time per step of two workers, times the number of steps that one worker
            needs for the work.
        measured: Number of workers -> measured time.
    """

    form: str
    compute: float
    exchange: float
    measured: Mapping[int, float]

    def time(self, workers: int) -> float:
        """Returns the predicted time on `workers` workers."""
        return (self.compute + self.exchange * FORMS[self.form](workers)) / workers

    def efficiency(self, workers: int) -> float:
        """Returns the speedup over one worker divided by the number of workers."""
        return self.time(1) / (workers * self.time(workers))

    def table(self, workers: tuple[int, ...] = WORKERS) -> str:
        """Returns a table with a line per number of workers."""
        return align_table(_HEADER, self._rows(workers))

    __str__ = table

    def _repr_html_(self) -> str:
        rows = self._rows(WORKERS)
        return notebook_table(f"Fitted: T(n) = (C + K f(n)) / n, f: {self.form}", _HEADER, rows)

    def _rows(self, workers: tuple[int, ...]) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for n in sorted({*workers, *self.measured}):
            known = self.measured.get(n)
            errors = ("", "") if known is None else (f"{known:.4g}", f"{self.time(n) / known - 1:+.1%}")
            rows.append((f"{n:,}", f"{self.time(n):.4g}", f"{self.efficiency(n):.3f}", *errors))
        return rows


def fit_scaling(measured: Mapping[int, float], form: str = "ring") -> ScalingFit:
    """Fits f to measured times of a training.

    >>> fit = fit_scaling({1: 399, 2: 214}, form="tree")  # minutes per epoch
    >>> round(fit.time(8)), round(fit.efficiency(8), 2)
    (61, 0.82)

    Args:
        measured: Number of workers -> time of the same work, for at least two numbers of workers. The number
            of rows per worker and step must be the same in all measurements.
        form: Name of f, a key of `FORMS`.

    Raises:
        ValueError: The form is unknown, fewer than two times are given, or the times grow faster than f.
    """
    check_name("form", form, FORMS)
    for workers, time in measured.items():
        is_number = isinstance(workers, Integral) and not isinstance(workers, bool)
        if not is_number or workers < 1 or not 0 < time < math.inf:
            raise ValueError(
                f"measured must map numbers of workers to times above 0, got {workers!r}: {time!r}"
            )
    if len(measured) < 2:
        raise ValueError(f"fit_scaling needs times for at least two numbers of workers, got {len(measured)}")
    counts, times = np.array(list(measured)), np.array(list(measured.values()), float)
    grows = np.array([FORMS[form](int(n)) for n in counts])
    # Divided by the times for relative errors.
    left = np.stack([1 / counts, grows / counts], 1) / times[:, None]
    compute, exchange = np.linalg.lstsq(left, np.ones(len(times)), rcond=None)[0]
    if exchange < 0:
        # Superlinear speedup, by caches.
        weights = left[:, 0]
        compute, exchange = float(weights.sum() / np.square(weights).sum()), 0.0
    if compute <= 0:
        raise ValueError(
            f"form {form!r} does not fit the times, which go from {measured[min(measured)]:g} with "
            f"{min(counts)} workers to {measured[max(measured)]:g} with {max(counts)}: this form leaves no "
            "time for the computation; measure one worker too, or choose another form"
        )
    known = {int(workers): float(time) for workers, time in measured.items()}
    return ScalingFit(form=form, compute=float(compute), exchange=float(exchange), measured=known)
