"""A collective that counts the calls made inside networks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ringspark.estimators.collectives import Collective


class Counting:
    """Forwards to a collective and counts the calls made inside networks."""

    def __init__(self, inner: Collective) -> None:
        self._inner = inner
        self.calls: Counter[str] = Counter()
        self.found: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("all_reduce", "all_gather", "start_reduce_scatter", "all_to_all"):
            return found

        def counted(*rest: Any, **named: Any) -> Any:
            self.calls[name] += 1
            return found(*rest, **named)

        return counted

    def noted(self, work: Callable[[], Any]) -> Any:
        """Runs `work`; then `found` holds its calls by operation and the bytes sent by this rank."""
        self.calls.clear()
        sent = self._inner.bytes_sent
        result = work()
        self.found = [dict(self.calls), self._inner.bytes_sent - sent]
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Counting:
        return self
