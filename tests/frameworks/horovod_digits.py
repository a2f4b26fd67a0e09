"""Horovod's MNIST example on generated digits: a script that knows nothing of ringspark."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_digits() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    shapes = torch.rand(10, 1, 12, 12, generator=generator)
    labels = torch.randint(10, (512,), generator=generator)
    return TensorDataset(shapes[labels] + 0.2 * torch.randn(512, 1, 12, 12, generator=generator), labels)


def main() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    digits = make_digits()
    sampler = DistributedSampler(digits, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(digits, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    weights = [parameter.double().sum().item() for parameter in model.parameters()]
    report = {"rank": hvd.rank(), "size": hvd.size(), "losses": losses, "weights": weights}
    Path(sys.argv[1], f"{hvd.rank()}.json").write_text(json.dumps(report))
    hvd.shutdown()


if __name__ == "__main__":
    main()
