"""Runs torch's pipeline schedules; rank 1 prints the sum of the absolute values of each gradient.

$ torchrun --nproc-per-node 3 pipelines.py 1f1b 8
['1f1b', '8'] {'query': 0.9748340845108032, 'layer.weight': 3.4429259300231934, 'layer.bias': 1.0353 ...
$ torchrun --nproc-per-node 3 pipelines.py zero_bubble 8
['zero_bubble', '8'] {'query': None, 'layer.weight': 3.4429259300231934, 'layer.bias': 1.0353171825408936}
$ torchrun --nproc-per-node 3 pipelines.py 1f1b 7
['1f1b', '7'] {'query': nan, 'layer.weight': nan, 'layer.bias': nan}
[rank0]: RuntimeError: Mismatch in shape: grad_output[0] has a shape of torch.Size([2, 4]) and ...
$ torchrun --nproc-per-node 3 pipelines.py 1f1b 3
[rank0]: ValueError: Expecting 4 arg_mbs but got 3
[rank2]: AssertionError: Tensor size 3 is smaller than num_chunks
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble


class Query(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x), (self.query * 2).repeat(len(x), 1)


class Last(nn.Module):
    def forward(self, x, y):
        return x * y


def loss(outputs, labels):
    return (outputs - labels).square().mean()


dist.init_process_group("gloo")
torch.manual_seed(0)
rank, networks = dist.get_rank(), [nn.Linear(4, 4), Query(), Last()]
rows, labels = torch.randn(8, 4), torch.randn(8, 4)
given = int(sys.argv[2])
stage = PipelineStage(networks[rank], rank, 3, torch.device("cpu"))
split = sys.argv[1] == "zero_bubble"
schedule = (
    ScheduleInterleavedZeroBubble([stage], 4, loss_fn=loss) if split else Schedule1F1B(stage, 4, loss_fn=loss)
)
schedule.step(*([rows[:given]] if rank == 0 else []), **({"target": labels[:given]} if rank == 2 else {}))
if rank == 1:
    print(
        sys.argv[1:],
        {
            name: p.grad if p.grad is None else p.grad.abs().sum().item()
            for name, p in networks[1].named_parameters()
        },
    )
