"""Runs the user's function on one rank, in a process that `function_task` starts.

    python -m ringspark.extras.functions.function_rank <folder> <descriptor>

Reads the file `call` in the folder, and writes the file `result` or `error`. The descriptor is the read end
of a pipe, and the parent holds its write end. If the parent dies, this process and its children end.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from ringspark.estimators import user_code
from ringspark.models.process_state import print_any_text

CALL, RESULT, ERROR = "call", "result", "error"
# Exit code if the function raised an exception; `error` then describes the exception.
RAISED_CODE = 3
_ending = threading.Lock()


@dataclass(frozen=True)
class Script:
    """A script that a rank runs as its main program."""

    name: str
    source: bytes

    def __call__(self, *args: str) -> None:
        folder = Path(sys.argv[1])
        path = folder / self.name
        path.write_bytes(self.source)
        # A script may end its process, or replace it by another program.
        (folder / RESULT).write_bytes(cloudpickle.dumps(None))
        sys.argv = [str(path), *args]
        sys.path.insert(0, str(folder))
        runpy.run_path(str(path), run_name="__main__")


@dataclass(frozen=True, kw_only=True)
class Call:
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Raised:
    """Text of an exception of the user's function. Other processes may be unable to import its class."""

    type: str
    message: str
    trace: str

    @property
    def line(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


def main() -> None:
    # Absolute, because the function may change the directory.
    folder, parent, own_id = Path(sys.argv[1]).absolute(), int(sys.argv[2]), os.getpid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    pickled, raised = cloudpickle.dumps(None), None
    try:
        with print_any_text():
            call = user_code.loads((folder / CALL).read_bytes())
            pickled = _pickle_value(call.function(*call.args, **call.kwargs))
    except BaseException as error:
        if os.getpid() != own_id:
            raise
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            raised = _describe(error)
    # The function may have forked; the end of its child is not its end.
    if os.getpid() != own_id:
        return
    with _ending:
        if raised is not None:
            (folder / ERROR).write_text(json.dumps(asdict(raised)))
            sys.exit(RAISED_CODE)
        (folder / RESULT).write_bytes(pickled)


def _end_with(parent: int) -> None:
    os.read(parent, 1)
    # The function may return when a child has ended, and this process must end the others first.
    with _ending:
        end_group(os.getpid())


def end_group(leader: int) -> None:
    """Ends a process, its group, and its descendants in other groups."""
    with suppress(psutil.Error):
        for process in psutil.Process(leader).children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _pickle_value(value: Any) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise ValueError(
            f"the function's result cannot be sent to the driver ({error}); return numbers, strings, arrays, "
            "or the path of a file"
        ) from error
    return pickled


def _describe(error: BaseException) -> Raised:
    # Without the frame of `main`.
    lines = traceback.format_exception(
        type(error), error, error.__traceback__ and error.__traceback__.tb_next
    )
    return Raised(type=type(error).__name__, message=str(error), trace="".join(lines))


if __name__ == "__main__":
    # Imported by its own name, because `runpy` makes the user's script "__main__".
    from ringspark.extras.functions import function_rank

    function_rank.main()
