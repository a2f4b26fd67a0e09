"""Which device a rank computes on: decided from Spark's resources, never from the environment.

A reused Python worker still has the last job's `CUDA_VISIBLE_DEVICES`, so it is not consulted.
"""

from __future__ import annotations

from collections.abc import Sequence


def choose_device(
    use_gpu: bool, addresses: Sequence[str], local_rank: int, local_size: int, num_devices: int
) -> str:
    """The torch device of one rank.

    Args:
        use_gpu: What the user asked for.
        addresses: GPU addresses that Spark gave this task; empty where Spark manages none.
        local_rank: This rank's number among the ranks of its host.
        local_size: Ranks on this host.
        num_devices: CUDA devices that torch sees here.

    Raises:
        ValueError: GPUs were asked for and this rank has none of its own.
    """
    if not use_gpu:
        return "cpu"
    if addresses:
        return f"cuda:{int(addresses[0])}"
    if num_devices < local_size:
        raise ValueError(
            f"useGpu=True needs a GPU for each of the {local_size} workers on this host, torch sees "
            f"{num_devices}; lower numWorkers, give Spark spark.task.resource.gpu.amount, or set useGpu=False"
        )
    return f"cuda:{local_rank}"
