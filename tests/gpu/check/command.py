"""The command: runs the parts one after another within a time limit, and writes the page after each part."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from check import page
from check.registry import PARTS
from check.runner import PartResult, run_part

SECONDS = 525.0  # a process that hangs takes some more seconds to end
OUTPUT = Path("artifacts/gpu_check.md")
# Shortest time for a part: starting a process, importing torch and opening the device take this long.
_SHORTEST = 15.0


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {name:<12} {entry.title}" for name, entry in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run.py",
        description="Tests and measures ringspark on the first CUDA device, or with tiny sizes on the CPU.",
        epilog=f"parts:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, default = parser.add_argument, "; default: %(default)s"
    add("parts", nargs="*", metavar="part", help="run only these parts; default: all")
    add("--output", type=Path, default=OUTPUT, help=f"page of figures; JSON is written next to it{default}")
    add("--seconds", type=float, default=SECONDS, help=f"time limit of the whole check{default}")
    add("--device", help='such as "cuda:1" or "cpu"; default: first CUDA device, else CPU')
    add("--tiny", action="store_true", help="tiny sizes and few tests, on any device")
    options = parser.parse_args(words)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    if options.device == "cuda":
        options.device = "cuda:0"
    if options.device and not re.fullmatch(r"cpu|cuda:\d+", options.device):
        parser.error(f'--device must be "cpu", "cuda" or "cuda:N", got {options.device!r}')
    if find_spec("torch") is None:
        needed = "start a Python that has it, such as make gpu PYTHON=python3"
        parser.error(f"{sys.executable} has no torch; {needed}")
    if not options.seconds > 0:
        parser.error(f"--seconds must be above 0, got {options.seconds:g}")
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        if options.output.is_dir() or not os.access(options.output.parent, os.W_OK):
            raise PermissionError("it is a folder, or its folder cannot be written to")
    except OSError as error:
        parser.error(f"--output {options.output} cannot be written: {error.strerror or error}; name a file")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0 if every part ran or was skipped, 1 if one failed, 130 if it was stopped."""
    options = parse(words)
    command = " ".join(["python3 tests/gpu/run.py", *(sys.argv[1:] if words is None else words)])
    start, began = time.monotonic(), time.strftime("%Y-%m-%d %H:%M")
    results: list[PartResult] = []
    # Parts run in sessions of their own, so SIGTERM, as from `timeout`, does not reach them.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def write() -> None:
        seconds = time.monotonic() - start
        page.write(options.output, results, command=command, began=began, seconds=seconds)

    try:
        with tempfile.TemporaryDirectory(prefix="ringspark-gpu-check-", ignore_cleanup_errors=True) as folder:
            for name in options.parts or PARTS:
                print(f"{name:<12}", end=" ", flush=True)
                left = options.seconds - (time.monotonic() - start)
                result = _run(name, Path(folder) / name, options, left)
                print(f"{result.state:<8}{result.seconds:4.0f} s  {result.summary()[:160]}", flush=True)
                results.append(result)
                write()
    except KeyboardInterrupt:
        print(f"stopped; {options.output} has the parts that were complete")
        write()
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"{options.output} and {options.output.with_suffix('.json')}")
    return 1 if any(result.state == "failed" for result in results) else 0


def _run(name: str, folder: Path, options: argparse.Namespace, left: float) -> PartResult:
    if left < _SHORTEST and left < options.seconds:
        reason = f"no time was left of {options.seconds:.0f} s"
        return PartResult(name=name, title=PARTS[name].title, reason=reason, is_skipped=True)
    return run_part(name, folder, tiny=options.tiny, device=options.device, seconds=left)
