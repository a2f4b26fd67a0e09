"""Runs one part: measures its cases and appends each result to a file as one line of JSON.

A process that dies in a case leaves the results of the earlier cases. `runner.py` then starts another process
for the cases that are left.
"""

from __future__ import annotations

import argparse
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


def choose_device() -> str:
    """Returns the first CUDA device that this process sees, else the CPU."""
    try:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about a driver that torch cannot use; the part "environment" reports it
            return "cuda:0" if torch.cuda.is_available() else "cpu"
    except ImportError:
        return "cpu"


def prepare(device: str) -> None:
    with contextlib.suppress(ImportError):
        import torch

        if device == "cpu":
            torch.set_num_threads(1)  # tiny operations take longer on several threads
        else:
            torch.cuda.set_device(device)  # Triton compiles for the current device


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


class Results:
    """The file of results; see `runner.py`, which reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.begun = {entry["case"] for entry in map(json.loads, lines) if "case" in entry}

    def add(self, **entry: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def run_case(part: Part, case: str, results: Results) -> None:
    """Measures one case, and adds its result."""
    results.add(case=case, state="begun")
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
    results.add(case=case, seconds=round(time.monotonic() - start, 2), **entry)


def main() -> None:
    """Runs the part of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", help="import path of the part's class")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cut", action="store_true")
    options = parser.parse_args()
    device = options.device or choose_device()
    prepare(device)
    setup = Setup(
        device=device,
        is_tiny=options.tiny or device == "cpu",
        is_short=options.tiny,
        is_cut=options.cut,
        folder=options.folder,
        seconds=options.seconds,
    )
    results = Results(options.results)
    part: Part = load_object(options.part)(setup)
    cases = list(part.cases())
    results.add(columns=part.columns, note=part.note, cases=cases, device=device, is_tiny=setup.is_tiny)
    for case in cases:
        if case in results.begun:
            continue
        run_case(part, case, results)
        if not is_usable():
            end(BROKEN)


def end(code: int) -> None:
    """Ends the process at once: the usual end may wait for a device or for compilers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
    end(0)
