"""A queue in which the gangs of one application take turns: first come, first served.

Spark starts the tasks of a barrier stage all at once or not at all, so two gangs never wait for ever
with half of their slots each. But it passes over a stage that does not fit at the moment, so a wide gang
could wait behind any number of narrow gangs that came later. And if Spark manages no GPUs, two gangs that
run at the same time would both take the first device of a host. This queue, in the driver, knows only the
gangs of this process; between processes Spark's own rule holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock


class GangQueue:
    """Grants slots in order of arrival. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting: deque[object] = deque()
        self._running: dict[object, int] = {}

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return len(self._waiting)

    @contextmanager
    def turn(self, num_workers: int, count_slots: Callable[[], int | None]) -> Iterator[None]:
        """Waits until `num_workers` slots are free of other gangs; holds them inside the block.

        Args:
            count_slots: Returns the number of slots of the cluster; None if nobody knows it, and then the
                gang does not wait. Called only if there is another gang.
        """
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            alone = len(self._waiting) == 1 and not self._running
        try:
            slots = None if alone else count_slots()
            with self._changed:
                # An interrupt (Ctrl-C) also ends the wait.
                self._changed.wait_for(lambda: self._may_run(ticket, num_workers, slots))
                self._running[ticket] = num_workers
                self._leave_line(ticket)
            yield
        finally:
            with self._changed:
                self._running.pop(ticket, None)
                self._leave_line(ticket)

    def _may_run(self, ticket: object, num_workers: int, slots: int | None) -> bool:
        if self._waiting[0] is not ticket:
            return False
        # A gang that is alone always starts, even if the cluster has shrunk since its slots were counted.
        return slots is None or not self._running or sum(self._running.values()) + num_workers <= slots

    def _leave_line(self, ticket: object) -> None:
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        self._changed.notify_all()


_QUEUES: dict[str, GangQueue] = {}
_LOCK = Lock()


def queue_of(application: str) -> GangQueue:
    """Returns the queue of a Spark application, whose sessions share its executors."""
    with _LOCK:
        return _QUEUES.setdefault(application, GangQueue())
