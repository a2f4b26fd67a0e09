"""The cheapest settings that fit a budget.

The order of candidates: first those that leave the training's numbers alone but for rounding, then the
lossy ones; among them by slowdown, of which recomputed passes are a part. A candidate that asks for more
of everything than one that fits is no suggestion, and one that asks for less of everything than one that
does not fit cannot fit: most candidates are never run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ringspark.estimators.training.settings.config import TrainConfig

MOST_SUGGESTIONS = 3

# Setting -> its choices from the weakest to the strongest, each with its slowdown as a share of a step and
# whether it is lossy. A full recomputation is one forward pass of the three that a step is worth.
Choice = tuple[object, float, bool]
CHOICES: dict[str, tuple[Choice, ...]] = {
    "sharding": (
        ("none", 0.0, False),
        ("optimizer", 0.02, False),
        ("gradients", 0.03, False),
        ("parameters", 0.25, False),
    ),
    "gradient_accumulation": (),  # multiples of the present one: see `_options`
    "activation_compression": (
        ("none", 0.0, False),
        ("bits", 0.05, False),
        ("int8", 0.4, True),
    ),
    "gradient_checkpointing": (("none", 0.0, False), ("sqrt", 0.25, False), ("all", 0.33, False)),
    "activation_offload": (("none", 0.0, False), ("host", 0.5, False), ("disk", 3.0, False)),
    "precision": (("fp32", 0.0, False), ("bf16", 0.0, True)),
}
_SLOWDOWN_OF_DOUBLING = 0.02
_DOUBLINGS = (0, 1, 2, 4, 6)
# Steps to run for a second and a third suggestion, exact and lossy; the first is looked for to the end.
_RUNS_FOR_MORE = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """Settings to try.

    Attributes:
        levels: Position of each setting among its choices; higher takes less memory and more time.
        lossy: Whether numbers change by more than rounding.
    """

    config: TrainConfig
    levels: tuple[int, ...]
    slowdown: float
    lossy: bool

    def at_least(self, other: Candidate) -> bool:
        """Whether this asks for as much as the other of every setting."""
        return all(map(_at_least, CHOICES, self.levels, other.levels))


def _at_least(name: str, level: int, other: int) -> bool:
    # Which of "sqrt" and "all" takes less depends on what a block keeps beside its input; and in 16 bits
    # autocast's copies of the weights may take more than the activations give.
    if name == "precision":
        return level == other
    return other in (0, level) if name == "gradient_checkpointing" else level >= other


def candidates(config: TrainConfig, rows: int) -> list[Candidate]:
    """What may be changed from `config`, the cheapest first; combinations that `RULES` refuse are left out.

    Args:
        rows: Rows per rank and step, which micro-batches are cut from.
    """
    found = []
    options = {name: list(_options(name, config, rows)) for name in CHOICES}
    for combination in itertools.product(*(enumerate(choices) for choices in options.values())):
        if not any(level for level, _ in combination):
            continue
        lossy = any(choice[2] for _, choice in combination)
        changes = dict(zip(options, (choice[0] for _, choice in combination), strict=True))
        try:
            changed = replace(config, **changes)  # type: ignore[arg-type]
        except ValueError:
            continue
        found.append(
            Candidate(
                config=changed,
                levels=tuple(level for level, _ in combination),
                slowdown=sum(choice[1] for _, choice in combination),
                lossy=lossy,
            )
        )
    return sorted(found, key=lambda c: (c.lossy, c.slowdown, sum(c.levels)))


def _options(name: str, config: TrainConfig, rows: int) -> Iterator[Choice]:
    """The present choice of a setting at no cost, and the stronger ones at theirs beyond it."""
    present = getattr(config, name)
    if name == "gradient_accumulation":
        for doublings in _DOUBLINGS:
            if not doublings or present << doublings <= rows:
                yield present << doublings, _SLOWDOWN_OF_DOUBLING * doublings, False
        return
    values = [choice[0] for choice in CHOICES[name]]
    if present not in values:
        # A segment count, names of submodules, fp16, fp8: the user's own choice stays.
        yield present, 0.0, False
        return
    start = values.index(present)
    if name == "sharding" and config.num_workers == 1:
        yield CHOICES[name][start][0], 0.0, False
        return
    for value, slowdown, lossy in CHOICES[name][start:]:
        yield value, slowdown - CHOICES[name][start][1], lossy and value != present


def cheapest(
    ordered: Sequence[Candidate],
    peak_of: Callable[[TrainConfig], int | None],
    budget: int,
    most: int = MOST_SUGGESTIONS,
) -> tuple[list[Candidate], Candidate | None]:
    """The first candidates that fit, none of which contains another.

    Args:
        ordered: From `candidates`.
        peak_of: Peak in bytes, or None where the settings do not suit the network.

    Returns:
        Those that fit, and where none does the one with the least peak.
    """
    peaks: dict[Candidate, int] = {}

    def fits(candidate: Candidate) -> bool | None:
        peak = peak_of(candidate.config)
        if peak is None:
            return None
        peaks[candidate] = peak
        return peak <= budget

    # Not every network has a chain to checkpoint, and one that has none has none with other settings.
    place = list(CHOICES).index("gradient_checkpointing")
    alone = [c for c in ordered if c.levels[place] and sum(map(bool, c.levels)) == 1]
    unsuited = {c.levels[place] for c in alone if fits(c) is None}
    ordered = [c for c in ordered if c.levels[place] not in unsuited]
    fitting: list[Candidate] = []
    for group in ([c for c in ordered if not c.lossy], [c for c in ordered if c.lossy]):
        runs = _RUNS_FOR_MORE
        # The strongest ones: where they do not fit, nothing weaker needs to be run.
        for candidate in [] if fitting else _strongest(group):
            fits(candidate)
        for candidate in group:
            if len(fitting) == most or not runs:
                break
            if any(candidate.at_least(found) for found in fitting):
                continue
            if any(peak > budget and bigger.at_least(candidate) for bigger, peak in peaks.items()):
                continue
            runs -= bool(fitting)
            if fits(candidate):
                fitting.append(candidate)
    # What takes less is not always what asks for more, by little: no fit that was seen is kept back.
    fitting = fitting or [c for c in ordered if peaks.get(c, budget + 1) <= budget][:1]
    return fitting, min(peaks, key=lambda c: peaks[c]) if peaks and not fitting else None


def _strongest(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other asks more than."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: -sum(c.levels)):
        if not any(other.at_least(candidate) for other in found):
            found.append(candidate)
    return found
