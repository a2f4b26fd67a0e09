"""Settings of a worker's memory: precision, activations, the budget."""

from __future__ import annotations

from typing import Any, get_args

from ringspark.estimators.options.base import ValueRange, one_of
from ringspark.estimators.training.settings.byte_sizes import parse_bytes
from ringspark.estimators.training.settings.choices import Compression, Offload, Precision
from ringspark.estimators.training.settings.declaration import Setting

PRECISION = Setting[Precision](
    name="precision",
    field="precision",
    words="'fp32', 'bf16' or 'fp16' (with loss scaling)",
    default="fp32",
    accepts=one_of(get_args(Precision)),
    recorded_on_resume=True,
)


def _is_policy(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("none", "sqrt", "all") or (value.isdecimal() and int(value) > 0)
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(name, str) for name in value)


def _policy(value: Any) -> Any:
    """Converts an int to a string and a tuple to a list, the types of a saved `gradientCheckpointing`."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


NO_CHECKPOINTING = "none"
GRADIENT_CHECKPOINTING = Setting[str | int | list[str]](
    name="gradientCheckpointing",
    field="gradient_checkpointing",
    words="activations to recompute: 'none', 'sqrt', 'all', a number of segments, or submodule names",
    default=NO_CHECKPOINTING,
    convert=_policy,
    accepts=ValueRange(
        _is_policy, lambda: "must be 'none', 'sqrt', 'all', a number of segments or a list of submodule names"
    ),
    # Recomputing activations changes memory and time, but no numbers.
    may_differ_on_resume=True,
)
ACTIVATION_OFFLOAD = Setting[Offload](
    name="activationOffload",
    field="activation_offload",
    words="where activations wait for the backward pass: 'none', 'host' (for a GPU) or 'disk'",
    default="none",
    accepts=one_of(get_args(Offload)),
    may_differ_on_resume=True,
)
ACTIVATION_COMPRESSION = Setting[Compression](
    name="activationCompression",
    field="activation_compression",
    words="how activations are kept: 'none', 'bits' (exact), 'int8' or 'fp8' (with a small error)",
    default="none",
    accepts=one_of(get_args(Compression)),
)
MEMORY_BUDGET = Setting[int | None](
    name="memoryBudget",
    words="memory per worker for tensors, in bytes or as '4g'; fit refuses to exceed it; unset: no check",
    convert=lambda value: parse_bytes(value, "memoryBudget"),
)
