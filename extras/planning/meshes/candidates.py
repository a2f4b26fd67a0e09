"""All meshes of a number of workers, each with the reason why it is not possible, if any."""

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

# Largest number of micro-batches to try, per stage of a pipeline.
MOST_MICRO_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One mesh.

    Attributes:
        sizes: Workers along each axis with more than one.
        options: Options of the pipeline; empty without one.
        refusal: Why the mesh is not possible, or "".
    """

    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""

    @property
    def parallelism(self) -> dict[str, Any]:
        """Value of the setting `parallelism`."""
        return {**self.sizes, **self.options}

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)


def candidates(given: Spreadable, workers: int, *, interleaves: bool = True) -> list[Candidate]:
    """Returns all meshes over the planned axes, data parallelism first.

    Args:
        interleaves: Whether to try pipelines with several stages per worker. They fill bubbles, which do not
            exist if ranks share cores.
    """
    # With sharded weights, 'shard' replaces 'data': the weights are sharded over all ranks with different
    # rows.
    rows_axis = "shard" if given.config.sync.sharding == "parameters" else "data"
    refusals: dict[tuple[str, int], str] = {}
    found: list[Candidate] = []
    # Do not list meshes over 'sequence' or 'expert' for networks without tokens or experts.
    skipped = {"sequence": not hasattr(given.network, "rows"), "expert": not has_experts(given.network)}
    inside = [axis for axis in PLANNED_AXES[1:] if not skipped.get(axis)]
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
            own = refusal or _settings_refusal(given.config, workers, mesh)
            found.append(Candidate(sizes=sizes, options=options, refusal=own))
    return sorted(found, key=lambda candidate: math.prod(candidate.size(axis) for axis in PLANNED_AXES[1:]))


def micro_batches(candidate: Candidate, rows: int, given: int | None) -> list[int]:
    """Returns the numbers of micro-batches to try for `rows` rows per replica.

    Args:
        given: The user's number, or None.
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
        ValueError: The settings exclude each other.
    """
    return replace(
        config,
        num_workers=workers,
        parallelism=Mesh.of({"plan": config.parallelism.plan, **parallelism}),
        gradient_accumulation=num_micro,
    )


def _settings_refusal(config: TrainConfig, workers: int, parallelism: Mapping[str, Any]) -> str:
    try:
        with_mesh(config, workers, parallelism, 1)
    except ValueError as error:
        return str(error)
    return ""


def _shapes(workers: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yields all factorizations of a number into `axes` factors."""
    if axes == 1:
        yield (workers,)
        return
    for first in range(workers, 0, -1):
        if workers % first == 0:
            for rest in _shapes(workers // first, axes - 1):
                yield (first, *rest)


def _pipelines(given: Spreadable, sizes: Mapping[str, int], interleaves: bool) -> Sequence[dict[str, Any]]:
    """Returns the pipeline schedules to try."""
    stages = sizes.get("pipeline", 1)
    if stages == 1:
        return [{}]
    plain: dict[str, Any] = {"schedule": "1f1b"}
    if not interleaves or AXIS_RULES["pipeline"](given, 2 * stages):
        return [plain]
    return [plain, {"schedule": "interleaved", "virtual": 2}]
