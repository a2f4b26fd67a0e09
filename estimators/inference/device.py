"""Chooses the device of a task of `transform`; unlike the ranks of a training, tasks may share a GPU."""

from __future__ import annotations

from collections.abc import Sequence


def choose_inference_device(
    use_gpu: bool, addresses: Sequence[str], partition_id: int, num_devices: int
) -> str:
    """Returns the torch device of one task.

    Args:
        use_gpu: Whether the user asked for a GPU.
        addresses: GPU addresses that Spark gave the task; empty if Spark manages no GPUs.
        partition_id: Partition number of the task, by which tasks take turns on the devices of their host
            if Spark manages no GPUs.
        num_devices: Number of CUDA devices that torch sees here.

    Raises:
        ValueError: The user asked for a GPU and there is none.
    """
    if not use_gpu:
        return "cpu"
    if not num_devices:
        raise ValueError(
            "inferenceUseGpu=True needs a GPU on every host that runs tasks of transform, torch sees none on "
            "this one; set inferenceUseGpu=False, or install a torch with CUDA where there is a GPU"
        )
    # torch cannot use an identifier, or a number that counts devices which a container hides.
    if addresses and addresses[0].isdigit() and int(addresses[0]) < num_devices:
        return f"cuda:{int(addresses[0])}"
    return f"cuda:{partition_id % num_devices}"


def task_device(use_gpu: bool) -> str:
    """Returns the device of the Spark task in which this runs."""
    if not use_gpu:
        return "cpu"
    import torch
    from pyspark import TaskContext

    context = TaskContext.get()
    resources = context.resources() if context is not None else {}
    addresses = list(resources["gpu"].addresses) if "gpu" in resources else []
    partition_id = context.partitionId() if context is not None else 0
    return choose_inference_device(use_gpu, addresses, partition_id, torch.cuda.device_count())
