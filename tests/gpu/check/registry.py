"""The registry of parts, in the order in which they run: the quick and important parts come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

# Packages besides torch, NumPy and cloudpickle that training from shards imports.
SHARDS = ("annotated_types", "fsspec", "psutil", "pyarrow", "pydantic", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One part.

    Attributes:
        path: Import path of its class, a `Part`.
        title: Heading on the page.
        seconds: Time limit.
        needs: Packages that it imports; it is skipped without them.
    """

    path: str
    title: str
    seconds: float
    needs: Sequence[str]

    def missing(self) -> list[str]:
        return [name for name in self.needs if find_spec(name) is None]


def _entry(path: str, title: str, seconds: float, *more: str) -> Entry:
    needs = sorted(("cloudpickle", "numpy", "torch", *more))
    return Entry(path=f"check.parts.{path}", title=title, seconds=seconds, needs=needs)


PARTS: dict[str, Entry] = {
    "environment": Entry(
        path="check.parts.environment:Environment", title="Environment", seconds=60, needs=()
    ),
    "training": _entry("training:Training", "Training on one rank", 110, *SHARDS),
    "precision": _entry("precision:Precision", "Mixed precision", 60),
    "inference": _entry("inference:Inference", "Inference", 60, *SHARDS),
    "table": _entry("table:Table", "Networks for tables", 60),
    "memory": _entry("memory:Memory", "Memory plan and measured peak", 70, *SHARDS),
    "optimizers": _entry("optimizers:Optimizers", "Optimizers", 60),
    "offload": _entry("saved_tensors:Offload", "Activation offload", 75),
    "codecs": _entry("saved_tensors:Codecs", "Activation compression", 45),
    "tests": _entry("suite:Suite", "Tests", 170, *SHARDS, "hypothesis", "pytest"),
    "compile": _entry("compilation:Compilation", "torch.compile", 150, *SHARDS),
}
