"""Fuzzes the parsers for a chosen time: `python tests/fuzz/run.py --minutes 10`.

It prints the numbers of accepted and rejected inputs, and each undocumented error with its smallest input.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "flights"))
import mutations
import targets

ROUND = 200


def fuzz(target: Any, counts: Counter[str], number: int) -> str | None:
    """Runs one round. Returns the undocumented error, if any."""

    @seed(number)
    @settings(
        max_examples=ROUND, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink), print_blob=False, report_multiple_bugs=False,
    )  # fmt: skip
    @given(mutations.damaged(target))
    def check(data: bytes) -> None:
        try:
            target.parse(data)
            counts["taken"] += 1
        except target.errors:
            counts["refused"] += 1

    try:
        check()
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {str(error)[:300]} {notes[:600]}"
    return None


def main() -> None:
    """Prints a table. The exit code is 1 after an undocumented error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    options = parser.parse_args()
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    end = time.monotonic() + 60 * options.minutes
    counts: dict[str, Counter[str]] = {}
    found: dict[str, set[str]] = {}
    turn = 0
    with tempfile.TemporaryDirectory() as folder:
        all_targets = targets.targets(Path(folder))
        while time.monotonic() < end:
            for name, target in all_targets.items():
                if time.monotonic() >= end:
                    break
                problem = fuzz(target, counts.setdefault(name, Counter()), first + turn)
                if problem is not None and problem[:80] not in {text[:80] for text in found.get(name, ())}:
                    found.setdefault(name, set()).add(problem)
                    print(f"{name}: {problem}", flush=True)
            turn += 1
    print(f"seed {first}, {turn} turns")
    print(f"{'':42} {'taken':>9} {'refused':>9} undocumented")
    for name, count in counts.items():
        print(f"{name:42} {count['taken']:9,} {count['refused']:9,} {len(found.get(name, ())):12}")
    print(f"{'all':42} {sum(c.total() for c in counts.values()):,} inputs")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
