"""Networks, optimizers and schedules of a user, pickled by value, so this file holds nothing else."""

from typing import Any

import torch
from torch import nn

from ringspark.estimators import Callback, TrainingState


class Bag(nn.Module):
    """The mean of embeddings, and a linear head; reads ragged or sparse columns."""

    def __init__(self, num_ids: int, mode: str, is_sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(num_ids, 8, mode=mode, sparse=is_sparse)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, ids: torch.Tensor, starts: torch.Tensor, values: Any = None) -> torch.Tensor:
        return self.head(self.table(ids, starts, per_sample_weights=values))


class CountSteps(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_step_end(self, state: TrainingState) -> None:
        if state.rank == 0:
            with open(self.path, "a") as file:
                file.write(f"{state.step}\n")


def penalize_slopes(module: Any, inputs: Any, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns cross entropy, and a gradient penalty if an input has a row of numbers."""
    rows = nn.functional.cross_entropy(outputs, labels.reshape(-1).long(), reduction="none")
    numbers = [values for values in inputs if values.requires_grad and values.dim() > 1]
    if not numbers:
        return rows + 0.01 * outputs.square().sum(1)
    # A mask is a number, too, but the outputs have no gradient for it.
    slopes = torch.autograd.grad(outputs[:, 0].sum(), numbers, create_graph=True, allow_unused=True)
    return rows + 0.01 * sum(slope.flatten(1).square().sum(1) for slope in slopes if slope is not None)


def halve(step: int, num_steps: int) -> float:
    return 1.0 if step < num_steps // 2 else 0.5


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def own_elementwise(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.8, nesterov=True)


def classify(step: Any) -> None:
    """A training step: the loss of TorchClassifier."""
    outputs = step.module(*step.inputs).float()
    losses = nn.functional.cross_entropy(outputs, step.labels[0].long(), reduction="none")
    step.minimize(step.mean(losses))


class OwnWhole(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norm = parameter.grad.norm().clamp(min=0.1)
                    parameter.sub_(parameter.grad / norm, alpha=group["lr"])


def own_whole(parameters: Any) -> torch.optim.Optimizer:
    return OwnWhole(parameters, lr=0.05)
