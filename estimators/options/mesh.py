"""How workers share one network: the setting `parallelism`."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

from ringspark.estimators.options.checked import AtLeast1, Names
from ringspark.estimators.options.declare import Options

# The axes from the outermost to the innermost: ranks are numbered along them, the last axis fastest.
AXES = ("pipeline", "data", "shard", "expert", "sequence", "tensor")
# Along these axes a worker holds a shard of the network, or of every row.
MODEL_AXES = ("pipeline", "expert", "sequence", "tensor")
# Lets the planner choose the mesh; the config of a training holds the choice.
AUTO = "auto"

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "pipedream", "2bw"]
Context = Literal["ring", "gather", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class Pipeline(Options):
    """Pipeline parallelism: each worker holds some blocks of the network, and micro-batches pass through.

    `gradientAccumulation` is the number of micro-batches per step.

    Attributes:
        stages: Workers along the pipeline.
        schedule: Order of the forward and backward passes: 'naive', 'gpipe', '1f1b', 'interleaved',
            'zero_bubble', 'zbv', 'pipedream' or '2bw'.
        virtual: Stages per worker, for the schedule 'interleaved'.
        cuts: Names of the blocks that begin the second and later stages; () balances the stages by cost.
        sequence_chunks: Chunks of a row's time steps that pass through recurrent layers one after another.
    """

    SHORTHAND: ClassVar[str] = "stages"

    stages: AtLeast1 = field(default=1, kw_only=False)
    schedule: Schedule = "1f1b"
    virtual: AtLeast1 = 1
    cuts: Names = ()
    sequence_chunks: AtLeast1 = 1


@dataclass(frozen=True, kw_only=True)
class Mesh(Options):
    """Workers along each axis of the mesh; their product is `numWorkers`.

    Attributes:
        data: Workers with equal weights and different rows; None takes the workers that other axes leave.
        shard: Like `data`, and `sync=Zero(...)` shards over these workers only.
        tensor: Workers that each hold a shard of every matrix.
        pipeline: Workers that each hold some blocks, such as Pipeline(2, schedule="gpipe").
        expert: Workers with different experts of a mixture of experts, and different rows.
        sequence: Workers that each hold a part of every row: context parallelism.
        plan: Which layers `tensor` shards in a network of your own, such as `{"blocks.*.up": "column",
            "blocks.*.down": "row"}`; None takes the network's own plan.
        sequence_parallel: Whether layers between the sharded layers of `tensor` work on shards of the tokens.
        context: How attention reaches the keys of other workers along `sequence`: 'ring', 'gather' or
            'ulysses'.
    """

    data: AtLeast1 | None = None
    shard: AtLeast1 = 1
    tensor: AtLeast1 = 1
    pipeline: Pipeline = Pipeline(1)
    expert: AtLeast1 = 1
    sequence: AtLeast1 = 1
    plan: dict[str, Any] | None = None
    sequence_parallel: bool = False
    context: Context = "ring"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan is not None:
            plan = {name: list(v) if isinstance(v, list | tuple) else v for name, v in self.plan.items()}
            object.__setattr__(self, "plan", plan)

    def to_values(self) -> dict[str, Any]:
        """Returns the options that are not at their defaults."""
        values = _changed(self)
        if "pipeline" in values:
            pipeline = _changed(self.pipeline)
            values["pipeline"] = self.pipeline.stages if list(pipeline) == ["stages"] else pipeline
        return values

    def size(self, axis: str) -> int:
        """Returns the number of workers along an axis; 1 if the axis is `data` and `data` is None."""
        found = self.pipeline.stages if axis == "pipeline" else getattr(self, axis)
        return found or 1

    def sizes(self, num_workers: int) -> dict[str, int]:
        """Returns the workers along each axis; raises ValueError if their product is not `num_workers`."""
        sizes = {axis: self.size(axis) for axis in AXES}
        if self.data is None:
            sizes["data"] = max(1, num_workers // math.prod(sizes.values()))
        if math.prod(sizes.values()) != num_workers:
            given = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "data 1"
            raise ValueError(
                f"parallelism's axes must multiply to numWorkers ({num_workers}), got {given} = "
                f"{math.prod(sizes.values())}; set numWorkers to this product, or change an axis"
            )
        return sizes

    @property
    def cuts_network(self) -> bool:
        """Whether a worker has less than the whole network, or less than whole rows."""
        return any(self.size(axis) > 1 for axis in MODEL_AXES)


def _changed(options: Options) -> dict[str, Any]:
    given = {f.name: (getattr(options, f.name), f.default) for f in fields(options)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, (value, default) in given.items()
        if default is MISSING or value != default
    }
