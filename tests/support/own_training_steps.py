"""Training steps of a user and their networks, pickled by value, so this file holds nothing else."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Gan(nn.Module):
    """Two small networks; `forward` generates rows from noise."""

    def __init__(self, noise: int = 4, width: int = 16) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(noise, width), nn.Tanh(), nn.Linear(width, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
        self.noise = noise

    def forward(self, noise: torch.Tensor) -> Any:
        return self.generator(noise)


def gan_optimizers(module: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "generator": torch.optim.Adam(module.generator.parameters(), lr=0.003, betas=(0.5, 0.9)),
        "discriminator": torch.optim.SGD(module.discriminator.parameters(), lr=0.05, momentum=0.5),
    }


def gan_step(step: Any) -> None:
    """Steps the discriminator, then the generator; the label is the real row."""
    (real,) = step.labels
    gan = step.module
    fake = gan.generator(step.randn(gan.noise))
    on_real, on_fake = gan.discriminator(real)[:, 0], gan.discriminator(fake.detach())[:, 0]
    step.minimize(step.mean(F.softplus(-on_real) + F.softplus(on_fake)), "discriminator")
    on_fake = gan.discriminator(fake)[:, 0]
    step.minimize(step.mean(F.softplus(-on_fake)), "generator")
    step.log("fooled", (on_fake > 0).float())


class Encoder(nn.Module):
    def __init__(self, width: int = 4, dim: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, dim))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def contrastive_step(step: Any) -> None:
    from ringspark.extras.training_steps.losses import nt_xent

    (x,) = step.inputs
    views = [step.module(x + 0.1 * step.randn(x.shape[1])) for _ in range(2)]
    step.minimize(step.mean(nt_xent(step, *views)))


def triplet_step(step: Any) -> None:
    from ringspark.extras.training_steps.losses import hard_triplet, info_nce

    (x,), (label,) = step.inputs, step.labels
    z = step.module(x)
    step.minimize(step.mean(hard_triplet(step, z, label) + info_nce(step, z, step.module(x + 0.1), 0.2)))


def ordinary_step(step: Any) -> None:
    """Computes the loss 'mse', as the trainer does without trainingStep."""
    outputs = step.module(*step.inputs).float()[:, 0]
    step.minimize(step.mean((outputs - step.labels[0]).square()))
