"""A Keras model with the torch backend, trained by a loop of torch with DistributedDataParallel."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    keras.utils.set_random_seed(dist.get_rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(replica.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        inputs = torch.randn(32, 4)
        loss = (replica(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [weight.astype("float64").sum().item() for weight in model.get_weights()]
    report = {"rank": dist.get_rank(), "size": dist.get_world_size(), "losses": losses, "weights": weights}
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
