"""The failures of a training: one rank's failure, and the error that the driver raises for all ranks."""

from __future__ import annotations

import json
import socket
import time
import traceback
from dataclasses import asdict, dataclass, field

from ringspark.pipelines.readers import retry
from ringspark.pipelines.typed_json import added, parse_object, record

# Type of the failure of a rank that could not report it itself.
LOST = "WorkerLost"
# Texts of torch's RuntimeError for a failed allocation: on the CPU, in cuBLAS, in C++.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "cublas_status_alloc_failed", "bad_alloc")


class WorkerStoppedError(RuntimeError):
    """Another driver took over the run and ended this rank's work."""


class TrainingCancelledError(RuntimeError):
    """Somebody cancelled the Spark job of the training."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's failure, as it is sent to the driver.

    Attributes:
        from_peer: Whether the rank only noticed that another rank was gone.
        may_pass: Whether a restart may succeed, after a fault of processes, network or store.
        last_lines: The last lines that the rank printed, which the driver adds.
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
    last_lines: tuple[str, ...] = added(())

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
    def lost(cls, rank: int, host: str, phase: str, message: str, type: str = LOST) -> Failure:
        """Returns the failure of a rank that could not report it itself."""
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
        """Reads the result of `to_json`.

        Raises:
            ValueError: The text does not describe a failure.
        """
        return record(cls, parse_object(text))

    @property
    def is_out_of_memory(self) -> bool:
        """Whether an allocation failed: Python's, Arrow's, or torch's on any device."""
        if self.type in ("MemoryError", "ArrowMemoryError", "OutOfMemoryError"):
            return True
        message = self.message.lower()
        return self.type == "RuntimeError" and any(words in message for words in _NO_MEMORY)

    @property
    def sentence(self) -> str:
        """The failure in one line."""
        line = (self.message.splitlines() or [""])[0]
        return (
            f"rank {self.rank} on host {self.host} failed in phase '{self.phase}': "
            f"{self.type}{': ' if line else ''}{line}"
        )


def _may_pass(error: BaseException) -> bool:
    """Whether the error comes from a store or a network, which may work at the next attempt.

    Readers raise a RuntimeError that names the file, from the store's error. For damaged files, which stay
    damaged, Arrow raises a bare OSError without a number.
    """
    cause = error.__cause__ if isinstance(error, RuntimeError) else error
    if not isinstance(cause, OSError) or not retry.may_pass(cause):
        return False
    return cause.errno is not None or isinstance(cause, (ConnectionError, TimeoutError))


class WorkerError(RuntimeError):
    """A rank failed. The message has its rank, host, phase and last printed lines.

    Attributes:
        failures: The failures of all ranks, with their traces.
        first: The failure that caused the others.
        may_pass: Whether no rank is to blame, so that a restart may succeed.
        advice: Text of the message after the cause.
    """

    def __init__(self, failures: list[Failure], advice: str = "") -> None:
        # A rank that raised its own error is the cause; a rank that lost a peer is an effect.
        first = min(failures, key=lambda f: (f.from_peer, f.may_pass, f.seconds))
        self.failures = failures
        self.advice = advice
        self.rank = first.rank
        self.first = first
        self.may_pass = all(failure.may_pass for failure in failures)
        details = first.trace.rstrip().splitlines()
        if first.last_lines:
            details += ["the last lines that the rank printed:", *first.last_lines]
        message = f"{first.type}: {first.message}" if first.message else first.type
        super().__init__(
            f"rank {first.rank} on host {first.host} failed in phase '{first.phase}': {message}"
            + advice
            + "".join(f"\n  | {line}" for line in details)
        )
