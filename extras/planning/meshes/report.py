"""`ParallelismPlan`: what each mesh needs and takes, as numbers and a table, and which is chosen and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.extras.planning.report import aligned, show_seconds
from ringspark.pipelines.notebook_table import notebook_table

# A mesh of whole copies keeps its place unless another one takes less than this share of its time: so much a
# prediction may err, and nothing is exchanged inside the network.
WORTHWHILE = 0.9
_HEADER = ("mesh", "micro-batches", "memory of a worker", "step", "exchange", "bubble", "")


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """One mesh.

    Attributes:
        sizes: Workers along each axis that has several.
        options: How a pipeline runs; empty without one.
        num_micro: Micro-batches of a step: `gradientAccumulation`.
        peak: Bytes of tensors of the worker that needs most; 0 if it could not be planned.
        at_peak: Part -> bytes at that moment.
        step_seconds: Of a step.
        exposed_seconds: The part in which workers exchange and do not compute.
        bubble: Share of the passes in which a worker of a pipeline waits.
        refusal: Why it cannot be; "" if it can.
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
        """Whether a training can have it."""
        return not self.refusal

    @property
    def cuts_network(self) -> bool:
        """Whether a worker has less than a whole copy."""
        return bool(self.sizes.keys() - {"data", "shard"})

    @property
    def parallelism(self) -> dict[str, Any]:
        """The value of the setting of this name; {} for whole copies, which is its default."""
        return {**self.sizes, **self.options} if self.cuts_network else {}

    @property
    def name(self) -> str:
        """The sizes in words, such as "data 2 x pipeline 2 (interleaved)"."""
        told = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items()) or "one worker"
        schedule = self.options.get("schedule", "1f1b")
        return told if schedule == "1f1b" else f"{told} ({schedule})"


@dataclass(frozen=True, kw_only=True)
class ParallelismPlan:
    """How so many workers may share a network.

    Attributes:
        workers: Number of workers.
        rows: Rows of a step over all of them.
        meshes: All meshes: those that fit, the fastest first; then those that need too much memory, the
            smallest first; then those that cannot be.
        memory: Bytes of a worker for tensors; None if nobody said.
        facts: What the prediction rests on, in a sentence.
    """

    workers: int
    rows: int
    meshes: tuple[MeshPlan, ...]
    memory: int | None
    facts: str

    @property
    def chosen(self) -> MeshPlan | None:
        """The mesh to take; None if none fits."""
        fitting = [mesh for mesh in self.meshes if mesh.fits]
        if not fitting:
            return None
        whole = next((mesh for mesh in fitting if not mesh.cuts_network), None)
        if whole is not None and fitting[0].step_seconds >= WORTHWHILE * whole.step_seconds:
            return whole
        return fitting[0]

    @property
    def best(self) -> dict[str, Any]:
        """The value for `parallelism`; `chosen.num_micro` is that for `gradientAccumulation`.

        Raises:
            ValueError: No mesh fits.
        """
        if self.chosen is None:
            raise ValueError(self.verdict)
        return self.chosen.parallelism

    @property
    def verdict(self) -> str:
        """Which mesh is chosen and why, in a sentence."""
        chosen = self.chosen
        if chosen is None:
            planned = [mesh for mesh in self.meshes if mesh.peak]
            if not planned:
                return f"no mesh of {self.workers:,} workers suits this network: {self.meshes[0].refusal}"
            return (
                f"no mesh of {self.workers:,} workers fits: the smallest, {planned[0].name}, needs "
                f"{show_bytes(planned[0].peak)} per worker, and {show_bytes(self.memory or 0)} are there; "
                "give more workers or memory, or set gradientCheckpointing"
            )
        told = f"{chosen.name} is chosen: {show_seconds(chosen.step_seconds)} a step"
        whole = next((mesh for mesh in self.meshes if not mesh.cuts_network), None)
        others = [mesh for mesh in self.meshes if mesh.fits and mesh is not chosen]
        if whole is not None and chosen is not whole:
            if not whole.fits:
                return f"{told}; whole copies cannot be: {whole.refusal}"
            return f"{told}, and whole copies take {show_seconds(whole.step_seconds)}"
        if not others:
            return f"{told}; no other mesh fits"
        other = others[0]
        closer = (
            ""
            if other.step_seconds >= chosen.step_seconds
            else ", which is too little less to cut the network"
        )
        return f"{told}; the next, {other.name}, takes {show_seconds(other.step_seconds)}{closer}"

    def of(self, **sizes: int) -> MeshPlan:
        """Returns the plan of a mesh, such as `plan.of(data=2, tensor=2)`.

        Raises:
            KeyError: There is no such mesh of so many workers.
        """
        wanted = {axis: size for axis, size in sizes.items() if size > 1}
        for mesh in self.meshes:
            if dict(mesh.sizes) == wanted:
                return mesh
        raise KeyError(
            f"{wanted} is no mesh of {self.workers:,} workers; they are {[m.name for m in self.meshes]}"
        )

    def table(self) -> str:
        """Returns a text: what the prediction rests on, a line per mesh, and the verdict."""
        return "\n".join([self.facts, aligned(_HEADER, self._rows()), self.verdict])

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """Returns what a notebook shows."""
        return notebook_table(self.facts, _HEADER, self._rows(), self.verdict)

    def _rows(self) -> Sequence[tuple[str, ...]]:
        chosen, rows = self.chosen, []
        for mesh in self.meshes:
            figures = ("", "", "", "", "")
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
