"""Lets the tasks of a gang find each other: in a barrier stage, or as ordinary tasks in the run directory.

With dynamic allocation, Spark refuses barrier stages, but starts ordinary tasks as executors come. Each
ordinary task writes an offer and waits. Once every task has an offer, the driver writes the roster. It lists
the task attempts that become the ranks. Spark makes a new attempt for a lost task and for a speculative copy.
An attempt that is not in the roster waits until Spark or the driver ends it.

    driver: job of N tasks -> offers of 0 ... N - 1 -> roster -> ranks connect -> rows
                              |                        |
                              no room: roster without ranks, the tasks end
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from ringspark.estimators import run_layout
from ringspark.estimators.collectives import CollectiveError
from ringspark.estimators.launch.devices import Claim
from ringspark.estimators.launch.heartbeat import Pulse
from ringspark.estimators.launch.owner import read_owner
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import JsonText

# Time between two looks into the folder, in seconds.
_LOCAL_SECONDS, _REMOTE_SECONDS = 0.05, 0.5


@dataclass(frozen=True, kw_only=True)
class Offer(JsonText):
    """A task attempt that can become a rank.

    Attributes:
        address: Address of the rendezvous, from the task of rank 0 in a barrier stage; "" from other tasks.
        executor: Identity of the executor, see `own_executor`.
        problem: The error that keeps the task from starting; "" if there is none.
    """

    task: int
    attempt: int = 0
    claim: Claim
    address: str = ""
    executor: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Roster(JsonText):
    """The offers that become the ranks, in the order of their tasks; none if the tasks are to end."""

    offers: tuple[Offer, ...]


def own_executor() -> str:
    """Returns the identity of this task's executor: its host and the pid of its JVM."""
    # The JVM starts a Python daemon, and the daemon forks the workers.
    return f"{socket.gethostname()}:{psutil.Process(os.getppid()).ppid()}"


def look_seconds(run_uri: str) -> float:
    """Returns the time between two looks into the run's folder."""
    return _LOCAL_SECONDS if storage.is_local(run_uri) else _REMOTE_SECONDS


def gather_offers(offer: Offer, context: Any) -> tuple[Offer, ...]:
    """Returns the offers of all tasks of a barrier stage."""
    try:
        # Every task makes this call, even if it cannot start: the other tasks wait for its message.
        texts = context.allGather(offer.to_json())
    except Exception as error:
        raise CollectiveError(f"the workers cannot connect, see the executors' logs: {error}") from error
    return tuple(Offer.from_json(text) for text in texts)


def check_offers(offers: Sequence[Offer], own: int) -> None:
    """Raises the problem of the task `own`, or CollectiveError for the problem of another task."""
    for offer in sorted(offers, key=lambda offer: offer.task != own):
        if offer.problem:
            error = RuntimeError if offer.task == own else CollectiveError
            raise error(offer.problem if offer.task == own else "another rank could not start")


def await_roster(pulse: Pulse, offer: Offer, name: str = "task") -> tuple[Offer, ...]:
    """Writes the offer of an ordinary task and waits for the roster; returns () if the task must end."""
    parent, pause = os.getppid(), look_seconds(pulse.run_uri)
    uri = _uri(pulse, f"{name}-{_launch_of(pulse)}-{offer.task}-{offer.attempt}.json")
    data, looks, is_written = offer.to_json().encode(), 0, False
    while os.getppid() == parent:
        # The store may not answer now.
        with suppress(OSError):
            if not is_written:
                storage.write_atomic(uri, data, durable=False)
                is_written = True
        offers = _read_roster(pulse, name)
        if offers is not None and (not offers or offer in offers):
            return offers
        looks += 1
        if looks % 20 == 0:
            # Another launch or driver has no use for this task.
            with suppress(OSError):
                owner = read_owner(pulse.run_uri)
                if owner is None or (owner.token, owner.launch) != (pulse.token, pulse.launch):
                    return ()
        time.sleep(pause)
    os._exit(1)  # nobody is left to take the result


def _read_roster(pulse: Pulse, name: str) -> tuple[Offer, ...] | None:
    # The store may not answer now.
    with suppress(OSError, ValueError):
        return Roster.from_json(storage.read_bytes(_roster_uri(pulse, name))).offers
    return None


@dataclass(kw_only=True)
class RosterBuilder:
    """Collects the offers of one launch on the driver, and writes the roster.

    `name` is "task" for the workers, and "spare" for tasks that only hold slots for the next launch. With
    `may_copy`, Spark may start a copy of a task that still runs (speculation).
    """

    pulse: Pulse
    num_tasks: int
    name: str = "task"
    may_copy: bool = True
    roster: Roster | None = None
    changed_at: float = field(default_factory=time.monotonic)
    _found: dict[str, Offer] = field(default_factory=dict)

    @property
    def offers(self) -> list[Offer]:
        """The newest attempt of each task that has offered, in the order of the tasks."""
        newest: dict[int, Offer] = {}
        for offer in self._found.values():
            if offer.task not in newest or newest[offer.task].attempt < offer.attempt:
                newest[offer.task] = offer
        return [newest[task] for task in sorted(newest)]

    def look(self) -> None:
        """Reads new offers; once there is one of every worker, writes the roster."""
        own = re.compile(rf"{self.name}-{_launch_of(self.pulse)}-\d+-\d+\.json")
        for name in storage.list_names(_uri(self.pulse)):
            if name not in self._found and own.fullmatch(name):
                self._found[name] = Offer.from_json(storage.read_bytes(_uri(self.pulse, name)))
                self.changed_at = time.monotonic()
        if self.name == "task" and self.roster is None and len(self.offers) == self.num_tasks:
            self.roster = self._write(Roster(offers=tuple(self.offers)))

    def find_replaced(self) -> list[Offer]:
        """Returns the offers of the roster whose task has a newer attempt: lost, or with a copy."""
        known = () if self.roster is None else self.roster.offers
        newest = {offer.task: offer.attempt for offer in self.offers}
        return [offer for offer in known if newest[offer.task] != offer.attempt]

    def dismiss(self) -> None:
        """Ends the tasks that still wait."""
        ended = self._write(Roster(offers=()))
        self.roster = self.roster or ended

    def _write(self, roster: Roster) -> Roster:
        uri = _roster_uri(self.pulse, self.name)
        storage.write_atomic(uri, roster.to_json().encode(), durable=False)
        return roster


def _launch_of(pulse: Pulse) -> str:
    return f"{pulse.token}-{pulse.launch}"


def _roster_uri(pulse: Pulse, name: str) -> str:
    return _uri(pulse, f"{name}s-{_launch_of(pulse)}.json")


def _uri(pulse: Pulse, *names: str) -> str:
    return storage.join(pulse.run_uri, run_layout.HEARTBEAT, *names)
