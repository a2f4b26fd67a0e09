"""The decisions of population based training (Jaderberg et al. 2017): who copies whom, and what changes.

They follow from the seed, the round, the member's number and the values of the round before, and from
nothing else. So a search whose driver was killed decides the same again.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspark.extras.search.ranges import Range

# Of the settings that a member takes over, the share that is drawn anew and not scaled.
REDRAW_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member in one round.

    Attributes:
        number: From 0.
        settings: Values by name of the space.
        copied_from: Member whose checkpoint of the round before it goes on from; its own unless it was one
            of the worst. None in the first round.
    """

    number: int
    settings: dict[str, Any]
    copied_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class Population:
    """A population's rules; the Params of `PopulationSearch` say what each is."""

    ranges: Mapping[str, Range]
    size: int
    quantile: float
    perturbation: float
    seed: int
    is_larger_better: bool

    def first(self) -> list[Member]:
        """Returns the members of round 0, with settings drawn from the ranges."""
        drawn = [_Draws(self._generator(0, number)) for number in range(self.size)]
        return [
            Member(number=number, settings={name: r.suggest(draws, name) for name, r in self.ranges.items()})
            for number, draws in enumerate(drawn)
        ]

    def after(self, number: int, members: Sequence[Member], values: Sequence[float | None]) -> list[Member]:
        """Returns the members of the next round.

        Args:
            number: The finished round, from 0.
            values: The value of each member in it; None of one that failed, which is worse than any other.

        Raises:
            ValueError: All have failed.
        """
        ranked = self.ranked(values)
        if not ranked:
            raise ValueError("all members of the population have failed")
        count = max(1, int(self.quantile * self.size))
        best = ranked[:count]
        failed = [member for member, value in enumerate(values) if value is None]
        worst = {*[*ranked, *failed][-count:], *failed} - {*best}
        found = []
        for member in members:
            settings, source = member.settings, member.number
            if member.number in worst:
                generator = self._generator(number + 1, member.number)
                source = best[int(generator.integers(len(best)))]
                settings = self._explored(members[source].settings, generator)
            found.append(Member(number=member.number, settings=settings, copied_from=source))
        return found

    def ranked(self, values: Sequence[float | None]) -> list[int]:
        """Returns the members that did not fail, the best first; of equal ones that of the lower number."""
        sign = -1.0 if self.is_larger_better else 1.0
        rated = [(sign * value, number) for number, value in enumerate(values) if value is not None]
        return [number for _, number in sorted(rated)]

    def _explored(self, settings: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        found = {}
        for name, values in self.ranges.items():
            # Drawn for every name alike, so that one range more does not change what the others do.
            is_new, is_up = generator.random() < REDRAW_SHARE, generator.random() < 0.5
            drawn = values.suggest(_Draws(generator), name)
            factor = self.perturbation if is_up else 1 / self.perturbation
            found[name] = drawn if is_new else values.scaled(settings[name], factor)
        return found

    def _generator(self, number: int, member: int) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{self.seed} {number} {member}".encode()))


class _Draws:
    """Draws for a range what an optuna trial suggests, uniformly, from a generator."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        if step is not None:
            # As many steps as fit: the sum of floats may end just below `high`.
            return min(high, low + step * self._whole(math.floor((high - low) / step + 1e-9)))
        if log:
            drawn = math.exp(self._generator.uniform(math.log(low), math.log(high)))
            return min(high, max(low, drawn))
        return float(self._generator.uniform(low, high))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        if log:
            # A number stands for all that round to it, so the lowest is as likely as its share of them.
            drawn = math.exp(self._generator.uniform(math.log(low - 0.5), math.log(high + 0.5)))
            return min(high, max(low, round(drawn)))
        return low + step * self._whole((high - low) // step)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return choices[self._whole(len(choices) - 1)]

    def _whole(self, highest: int) -> int:
        return int(self._generator.integers(highest + 1))
