"""Settings of a worker's memory: precision, activations, the budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringspark.estimators.options.checked import WrongTypeError
from ringspark.estimators.training.settings.byte_sizes import parse_bytes
from ringspark.estimators.training.settings.choices import Compression, Offload, Precision
from ringspark.estimators.training.settings.setting import Section, setting

NO_CHECKPOINTING = "none"


def _policy(value: Any) -> Any:
    """Converts a number of segments to a string, the form in which a stage saves it."""
    policy = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(policy, str):
        is_known = policy in (NO_CHECKPOINTING, "sqrt", "all") or (policy.isdecimal() and int(policy) > 0)
    else:
        is_known = isinstance(policy, list | tuple) and bool(policy)
    if not is_known or not all(isinstance(name, str) for name in policy):
        raise WrongTypeError(
            "gradientCheckpointing must be 'none', 'sqrt', 'all', a number of segments of at least 1 "
            f"or a list of submodule names, got {value!r}"
        )
    return policy


@dataclass(frozen=True, kw_only=True)
class Memory(Section):
    GROUP = "memory"

    precision: Precision = setting(
        "fp32",
        "number format of the training: 'fp32', 'bf16' or 'fp16' (with loss scaling)",
        recorded_on_resume=True,
    )
    # Recomputing activations changes memory and time, but no numbers.
    gradient_checkpointing: str | tuple[str, ...] = setting(
        NO_CHECKPOINTING,
        "activations to recompute: 'none', 'sqrt', 'all', a number of segments, or submodule names",
        convert=_policy,
        rule_words="must be 'none', 'sqrt', 'all', a number of segments, or a list of submodule names",
        may_differ_on_resume=True,
    )
    activation_offload: Offload = setting(
        "none",
        "where activations wait for the backward pass: 'none', 'host' (for a GPU) or 'disk'",
        may_differ_on_resume=True,
    )
    activation_compression: Compression = setting(
        "none", "compression of stored activations: 'none', 'bits' (lossless), 'int8' or 'fp8' (lossy)"
    )


@dataclass(frozen=True, kw_only=True)
class Budget(Section):
    GROUP = "memory"
    ON_DRIVER = True

    memory_budget: int | None = setting(
        None,
        "memory per worker for tensors, in bytes or as '4g'; fit fails if it needs more; unset: no check",
        convert=lambda value: parse_bytes(value, "memoryBudget"),
        rule_words="must be above 0 bytes",
    )
