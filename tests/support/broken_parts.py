"""Parts of the GPU check that fail in every way that a part can fail."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from check.part import Part, SkippedError, Value


class Broken(Part):
    """A case that crashes, one that fails, one that is skipped, and one that works at the end."""

    columns = ("number",)
    note = "A note."

    def cases(self) -> Sequence[str]:
        return ["crash", "exit", "fail", "skip", "work"]

    def measure(self, case: str) -> Sequence[Value]:
        if case == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if case == "exit":
            print("the last words")
            os._exit(3)
        if case == "fail":
            raise RuntimeError(
                "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might"
            )
        if case == "skip":
            raise SkippedError("needs a compiler")
        return [1.5]


class Hanging(Part):
    """A case that starts another process and never ends."""

    columns = ("number",)
    note = ""

    def cases(self) -> Sequence[str]:
        return ["work", "hang", "later"]

    def measure(self, case: str) -> Sequence[Value]:
        if case == "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (Path(self.setup.folder) / "child").write_text(str(child.pid))
            time.sleep(600)
        return [1.5]


class Unimportable(Part):
    """A part that fails before its first case."""

    def __init__(self, setup: object) -> None:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    def cases(self) -> Sequence[str]:
        return []

    def measure(self, case: str) -> Sequence[Value]:
        return []
