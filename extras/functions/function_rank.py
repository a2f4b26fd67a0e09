"""Runs the user's function on one rank, in a process that `function_task` starts.

    python -m ringspark.extras.functions.function_rank <folder> <descriptor>

Reads the file `call` in the folder, and writes the file `result`. The descriptor is the read end of a pipe,
and the parent holds its write end. If the parent dies, this process and its children end.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle

from ringspark.estimators import user_code

CALL, RESULT = "call", "result"
# Exit code if the function raised an exception; `result` then holds the exception.
RAISED_CODE = 3


@dataclass(frozen=True)
class Script:
    """A script that a rank runs as its main program."""

    name: str
    source: bytes

    def __call__(self, *args: str) -> None:
        folder = Path(sys.argv[1])
        path = folder / self.name
        path.write_bytes(self.source)
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
    """An exception of the user's function. `error` is None if the exception cannot be unpickled."""

    error: BaseException | None
    type: str
    message: str
    trace: str

    @property
    def line(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


def main() -> None:
    # Absolute, because the function may change the directory.
    folder, parent, code = Path(sys.argv[1]).absolute(), int(sys.argv[2]), 0
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        call = user_code.loads((folder / CALL).read_bytes())
        pickled = _pickle_value(call.function(*call.args, **call.kwargs))
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            pickled = cloudpickle.dumps(None)
        else:
            pickled, code = _pickle_error(error), RAISED_CODE
    (folder / RESULT).write_bytes(pickled)
    sys.exit(code)


def _end_with(parent: int) -> None:
    os.read(parent, 1)
    # This process leads its group, so the processes that the function started end too.
    os.killpg(0, signal.SIGKILL)


def _pickle_value(value: Any) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise ValueError(
            f"the function's result cannot be sent to the driver ({error}); return numbers, strings, arrays, "
            "or the path of a file"
        ) from error
    return pickled


def _pickle_error(error: BaseException) -> bytes:
    # Without the frame of `main`.
    lines = traceback.format_exception(
        type(error), error, error.__traceback__ and error.__traceback__.tb_next
    )
    raised = Raised(error=error, type=type(error).__name__, message=str(error), trace="".join(lines))
    try:
        pickled: bytes = cloudpickle.dumps(raised)
        # Unpickling calls the exception's class with its `args`, which fails for many exceptions.
        cloudpickle.loads(pickled)
    except Exception:
        pickled = cloudpickle.dumps(replace(raised, error=None))
    return pickled


if __name__ == "__main__":
    # Imported by its own name, because `runpy` makes the user's script "__main__".
    from ringspark.extras.functions import function_rank

    function_rank.main()
