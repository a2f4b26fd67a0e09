"""Data, networks and settings of the tests of private training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_networks import Net
from small_training import config_of, train_gang
from torch import nn

from ringspark.estimators import Privacy
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.pipelines import ShardManifest

ROWS, WIDTH = 240, 6
MakeConfig = Callable[..., TrainConfig]


def columns(rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, WIDTH)).astype("f4")
    return {"x": x, "y": (x[:, 0] - x[:, 1]).astype("f4"), "w": rng.integers(1, 4, rows).astype("f4")}


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def privacy(**changes: Any) -> Privacy:
    given: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 0.5, **changes}
    return Privacy(**given)


def private_config(manifest: ShardManifest, run_uri: Path, **changes: Any) -> TrainConfig:
    given = {"privacy": privacy(), "optimizer": "sgd", "learning_rate": 0.1, **changes}
    return config_of(manifest, run_uri, **given)


def objects(**changes: Any) -> UserObjects:
    return UserObjects(**{"module": network(), **changes})


def still() -> nn.Module:
    """Returns a network whose gradient is 0, so that only noise moves its weights."""
    return Net(lambda self, x: x[:, 0] + 0 * self.weights.sum(), weights=nn.Parameter(torch.zeros(500)))


class Moves(Callback):
    """Records the change of the weights in every step, on rank 0."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._last: torch.Tensor | None = None
        self._moves: list[torch.Tensor] = []

    def on_train_start(self, state: TrainingState) -> None:
        self._last = state.module.weights.detach().clone()

    def on_step_end(self, state: TrainingState) -> None:
        now = state.module.weights.detach().clone()
        self._moves.append(now - self._last)
        self._last = now

    def on_train_end(self, state: TrainingState) -> None:
        if state.rank == 0:
            torch.save(torch.stack(self._moves), self._path)


def noise_of_steps(
    manifest: ShardManifest, folder: Path, noisy: Privacy, workers: int, collective: str
) -> torch.Tensor:
    """Returns the noise on the summed gradient in each of 80 steps, (80, 500)."""
    path = folder / "moves.pt"
    settings = {"privacy": noisy, "learning_rate": 1.0, "epochs": 10, "num_workers": workers}
    config = private_config(manifest, folder / "run", collective=collective, **settings)
    given = objects(module=still(), callbacks=(Moves(str(path)),))
    (train_gang if workers > 1 else train_here)(config, given)
    moves: torch.Tensor = torch.load(path)
    return moves * config.batch_size
