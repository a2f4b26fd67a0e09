"""Where a rank is, for the error message if it stops there."""

from __future__ import annotations

import json
import socket
import time
import traceback
from dataclasses import asdict, dataclass, field


class Status:
    """The rank's present phase, in words; set by whoever starts one.

    Attributes:
        ticks: Counts signs of progress: a rank whose count stands still for `timeoutSeconds` hangs.
    """

    def __init__(self, phase: str = "starting") -> None:
        self._phase = phase
        self.ticks = 0

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, value: str) -> None:
        self._phase = value
        self.ticks += 1

    def tick(self) -> None:
        """Notes progress within a phase."""
        self.ticks += 1


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's failure as it travels to the driver.

    Attributes:
        from_peer: The rank only noticed that another one was gone.
    """

    rank: int
    host: str
    phase: str
    type: str
    message: str
    trace: str
    from_peer: bool
    seconds: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException, rank: int, phase: str, from_peer: bool) -> Failure:
        return cls(
            rank=rank,
            host=socket.gethostname(),
            phase=phase,
            type=type(error).__name__,
            message=str(error),
            trace="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            from_peer=from_peer,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        return cls(**json.loads(text))


class WorkerError(RuntimeError):
    """A rank failed. The message names its rank, host and phase; `failures` has every rank's trace."""

    def __init__(self, failures: list[Failure]) -> None:
        # The rank that raised by itself is the cause; those that lost a peer are the effect.
        first = min(failures, key=lambda f: (f.from_peer, f.seconds))
        self.failures = failures
        self.rank = first.rank
        trace = first.trace.rstrip().replace("\n", "\n  | ")
        super().__init__(
            f"rank {first.rank} on host {first.host} failed in phase '{first.phase}': "
            f"{first.type}: {first.message}\n  | {trace}"
        )
