"""All meshes of a number of workers, each with what a network or a setting has against it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.planning.meshes.axes import (
    AXIS_RULES,
    PLANNED_AXES,
    Spreadable,
    has_experts,
    spread_refusal,
)

# Micro-batches of a step are tried up to so many for each stage of a pipeline, or without one in all.
MOST_MICRO_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to share a network.

    Attributes:
        sizes: Workers along each axis that has several.
        options: How a pipeline runs; empty without one.
        refusal: Why it cannot be; "" if it can.
    """

    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""

    @property
    def parallelism(self) -> dict[str, Any]:
        """The setting of the same name."""
        return {**self.sizes, **self.options}

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)


def candidates(given: Spreadable, workers: int, *, interleaves: bool = True) -> list[Candidate]:
    """Returns all meshes over the planned axes, those of rows alone first.

    Args:
        interleaves: Whether pipelines of several stages a worker are tried. They fill gaps, of which ranks
            that share the cores of their host leave none.
    """
    # With weights in parts, 'data' is 'shard': the strategy parts them over all that read other rows.
    rows_axis = "shard" if given.config.sync.sharding == "parameters" else "data"
    refusals: dict[tuple[str, int], str] = {}
    found: list[Candidate] = []
    # Of a network that is not over tokens nobody expects that its rows be spread, nor of one without experts
    # that they be.
    left_out = {"sequence": not hasattr(given.network, "rows"), "expert": not has_experts(given.network)}
    inside = [axis for axis in PLANNED_AXES[1:] if not left_out.get(axis)]
    for shape in _shapes(workers, 1 + len(inside)):
        named = zip((rows_axis, *inside), shape, strict=True)
        sizes = {axis: size for axis, size in named if size > 1}
        for axis, size in sizes.items():
            if (axis, size) not in refusals:
                refusals[axis, size] = AXIS_RULES[axis](given, size)
        refusal = next((refusals[pair] for pair in sizes.items() if refusals[pair]), "")
        if not refusal and len(sizes.keys() - {rows_axis}) > 1:
            refusal = spread_refusal(given, sizes)
        for options in _pipelines(given, sizes, interleaves) if not refusal else [{}]:
            mesh = {**sizes, **options}
            told = refusal or _combination(given.config, workers, mesh)
            found.append(Candidate(sizes=sizes, options=options, refusal=told))
    return sorted(found, key=lambda candidate: math.prod(candidate.size(axis) for axis in PLANNED_AXES[1:]))


def micro_batches(candidate: Candidate, rows: int, given: int | None) -> list[int]:
    """Returns the numbers of micro-batches to try for a step of so many rows of one copy.

    Args:
        given: The number that the user chose; None to choose.
    """
    if given is not None:
        return [given] if given <= rows else []
    stages = candidate.size("pipeline")
    least = 1 if stages == 1 else min(stages, rows)
    counts = (least * 2**power for power in range(MOST_MICRO_BATCHES.bit_length()))
    return [count for count in counts if count <= rows]


def with_mesh(
    config: TrainConfig, workers: int, parallelism: Mapping[str, Any], num_micro: int
) -> TrainConfig:
    """Returns the config of a candidate.

    Raises:
        ValueError: The settings refuse each other.
    """
    return replace(
        config,
        num_workers=workers,
        parallelism=Mesh.of({"plan": config.parallelism.plan, **parallelism}),
        gradient_accumulation=num_micro,
    )


def _combination(config: TrainConfig, workers: int, parallelism: Mapping[str, Any]) -> str:
    try:
        with_mesh(config, workers, parallelism, 1)
    except ValueError as error:
        return str(error)
    return ""


def _shapes(workers: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yields all ways to write a number as a product of so many."""
    if axes == 1:
        yield (workers,)
        return
    for first in range(workers, 0, -1):
        if workers % first == 0:
            for rest in _shapes(workers // first, axes - 1):
                yield (first, *rest)


def _pipelines(given: Spreadable, sizes: Mapping[str, int], interleaves: bool) -> Sequence[dict[str, Any]]:
    """Returns the schedules to try."""
    stages = sizes.get("pipeline", 1)
    if stages == 1:
        return [{}]
    plain: dict[str, Any] = {"schedule": "1f1b"}
    if not interleaves or AXIS_RULES["pipeline"](given, 2 * stages):
        return [plain]
    return [plain, {"schedule": "interleaved", "virtual": 2}]
