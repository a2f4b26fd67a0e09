"""`ParallelismPlan`: predicted memory and time of each mesh, and the chosen mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.extras.planning.exchange_time import show_seconds
from ringspark.pipelines.notebook_table import align_table, notebook_table

# Another mesh replaces data parallelism only if it takes less than this share of the time, because
# predictions have errors.
WORTHWHILE = 0.9
_HEADER = ("mesh", "micro-batches", "memory of a worker", "step", "exchange", "bubble", "")


def name_options(sizes: Mapping[str, int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of the setting `parallelism` for the sizes of axes and the pipeline's options."""
    pipeline = {"pipeline": {"stages": sizes["pipeline"], **options}} if options else {}
    return {**sizes, **pipeline}


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """Prediction for one mesh.

    Attributes:
        sizes: Number of workers along each axis, without axes of one worker.
        options: Options of the pipeline; empty if there is no pipeline.
        num_micro: Micro-batches per step, a value for the setting `gradientAccumulation`.
        peak: Peak bytes of tensors on the worker that needs most; 0 if it could not be planned.
        at_peak: Bytes of each part, such as "parameters", at the peak.
        exposed_seconds: Seconds per step in which workers only communicate.
        bubble: Share of the passes' time that the pipeline's workers spend waiting.
        refusal: Reason why the mesh is not possible, or "".
    """

    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    num_micro: int = 1
    peak: int = 0
    at_peak: Mapping[str, int] = field(default_factory=dict)
    step_seconds: float = 0.0
    exposed_seconds: float = 0.0
    bubble: float = 0.0
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether the mesh is possible and has enough memory."""
        return not self.refusal

    @property
    def cuts_network(self) -> bool:
        """Whether a worker has only a part of the network."""
        return bool(self.sizes.keys() - {"data", "shard"})

    @property
    def parallelism(self) -> dict[str, Any]:
        """Value of the setting `parallelism`; {} for data parallelism, the default."""
        return name_options(self.sizes, self.options) if self.cuts_network else {}

    @property
    def name(self) -> str:
        """Name such as "data 2 x pipeline 2 (interleaved)"."""
        name = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items()) or "one worker"
        schedule = self.options.get("schedule", "1f1b")
        return name if schedule == "1f1b" else f"{name} ({schedule})"


@dataclass(frozen=True, kw_only=True)
class ParallelismPlan:
    """Predictions for all meshes of a number of workers.

    Attributes:
        rows: Rows per step over all workers.
        meshes: Meshes that fit come first, the fastest first; then meshes that need too much memory, the
            smallest first; then impossible meshes.
        memory: Memory of a worker for tensors, in bytes; None if unknown.
        facts: A sentence with the measured or given numbers behind the prediction.
    """

    workers: int
    rows: int
    meshes: tuple[MeshPlan, ...]
    memory: int | None
    facts: str

    @property
    def chosen(self) -> MeshPlan | None:
        """The chosen mesh; None if none fits."""
        fitting = [mesh for mesh in self.meshes if mesh.fits]
        if not fitting:
            return None
        whole = next((mesh for mesh in fitting if not mesh.cuts_network), None)
        if whole is not None and fitting[0].step_seconds >= WORTHWHILE * whole.step_seconds:
            return whole
        return fitting[0]

    @property
    def best(self) -> dict[str, Any]:
        """Value for the setting `parallelism`; `chosen.num_micro` is the value for `gradientAccumulation`.

        Raises:
            ValueError: No mesh fits.
        """
        if (chosen := self.chosen) is None:
            raise ValueError(self.verdict)
        return chosen.parallelism

    @property
    def verdict(self) -> str:
        """A sentence that says which mesh is chosen and why."""
        chosen = self.chosen
        if chosen is None:
            planned = [mesh for mesh in self.meshes if mesh.peak]
            if not planned:
                return f"no mesh of {self.workers:,} workers is possible: {self.meshes[0].refusal}"
            return (
                f"no mesh of {self.workers:,} workers fits: the smallest, {planned[0].name}, needs "
                f"{show_bytes(planned[0].peak)} per worker, and {show_bytes(self.memory or 0)} are "
                "available; give more workers or memory, or set gradientCheckpointing"
            )
        sentence = f"{chosen.name} is chosen: {show_seconds(chosen.step_seconds)} per step"
        whole = next((mesh for mesh in self.meshes if not mesh.cuts_network), None)
        others = [mesh for mesh in self.meshes if mesh.fits and mesh is not chosen]
        if whole is not None and chosen is not whole:
            if not whole.fits:
                return f"{sentence}; data parallelism is not possible: {whole.refusal}"
            return f"{sentence}, and data parallelism takes {show_seconds(whole.step_seconds)}"
        if not others:
            return f"{sentence}; no other mesh fits"
        other = others[0]
        gain = ", which gains too little" if other.step_seconds < chosen.step_seconds else ""
        return f"{sentence}; the next mesh, {other.name}, takes {show_seconds(other.step_seconds)}{gain}"

    def of(self, **sizes: int) -> MeshPlan:
        """Returns the plan of a mesh, such as `plan.of(data=2, tensor=2)`.

        Raises:
            KeyError: There is no such mesh.
        """
        wanted = {axis: size for axis, size in sizes.items() if size > 1}
        for mesh in self.meshes:
            if dict(mesh.sizes) == wanted:
                return mesh
        raise KeyError(
            f"{wanted} is no mesh of {self.workers:,} workers; the meshes are {[m.name for m in self.meshes]}"
        )

    def table(self) -> str:
        """Returns the facts, a table with a line per mesh, and the verdict."""
        return "\n".join([self.facts, align_table(_HEADER, self._rows()), self.verdict])

    __str__ = table

    def _repr_html_(self) -> str:
        return notebook_table(self.facts, _HEADER, self._rows(), self.verdict)

    def _rows(self) -> Sequence[tuple[str, ...]]:
        chosen, rows = self.chosen, []
        for mesh in self.meshes:
            figures = ("",) * 5
            if mesh.peak:
                figures = (
                    str(mesh.num_micro),
                    show_bytes(mesh.peak),
                    show_seconds(mesh.step_seconds),
                    show_seconds(mesh.exposed_seconds),
                    f"{mesh.bubble:.0%}" if mesh.sizes.get("pipeline", 1) > 1 else "",
                )
            rows.append((mesh.name, *figures, "chosen" if mesh is chosen else mesh.refusal))
        return rows
