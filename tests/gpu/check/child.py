"""Runs one part: measures its cases and appends each result to a file as one line of JSON.

A process that dies in a case leaves the results of the earlier cases. `runner.py` then starts another process
for the cases that are left.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from check.part import Part, Setup, SkippedError
from ringspark.estimators.lazy_imports import load_object

BROKEN = 70
"""Exit code after an error that leaves the device unusable for this process."""


def prepare(device: str | None) -> str:
    """Returns the device, by default the first CUDA device that this process sees, else the CPU."""
    with contextlib.suppress(ImportError):  # the part "environment" reports it
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a driver that torch cannot use
            device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        if device == "cpu":
            torch.set_num_threads(1)  # tiny operations take longer on several threads
        else:
            torch.cuda.set_device(device)  # Triton compiles for the current device
    return device or "cpu"


def describe(error: BaseException) -> str:
    """Returns the type and the message of an error, without the advice that CUDA appends to each."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:400]}" if lines else type(error).__name__


def is_usable() -> bool:
    """Returns whether the device still answers. Frees the memory that a failed case left in torch's cache."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def add_entry(path: Path, **entry: Any) -> None:
    # The process may end while it writes, so the line begins with the line break.
    with path.open("a") as file:
        file.write("\n" + json.dumps(entry))


def read_entries(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the header of the file of results, and the last entry of each case that has begun."""
    header: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            if "case" in entry:
                cases[entry["case"]] = entry
            else:
                header = entry
    return header, cases


def run_case(part: Part, case: str, results: Path) -> None:
    add_entry(results, case=case, state="begun")
    start = time.monotonic()
    entry: dict[str, Any] = {}
    try:
        values = list(part.measure(case))
        assert len(values) == len(part.columns), (case, values)
        entry = {"state": "ok", "values": values}
    except SkippedError as reason:
        entry = {"state": "skipped", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        entry = {"state": "failed", "reason": describe(error)}
    add_entry(results, case=case, seconds=round(time.monotonic() - start, 2), **entry)


def main(
    path: str, results: str, folder: str, device: str | None, tiny: bool, cut: bool, left: float
) -> None:
    """Runs the part with the class at the import path `path`."""
    device = prepare(device)
    sizes = {"is_tiny": tiny or device == "cpu", "is_short": tiny, "is_cut": cut}
    setup = Setup(device=device, **sizes, folder=Path(folder), seconds=left)
    begun = read_entries(Path(results))[1]
    part: Part = load_object(path)(setup)
    cases = list(part.cases())
    header = {"columns": part.columns, "note": part.note, "device": device, "is_tiny": setup.is_tiny}
    add_entry(Path(results), cases=cases, **header)
    for case in cases:
        if case not in begun:
            run_case(part, case, Path(results))
            if not is_usable():
                end(BROKEN)


def end(code: int) -> None:
    """Ends the process at once: the usual end may wait for a device or for compilers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    # At the end of the path, because a benchmark may have the name of a module of Python.
    sys.path += [str(Path(__file__).resolve().parents[2] / name) for name in ("benchmarks", "support")]
    main(**json.loads(sys.argv[1]))
    end(0)
