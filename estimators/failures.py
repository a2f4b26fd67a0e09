"""What a training fails with: one rank's failure, and what the driver raises for all of them."""

from __future__ import annotations

import json
import socket
import time
import traceback
from dataclasses import asdict, dataclass, field

from ringspark.pipelines.readers import retry
from ringspark.pipelines.typed_json import parse_object, record


class WorkerStoppedError(RuntimeError):
    """Somebody else ended this rank's work: another driver goes on with the run."""


class TrainingCancelledError(RuntimeError):
    """Somebody cancelled the Spark job of the training."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's failure as it travels to the driver.

    Attributes:
        from_peer: The rank only noticed that another one was gone.
        may_pass: The same work, started again, may succeed: a fault of processes, network or store.
    """

    rank: int
    host: str
    phase: str
    type: str
    message: str
    trace: str
    from_peer: bool
    may_pass: bool = False
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
            may_pass=from_peer or _may_pass(error),
        )

    @classmethod
    def lost(cls, rank: int, host: str, phase: str, message: str, type: str = "WorkerLost") -> Failure:
        """The failure of a rank that could not report one itself."""
        return cls(
            rank=rank,
            host=host,
            phase=phase,
            type=type,
            message=message,
            trace="",
            from_peer=False,
            may_pass=True,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """Reads what `to_json` returned.

        Raises:
            ValueError: The text is none of a failure.
        """
        return record(cls, parse_object(text))

    @property
    def sentence(self) -> str:
        """The failure in one line."""
        said = (self.message.splitlines() or [""])[0]
        return (
            f"rank {self.rank} on host {self.host} failed in phase '{self.phase}': "
            f"{self.type}{': ' if said else ''}{said}"
        )


def _may_pass(error: BaseException) -> bool:
    """Whether the error is of a store or a network, which the next attempt may find well again.

    Readers raise a RuntimeError that names the file, from the store's error. Arrow raises a bare OSError,
    without a number, for damaged files: those stay damaged.
    """
    cause = error.__cause__ if isinstance(error, RuntimeError) else error
    if not isinstance(cause, OSError) or not retry.may_pass(cause):
        return False
    return cause.errno is not None or isinstance(cause, (ConnectionError, TimeoutError))


class WorkerError(RuntimeError):
    """A rank failed. The message names its rank, host and phase; `failures` has every rank's trace.

    Attributes:
        first: The failure that is the cause.
        may_pass: No rank failed by its own doing: the same work, started again, may succeed.
        advice: What the message says after the cause.
    """

    def __init__(self, failures: list[Failure], advice: str = "") -> None:
        # The rank that raised by itself is the cause; those that lost a peer are the effect.
        first = min(failures, key=lambda f: (f.from_peer, f.may_pass, f.seconds))
        self.failures = failures
        self.advice = advice
        self.rank = first.rank
        self.first = first
        self.may_pass = all(failure.may_pass for failure in failures)
        trace = first.trace.rstrip().replace("\n", "\n  | ")
        message = f"{first.type}: {first.message}" if first.message else first.type
        super().__init__(
            f"rank {first.rank} on host {first.host} failed in phase '{first.phase}': {message}"
            + advice
            + (f"\n  | {trace}" if trace else "")
        )
