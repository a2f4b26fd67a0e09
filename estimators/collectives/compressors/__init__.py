"""Gradient compression: one file per compressor, one registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringspark.estimators.collectives.compressors.base import Compressor, Sent
from ringspark.estimators.collectives.compressors.options import resolved
from ringspark.estimators.lazy_imports import LazyRegistry
from ringspark.estimators.names import nearest

# Stands for no compressor, unless gradients are to be summed in two levels.
NONE = "none"

COMPRESSORS: LazyRegistry[type[Compressor]] = LazyRegistry(
    {
        NONE: "ringspark.estimators.collectives.compressors.whole:Whole",
        "fp16": "ringspark.estimators.collectives.compressors.sixteen_bits:Fp16",
        "bf16": "ringspark.estimators.collectives.compressors.sixteen_bits:Bf16",
        "topk": "ringspark.estimators.collectives.compressors.topk:TopK",
        "randomk": "ringspark.extras.compressors.randomk:RandomK",
        "sparsify": "ringspark.extras.compressors.sparsify:Sparsify",
        "qsgd": "ringspark.extras.compressors.qsgd:Qsgd",
        "sign": "ringspark.extras.compressors.sign:Sign",
        "powersgd": "ringspark.estimators.collectives.compressors.powersgd:PowerSgd",
        "gradiveq": "ringspark.extras.compressors.gradiveq:GradiVeQ",
    }
)


def resolved_compression(value: str | Mapping[str, Any], subject: str = "a compression") -> dict[str, Any]:
    """Returns the name of a compressor with all its options, from a name or a name with some of them.

    Args:
        value: The name, or a dict of "name" and options.
        subject: What the value is of, for the errors.

    Raises:
        ValueError: The name or an option is unknown, or a value is out of range.
        TypeError: It is neither a text nor a dict.
    """
    if not isinstance(value, str | Mapping):
        raise TypeError(
            f"{subject} must be a name or a dict with a 'name', such as {{'name': 'powersgd', "
            f"'rank': 2}}, got {value!r}"
        )
    given = {"name": value} if isinstance(value, str) else dict(value)
    name: Any = given.pop("name", None)
    if name not in COMPRESSORS:
        raise ValueError(
            f"{subject} must be one of {', '.join(COMPRESSORS)}, got {name!r}"
            f"{nearest(str(name), COMPRESSORS)}"
        )
    found = {"name": name, **resolved(f"{subject} {name!r}", given, COMPRESSORS[name].OPTIONS)}
    return found if is_asked(found) else {"name": NONE}


def is_asked(compression: Mapping[str, Any]) -> bool:
    """Whether gradients go another way than whole between all workers."""
    return compression["name"] != NONE or compression.get("between") == "hosts"


__all__ = ["COMPRESSORS", "NONE", "Compressor", "Sent", "is_asked", "resolved_compression"]
