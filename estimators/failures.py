"""The failure of one rank, and the error that the driver raises for all ranks."""

from __future__ import annotations

import socket
import time
import traceback
from dataclasses import dataclass, field

from ringspark.pipelines.readers import retry
from ringspark.pipelines.typed_json import JsonText

# Type of the failure of a rank that could not report it itself.
LOST = "WorkerLost"
# Texts of torch's RuntimeError for a failed allocation: on the CPU, in cuBLAS, in C++.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "cublas_status_alloc_failed", "bad_alloc")


class WorkerStoppedError(RuntimeError):
    """Another driver took over the run and ended this rank's work."""


class OtherTracebackError(Exception):
    """Cause of an error that another process raised; its text is the traceback in that process."""


class ProcessLostError(RuntimeError):
    """A process that the rank started ended without a result."""


class RegroupError(RuntimeError):
    """All ranks ended at a checkpoint, to start again with more ranks."""


class TrainingCancelledError(RuntimeError):
    """Somebody cancelled the Spark job of the training."""


@dataclass(frozen=True, kw_only=True)
class Failure(JsonText):
    """One rank's failure; the rank sends it to the driver.

    Attributes:
        from_peer: Whether the rank only noticed that another rank was gone.
        may_pass: Whether a restart may succeed, because processes, the network or the store failed.
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
    last_lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException, rank: int, phase: str, from_peer: bool) -> Failure:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        cause = error.__cause__
        return cls(
            rank=rank,
            host=socket.gethostname(),
            phase=phase,
            type=type(error).__name__,
            message=str(error),
            trace=str(cause) if isinstance(cause, OtherTracebackError) else "".join(lines),
            from_peer=from_peer,
            may_pass=from_peer or isinstance(error, (ProcessLostError, RegroupError)) or _may_pass(error),
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

    @property
    def is_out_of_memory(self) -> bool:
        if self.type in ("MemoryError", "ArrowMemoryError", "OutOfMemoryError"):
            return True
        message = self.message.lower()
        return self.type == "RuntimeError" and any(words in message for words in _NO_MEMORY)

    @property
    def sentence(self) -> str:
        line = (self.message.splitlines() or [""])[0]
        return (
            f"rank {self.rank} on host {self.host} failed in phase '{self.phase}': "
            f"{self.type}{': ' if line else ''}{line}"
        )


def _may_pass(error: BaseException) -> bool:
    # Readers raise a RuntimeError from the store's error.
    cause = error.__cause__ if isinstance(error, RuntimeError) else error
    if not isinstance(cause, OSError) or not retry.may_pass(cause):
        return False
    # For a damaged file, which stays damaged, Arrow raises a bare OSError without a number.
    return cause.errno is not None or isinstance(cause, (ConnectionError, TimeoutError))


class WorkerError(RuntimeError):
    """A rank failed; the message has its rank, host, phase and last printed lines.

    Attributes:
        failures: The failures of all ranks, with their traces.
        first: The failure that caused the other failures.
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
