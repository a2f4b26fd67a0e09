"""Runs torch's tensor and context parallelism; a shard should hold a query, a key and a value: 0, 2, 4.

$ torchrun --nproc-per-node 2 tensors.py
gradient_penalty one process -11.571, two -13.341
clipping RuntimeError: aten._foreach_norm.Scalar got mixed torch.Tensor and DTensor, need to convert ...
layer_of_gpt2 NotImplementedError: ColwiseParallel currently only support nn.Linear and nn.Embedding!
queries_keys_and_values [0.0, 1.0, 2.0]
attention NotImplementedError: Operator aten._scaled_dot_product_flash_attention_for_cpu.default doe ...
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.pytorch_utils import Conv1D

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
PAIR = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def gradient_penalty():
    found = []
    for block in Block(), parallelize_module(Block(), mesh, PAIR):
        x = torch.arange(8.0).view(2, 4).requires_grad_()
        (slope,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append(round(block.norm.weight.grad[0].item(), 3))
    return f"one process {found[0]}, two {found[1]}"


def clipping():
    block = parallelize_module(Block(), mesh, PAIR)
    block(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(block.parameters(), 1.0)


def layer_of_gpt2():
    parallelize_module(Conv1D(12, 4), mesh, ColwiseParallel())


def queries_keys_and_values():
    layer = nn.Linear(1, 6)
    layer.weight.data = torch.arange(6.0).view(6, 1)  # 2 queries, 2 keys, 2 values
    return parallelize_module(layer, mesh, ColwiseParallel()).weight.to_local().flatten().tolist()


def attention():
    rows = torch.randn(1, 2, 8, 4)
    with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[2]):
        nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)


for work in (gradient_penalty, clipping, layer_of_gpt2, queries_keys_and_values, attention):
    try:
        result = work()
    except Exception as error:
        result = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if dist.get_rank() == 0:
        print(work.__name__, result, flush=True)
