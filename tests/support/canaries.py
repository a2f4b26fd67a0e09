"""Audits private trainings with canaries (Jagielski et al. 2020, "Auditing Differentially Private ML").

A coin decides whether a canary is among the rows; the attacker guesses it from the canary's own weight.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from private_shards import private_config
from scipy.stats import beta
from small_networks import Net
from small_training import weights_of
from torch import nn
from written_shards import written

from ringspark.estimators import Privacy
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.settings.config import UserObjects

CANARIES = 800
CONFIDENCE = 0.95


def network() -> nn.Module:
    """Returns a network that computes the weight of each row's canary."""
    # Not an index, whose gradient torch.func computes more slowly.
    parts = {"weights": nn.Parameter(torch.zeros(CANARIES))}
    return Net(lambda self, x: (nn.functional.one_hot(x, CANARIES) * self.weights).sum(-1), **parts)


def shout(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is clipped in every step."""
    return -1e6 * output + 0 * label


def attack(folder: Path, privacy: Privacy, trainings: int) -> tuple[np.ndarray, np.ndarray]:
    """Trains on random halves of the canaries; returns the weights of canaries inside and outside."""
    rng, inside, outside = np.random.default_rng(), [], []
    for number in range(trainings):
        is_member = rng.random(CANARIES) < 0.5
        x = np.flatnonzero(is_member)
        manifest = written(folder / f"shards-{number}", {"x": x, "y": np.zeros(len(x), "f4")})
        changes: Any = {"learning_rate": 1.0, "batch_size": len(x) // 4, "epochs": 10, "task": "any"}
        config = private_config(manifest, folder / f"run-{number}", privacy=privacy, **changes)
        objects = UserObjects(module=network(), losses=(shout,))
        weights = weights_of(train_here(config, objects), network()).numpy()
        inside.append(weights[is_member])
        outside.append(weights[~is_member])
    return np.concatenate(inside), np.concatenate(outside)


def bound_epsilon(inside: np.ndarray, outside: np.ndarray, delta: float) -> float:
    """Returns a lower bound of epsilon, by Clopper and Pearson, wrong in at most 1 of 20 audits.

    Half of the canaries choose the threshold of the guess, and the other half measure its errors.
    """
    values = np.unique(np.concatenate([inside[::2], outside[::2]]))
    chosen = max(values, key=lambda at: _bound(inside[::2], outside[::2], at, delta))
    return _bound(inside[1::2], outside[1::2], chosen, delta)


def _bound(inside: np.ndarray, outside: np.ndarray, threshold: float, delta: float) -> float:
    """Bounds epsilon by guesses of "inside" for weights of at least `threshold`, and the reverse."""
    hits, false = int((inside >= threshold).sum()), int((outside >= threshold).sum())
    found = []
    for good, bad, goods, bads in (
        (hits, false, len(inside), len(outside)),
        (len(outside) - false, len(inside) - hits, len(outside), len(inside)),
    ):
        # Two bounds of two guesses: each may be wrong in a quarter of the cases.
        error = (1 - CONFIDENCE) / 4
        low = float(beta.ppf(error, good, goods - good + 1)) if good else 0.0
        high = float(beta.ppf(1 - error, bad + 1, bads - bad)) if bad < bads else 1.0
        found.append(math.log((low - delta) / high) if low > delta else 0.0)
    return max(0.0, *found)
