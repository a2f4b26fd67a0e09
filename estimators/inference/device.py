"""Which device a task of `transform` computes on; tasks may share a GPU, unlike the ranks of a training."""

from __future__ import annotations

from collections.abc import Sequence


def choose_inference_device(
    use_gpu: bool, addresses: Sequence[str], partition_id: int, num_devices: int
) -> str:
    """The torch device of one task.

    Args:
        use_gpu: What the user asked for.
        addresses: GPU addresses that Spark gave the task; empty where Spark manages none.
        partition_id: Of the task: where Spark manages no GPUs, tasks go round the devices of their host.
        num_devices: CUDA devices that torch sees here.

    Raises:
        ValueError: A GPU was asked for and there is none.
    """
    if not use_gpu:
        return "cpu"
    if not num_devices:
        raise ValueError(
            "inferenceUseGpu=True needs a GPU on every host that runs tasks of transform, torch sees none on "
            "this one; set inferenceUseGpu=False, or install a torch with CUDA where there is a GPU"
        )
    # An identifier, or a number that counts devices which a container hides, says nothing to torch.
    if addresses and addresses[0].isdigit() and int(addresses[0]) < num_devices:
        return f"cuda:{int(addresses[0])}"
    return f"cuda:{partition_id % num_devices}"


def task_device(use_gpu: bool) -> str:
    """The device of the Spark task that this runs in."""
    if not use_gpu:
        return "cpu"
    import torch
    from pyspark import TaskContext

    context = TaskContext.get()
    resources = context.resources() if context is not None else {}
    addresses = list(resources["gpu"].addresses) if "gpu" in resources else []
    partition_id = context.partitionId() if context is not None else 0
    return choose_inference_device(use_gpu, addresses, partition_id, torch.cuda.device_count())
