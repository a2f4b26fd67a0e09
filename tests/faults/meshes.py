"""Trainings whose network is sharded over four ranks; the last stage of a pipeline has the first ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_WORKERS = 4
# Fewer and larger steps than for small networks, because ranks of a mesh communicate several times per step.
BATCH, EVERY_STEPS = 48, 5
TRANSFORMER: dict[str, Any] = {"vocab_size": 23, "max_seq_len": 8, "dim": 16, "depth": 2, "num_heads": 2}
TRANSFORMER |= {"dropout": 0.1, "out_features": 1}


@dataclass(frozen=True, kw_only=True)
class MeshTraining:
    """One training over a mesh.

    Attributes:
        roles: Role in the mesh -> ranks; one of them is hit.
        model: Arguments of the network besides the common ones.
        micro_batches: For `gradientAccumulation`: micro-batches that pass through a pipeline.
    """

    parallelism: Mapping[str, int]
    roles: Mapping[str, tuple[int, ...]]
    model: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1

    def settings(self) -> dict[str, Any]:
        return {
            "parallelism": dict(self.parallelism),
            "gradientAccumulation": self.micro_batches,
            "batchSize": BATCH,
            "checkpointEverySteps": EVERY_STEPS,
        }

    def network(self) -> dict[str, Any]:
        return {**TRANSFORMER, **self.model}


MESHES = {
    "data2 x tensor2": MeshTraining(
        parallelism={"data": 2, "tensor": 2},
        roles={"writer": (0,), "tensor place": (1,), "other copy": (2, 3)},
    ),
    "pipeline2 x data2": MeshTraining(
        parallelism={"pipeline": 2, "data": 2},
        roles={"last stage, writer": (0,), "last stage": (1,), "first stage": (2, 3)},
        micro_batches=2,
    ),
    "pipeline4": MeshTraining(
        parallelism={"pipeline": 4},
        roles={"last stage, writer": (0,), "middle stage": (1, 2), "first stage": (3,)},
        micro_batches=4,
    ),
    "sequence2 x data2": MeshTraining(
        parallelism={"sequence": 2, "data": 2},
        roles={"first part of rows, writer": (0,), "second part of rows": (1, 3)},
    ),
    "expert2 x data2": MeshTraining(
        parallelism={"expert": 2, "data": 2},
        roles={"writer": (0,), "other experts": (1, 3), "same experts": (2,)},
        model={"experts": {"num_experts": 4, "router": "gshard"}},
    ),
}


def target_of(mesh: str, role: str) -> str:
    return f"{mesh}: {role}"
