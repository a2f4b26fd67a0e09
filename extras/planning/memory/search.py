"""Searches settings that fit a budget: a fixed ladder of changes, ordered by their cost per step.

The benchmarks `sharding` and `memory_techniques` measure the cost. bf16 rounds, so it comes last. The lossy
codecs of activations are left out: they change gradients by some percent, which a budget does not justify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ringspark.estimators.options.sync import AllReduce, Sync
from ringspark.estimators.training.settings.config import TrainConfig

MOST_SUGGESTIONS = 3

# A setting of `TrainConfig` and its new value; for accumulation, a factor on the present value.
Rung = tuple[str, Any]
_FIRST: tuple[Rung, ...] = (
    ("sync", {"name": "zero", "stage": 1}),
    ("sync", {"name": "zero", "stage": 2}),
    *(("gradient_accumulation", factor) for factor in (2, 4, 16, 64)),
    ("gradient_checkpointing", "sqrt"),
    ("gradient_checkpointing", "all"),
)
_PARAMETERS: Rung = ("sync", {"name": "zero", "stage": 3})
_PACKED: tuple[Rung, ...] = (
    ("activation_compression", "bits"),
    ("activation_offload", "host"),
    ("activation_offload", "disk"),
)
_LOSSY: Rung = ("precision", "bf16")
_LADDER = (*_FIRST, _PARAMETERS, *_PACKED, _LOSSY)
# Sharded parameters and packed activations exclude each other, so both are tried.
_CLIMBS: tuple[tuple[Rung, ...], ...] = (
    (*_FIRST, _PARAMETERS, *_PACKED),
    (*_FIRST, *_PACKED),
    _LADDER,
    (*_FIRST, *_PACKED, _LOSSY),
)


def find_settings(
    config: TrainConfig, rows: int, peak_of: Callable[[TrainConfig], int | None], budget: int
) -> tuple[list[TrainConfig], TrainConfig | None]:
    """Finds settings that fit: up to three with one change each, else one that combines changes.

    `peak_of` returns None if settings do not suit the network. If nothing fits, the second result holds the
    settings with the lowest peak, or None if no change lowers the peak.
    """
    found = []
    for name in dict.fromkeys(name for name, _ in _CLIMBS[0]):
        top, peak = _climb(config, [rung for rung in _LADDER if rung[0] == name], rows, peak_of, budget)
        if peak <= budget:
            found.append(top)
    if found:
        return found[:MOST_SUGGESTIONS], None
    tops = []
    for ladder in _CLIMBS:
        top, peak = _climb(config, ladder, rows, peak_of, budget)
        if peak <= budget:
            return [_without_needless(top, config, peak_of, budget)], None
        tops.append((top, peak))
    least, _ = min(tops, key=lambda pair: pair[1])
    return [], None if least is config else least


def _climb(
    config: TrainConfig,
    ladder: Sequence[Rung],
    rows: int,
    peak_of: Callable[[TrainConfig], int | None],
    budget: int,
) -> tuple[TrainConfig, int]:
    """Applies one change of the ladder after another, keeping those that lower the peak, until it fits.

    Returns the last settings and their peak.
    """
    top, lowest = config, peak_of(config)
    assert lowest is not None
    for name, value in _above(config, ladder, rows):
        higher = change_setting(top, name, value)
        peak = None if higher is None else peak_of(higher)
        if higher is not None and peak is not None and peak < lowest:
            top, lowest = higher, peak
        if lowest <= budget:
            break
    return top, lowest


def _above(config: TrainConfig, ladder: Sequence[Rung], rows: int) -> Iterator[Rung]:
    """Yields the changes above the user's values; skips settings whose value is not on the ladder."""
    passed = {name for name, _ in _LADDER if getattr(config, name) in ("none", "fp32", AllReduce())}
    for name, value in ladder:
        present = getattr(config, name)
        if name == "gradient_accumulation":
            if present * value <= rows:
                yield name, present * value
        elif name in passed and (name != "sync" or config.num_workers > 1):
            yield name, value
        elif present == (Sync.of(value) if name == "sync" else value):
            passed.add(name)


def change_setting(config: TrainConfig, name: str, value: Any) -> TrainConfig | None:
    """Returns the config with another value of a setting; None if its other settings exclude the value."""
    try:
        return replace(config, **{name: value})
    except ValueError:
        return None


def _without_needless(
    found: TrainConfig, config: TrainConfig, peak_of: Callable[[TrainConfig], int | None], budget: int
) -> TrainConfig:
    """Reverts changes that are not needed, the most expensive first."""
    for name in dict.fromkeys(name for name, _ in reversed(_LADDER)):
        weaker = change_setting(found, name, getattr(config, name))
        peak = None if weaker is None or weaker == found else peak_of(weaker)
        if weaker is not None and peak is not None and peak <= budget:
            found = weaker
    return found
