"""Ways to sum gradients in fewer bytes: one file a compressor, one registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringspark.estimators.collectives.compressors.base import Compressor, Sent
from ringspark.estimators.collectives.compressors.gradiveq import GradiVeQ
from ringspark.estimators.collectives.compressors.options import resolved
from ringspark.estimators.collectives.compressors.powersgd import PowerSgd
from ringspark.estimators.collectives.compressors.qsgd import Qsgd
from ringspark.estimators.collectives.compressors.randomk import RandomK
from ringspark.estimators.collectives.compressors.sign import Sign
from ringspark.estimators.collectives.compressors.sixteen_bits import Bf16, Fp16
from ringspark.estimators.collectives.compressors.sparsify import Sparsify
from ringspark.estimators.collectives.compressors.topk import TopK
from ringspark.estimators.names import nearest

COMPRESSORS: dict[str, type[Compressor]] = {
    "fp16": Fp16,
    "bf16": Bf16,
    "topk": TopK,
    "randomk": RandomK,
    "sparsify": Sparsify,
    "qsgd": Qsgd,
    "sign": Sign,
    "powersgd": PowerSgd,
    "gradiveq": GradiVeQ,
}

# Stands for no compressor.
NONE = "none"


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
    name = given.pop("name", None)
    names = [NONE, *COMPRESSORS]
    if name not in names:
        raise ValueError(
            f"{subject} must be one of {', '.join(names)}, got {name!r}{nearest(str(name), names)}"
        )
    options = {} if name == NONE else COMPRESSORS[name].OPTIONS
    if given and not options:
        raise ValueError(f"{subject} 'none' takes no options, got {next(iter(given))!r}")
    return {"name": name, **resolved(f"{subject} {name!r}", given, options)}


__all__ = ["COMPRESSORS", "NONE", "Compressor", "Sent", "resolved_compression"]
