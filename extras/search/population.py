"""Population based training: decides which members copy another member, and which settings change.

Jaderberg et al. 2017, "Population Based Training of Neural Networks".

The decisions depend only on the seed, the round, the member's number and the values of the previous round. A
search that continues after its driver was killed therefore makes the same decisions again.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspark.extras.search.ranges import SearchRange

# Share of a copied member's settings that are drawn again instead of scaled.
REDRAW_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Member:
    """Settings of a member in one round.

    The member resumes from the checkpoint that member `copied_from` wrote in the previous round;
    `copied_from` is None in the first round.
    """

    number: int
    settings: dict[str, Any]
    copied_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class Population:
    ranges: Mapping[str, SearchRange]
    size: int
    quantile: float
    perturbation: float
    seed: int
    is_larger_better: bool

    def first(self) -> list[Member]:
        found = []
        for number in range(self.size):
            generator = self._generator(0, number)
            settings = {name: values.draw(generator) for name, values in self.ranges.items()}
            found.append(Member(number=number, settings=settings))
        return found

    def after(self, number: int, members: Sequence[Member], values: Sequence[float | None]) -> list[Member]:
        """Returns the members of round `number` + 1; `members` had `values` in round `number`.

        A failed member's value is None, which is worse than any other.
        """
        ranked = self.ranked(values)
        if not ranked:
            raise ValueError("all members of the population have failed; a round needs one result")
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
        """Returns the numbers of the members that did not fail, best first; ties are ordered by number."""
        sign = -1.0 if self.is_larger_better else 1.0
        rated = [(sign * value, number) for number, value in enumerate(values) if value is not None]
        return [number for _, number in sorted(rated)]

    def _explored(self, settings: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        found = {}
        for name, values in self.ranges.items():
            # Equally many draws per name, so that an additional range does not change the other settings.
            is_new, is_up = generator.random() < REDRAW_SHARE, generator.random() < 0.5
            drawn = values.draw(generator)
            factor = self.perturbation if is_up else 1 / self.perturbation
            found[name] = drawn if is_new else values.scaled(settings[name], factor)
        return found

    def _generator(self, number: int, member: int) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{self.seed} {number} {member}".encode()))
