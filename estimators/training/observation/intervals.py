"""Arithmetic of spans of time: sets of intervals that are sorted and do not touch.

Intervals are half open, [begin, end), in whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the times that lie in any of the intervals, which may overlap and have any order."""
    merged: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Returns the times that lie in both of two results of `union`."""
    others = list(right)
    first = 0
    found = []
    for begin, end in left:
        # What ends before this interval begins ends before all later ones too.
        while first < len(others) and others[first][1] <= begin:
            first += 1
        number = first
        while number < len(others) and others[number][0] < end:
            found.append((max(begin, others[number][0]), min(end, others[number][1])))
            number += 1
    return found


def difference(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Returns the times of the first result of `union` that do not lie in the second."""
    others = list(right)
    first = 0
    found = []
    for begin, end in left:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        number = first
        while begin < end and number < len(others) and others[number][0] < end:
            if begin < others[number][0]:
                found.append((begin, others[number][0]))
            begin = others[number][1]
            number += 1
        if begin < end:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> int:
    """Returns the length of a result of `union`."""
    return sum(end - begin for begin, end in intervals)
