"""DistributedDataParallel on a GPU, without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel.data.ddp import DdpSync

GPU = torch.device("cuda:0")


class _AllOnTheGpu(TorchFunctionMode):
    """Tensors say that they are on the GPU, and what is made there is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == GPU:
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return GPU if isinstance(result, torch.device) else result


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_rank_without_rows_takes_part_on_a_gpu(group_of_one: None) -> None:
    """With `device_ids`, DistributedDataParallel indexes the arguments, and such a rank passes none."""
    module, collective = nn.Linear(3, 1), LocalCollective()
    with _AllOnTheGpu():
        sync = DdpSync(module, torch.optim.SGD(module.parameters(), lr=0.1), collective, 1)
        assert next(sync.module.parameters()).device == GPU
        sync.backward_without_rows()
    collective._release()
    assert module.weight.grad is None
