"""Runs torch's gradient hooks, sharded optimizers, and torchmetrics.

$ torchrun --nproc-per-node 2 gradients.py bf16 quantized powersgd_of_zeros \\
    zero_redundancy adafactor_on_fsdp2
bf16 TypeError: BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL
quantized RuntimeError: 0-dim tensor. Use `tensor.item()` in Python or `tensor.item<T>()` in C++ to ...
powersgd_of_zeros finite: False
zero_redundancy numbers of state by rank: [2000001, 201]
adafactor_on_fsdp2 RuntimeError: but no valid strategy preserves this placement. Please use the out- ...
$ torchrun --nproc-per-node 2 gradients.py a_rank_without_rows
a_rank_without_rows RuntimeError: d_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out wa ...
$ torchrun --nproc-per-node 2 gradients.py auroc_of_a_rank_without_rows
auroc_of_a_rank_without_rows tensor(1.)
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 12 vs 6. Received data ...
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torchmetrics.classification import BinaryAUROC

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
rank = dist.get_rank()


def sum_gradients(hook, state=None, steps=1):
    network = nn.Linear(64, 64, bias=False)
    replica = DistributedDataParallel(network)
    replica.register_comm_hook(state, hook)
    for step in range(steps):
        network.zero_grad()
        (replica(torch.ones(2, 64)) * (step != 3)).sum().backward()
    return f"finite: {network.weight.grad.isfinite().all().item()}"


def bf16():
    return sum_gradients(default_hooks.bf16_compress_hook)


def quantized():
    return sum_gradients(quantization_hooks.quantization_pertensor_hook)


def powersgd_of_zeros():
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1}
    return sum_gradients(powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, **options), 4)


def zero_redundancy():
    network = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(10, 10, bias=False))
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.Adam)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [None, None]
    dist.all_gather_object(held, sum(v.numel() for s in optimizer.optim.state.values() for v in s.values()))
    return f"numbers of state by rank: {held}"


def adafactor_on_fsdp2():
    network = nn.Sequential(nn.Linear(8, 8))
    fully_shard(network)
    network(torch.ones(2, 8)).sum().backward()
    torch.optim.Adafactor(network.parameters()).step()


def a_rank_without_rows():
    replica = DistributedDataParallel(nn.Linear(2, 1))
    if rank == 0:
        replica(torch.ones(1, 2)).sum().backward()
    else:
        time.sleep(15)


def auroc_of_a_rank_without_rows():
    metric = BinaryAUROC()
    if rank == 0:
        metric.update(torch.tensor([0.1, 0.8, 0.4]), torch.tensor([0, 1, 1]))
    return metric.compute()


for name in sys.argv[1:]:
    try:
        result = globals()[name]()
    except Exception as error:
        result = f"{type(error).__name__}: {str(error).splitlines()[0][-110:]}"
    if rank == 0:
        print(name, result, flush=True)
