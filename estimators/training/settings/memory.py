"""Settings of a worker's memory: precision, activations, sharding, the budget."""

from __future__ import annotations

from typing import Any, get_args

from ringspark.estimators.training.settings.byte_sizes import parse_bytes
from ringspark.estimators.training.settings.choices import Compression, Offload, Precision, Sharding
from ringspark.estimators.training.settings.declaration import Range, Setting, one_of

PRECISION = Setting[Precision](
    name="precision",
    field="precision",
    words="'fp32', 'bf16' or 'fp16' (with loss scaling)",
    default="fp32",
    accepts=one_of(get_args(Precision)),
)


def _is_policy(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("none", "sqrt", "all") or (value.isdecimal() and int(value) > 0)
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(name, str) for name in value)


def _policy(value: Any) -> Any:
    """Converts a segment count to the string that a config and a saved stage hold, a tuple to a list."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


NO_CHECKPOINTING = "none"
GRADIENT_CHECKPOINTING = Setting[str | int | list[str]](
    name="gradientCheckpointing",
    field="gradient_checkpointing",
    words="activations to recompute instead of keeping: 'none', 'sqrt', 'all', a segment count, or a list of "
    "submodule names",
    default=NO_CHECKPOINTING,
    convert=_policy,
    accepts=Range(
        _is_policy,
        lambda: "must be 'none', 'sqrt', 'all', a number of segments or a list of submodule names",
    ),
    # Recomputing activations changes memory and time, but no numbers.
    may_differ_on_resume=True,
)
ACTIVATION_OFFLOAD = Setting[Offload](
    name="activationOffload",
    field="activation_offload",
    words="where activations wait for the backward pass: 'none' (in place), 'host' (for a GPU: the host's "
    "pinned memory) or 'disk' (a temporary file)",
    default="none",
    accepts=one_of(get_args(Offload)),
    may_differ_on_resume=True,
)
ACTIVATION_COMPRESSION = Setting[Compression](
    name="activationCompression",
    field="activation_compression",
    words="how kept activations are packed: 'none', 'bits' (exact: one bit a value where only the sign is "
    "needed), 'int8' or 'fp8' (these too, and 8 bits a value elsewhere, with a small error)",
    default="none",
    accepts=one_of(get_args(Compression)),
)
SHARDING = Setting[Sharding](
    name="sharding",
    field="sharding",
    words="what each worker has only its part of: 'none', 'optimizer' (state; ZeRO 1), 'gradients' (these "
    "too; ZeRO 2) or 'parameters' (all; ZeRO 3)",
    default="none",
    accepts=one_of(get_args(Sharding)),
    without_effect=(
        lambda given: given["sharding"] != "none" and given["numWorkers"] == 1,
        "there is one worker",
    ),
)
MEMORY_BUDGET = Setting[int | None](
    name="memoryBudget",
    words="memory of each worker for tensors, in bytes or as Spark writes sizes ('4g'): fit refuses what "
    "would not fit, before any worker starts; unset: no check",
    convert=lambda value: parse_bytes(value, "memoryBudget"),
)
