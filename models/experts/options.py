"""Checks the argument `experts` of a network whose blocks may have mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from ringspark.models.experts.layer import MixtureOfExperts


def mixture_options(given: Mapping[str, Any], depth: int) -> tuple[int, dict[str, Any]]:
    """Returns every how many blocks a mixture stands, and its options.

    Raises:
        ValueError: An option is unknown, or no block gets a mixture.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"experts must be a dict such as {{'num_experts': 8}}, got {given!r}")
    options = dict(given)
    every = options.pop("every", 2)
    known = [name for name in signature(MixtureOfExperts).parameters if name not in ("dim", "causal")]
    for name in options:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"experts has no option {name!r}{hint}; there are every, {', '.join(known)}")
    if "num_experts" not in options:
        raise ValueError(f"experts must give num_experts, such as {{'num_experts': 8}}, got {given!r}")
    if not 1 <= every <= depth:
        raise ValueError(f"experts' every must be from 1 to depth ({depth}), got {every}")
    return every, options
