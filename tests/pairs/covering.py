"""Combinations that together contain every allowed pair of choices: a greedy pairwise covering."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

Value = tuple[str, str]  # group and name of a choice
Pair = frozenset[Value]


def all_pairs(groups: Mapping[str, Sequence[str]]) -> list[tuple[Value, Value]]:
    """Returns every pair of choices of different groups, in the order of the groups."""
    return [
        ((left, a), (right, b))
        for left, right in combinations(groups, 2)
        for a in groups[left]
        for b in groups[right]
    ]


def cover(
    groups: Mapping[str, Sequence[str]],
    wanted: Iterable[Pair],
    is_allowed: Callable[[Mapping[str, str], Value], bool],
    preferred: Iterable[Mapping[str, str]] = (),
) -> tuple[list[dict[str, str]], set[Pair]]:
    """Returns combinations of one choice per group, and the pairs that no allowed combination contains.

    Each combination begins with the first uncovered pair. Then every group takes the allowed choice that
    covers most uncovered pairs; the first choice wins a tie. If no choice is allowed, the search backtracks.

    Args:
        is_allowed: (choices of some groups, choice of another group) -> whether they can stand together.
        preferred: Combinations that were made already; their pairs need no other combination.
    """
    left = dict.fromkeys(wanted)
    for combination in preferred:
        _remove(left, combination)
    found, impossible = [], set()
    while left:
        first = next(iter(left))
        combination = _complete(groups, dict(sorted(first)), left, is_allowed)
        if combination is None:
            impossible.add(first)
            del left[first]
            continue
        _remove(left, combination)
        found.append({group: combination[group] for group in groups})
    return found, impossible


def _remove(left: dict[Pair, None], combination: Mapping[str, str]) -> None:
    for pair in combinations(combination.items(), 2):
        left.pop(frozenset(pair), None)


def _complete(
    groups: Mapping[str, Sequence[str]],
    chosen: dict[str, str],
    left: Mapping[Pair, None],
    is_allowed: Callable[[Mapping[str, str], Value], bool],
) -> dict[str, str] | None:
    """Returns a combination that has `chosen`, or None if none is allowed."""
    group = next((group for group in groups if group not in chosen), None)
    if group is None:
        return chosen

    def gain(name: str) -> int:
        return sum(frozenset(((group, name), other)) in left for other in chosen.items())

    allowed = [name for name in groups[group] if is_allowed(chosen, (group, name))]
    for name in sorted(allowed, key=gain, reverse=True):
        found = _complete(groups, {**chosen, group: name}, left, is_allowed)
        if found is not None:
            return found
    return None
