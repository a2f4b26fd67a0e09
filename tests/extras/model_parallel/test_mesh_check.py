"""The driver refuses a mesh whose results differ from the unsharded network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import columns_of, config_of, over
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.extras.experts.layer import MixtureOfExperts
from ringspark.models import ModelSpec
from ringspark.models.chain import Link

WIDTH = 8


class Pair(nn.Module):
    """Two layers: the first is sharded by its outputs, the second by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, 1)

    def tensor_plan(self, ranks: int) -> dict[str, str]:
        return {"up": "column", "down": "row"}

    def links(self) -> list[Link]:
        return [Link("up", self.up, ("up",)), Link("down", self._end, ("norm", "down"))]

    def _end(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(x)) + self.norm.weight.sum() + self.norm.bias.sum()
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._end(self.up(x))


class Mixing(Pair):
    """Mixes features although each rank has only some of them."""

    def _end(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.softmax(x, -1)) + self.norm.weight.sum() + self.norm.bias.sum()
        return out


class Fast(Pair):
    """Reads the weights of a layer directly, in evaluation mode only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return super().forward(x)
        return self._end(self.up(x)) + self.up.weight.sum()


class Scaled(Pair):
    """Trains a scalar between the two layers; each rank has only a share of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def _end(self, x: torch.Tensor) -> torch.Tensor:
        return super()._end(x * self.scale)


class Skipping(Pair):
    """Leaves the last operation of forward out of links()."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.1


class Flat(nn.Module):
    """A mixture of experts over the values of a row; it cannot take a batch without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = MixtureOfExperts(4, 8, num_experts=2)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.mixture(x.view(-1, 2, 4)).view(x.shape[0], -1))
        return out


class Noisy(Pair):
    """Draws random numbers in training, in the shape of the rank's tensors."""

    def _end(self, x: torch.Tensor) -> torch.Tensor:
        dropped = F.dropout(x, 0.5, self.training)
        return super()._end(dropped + torch.randn_like(x) if self.training else dropped)


class Chaotic(Pair):
    """Draws random numbers that a `TorchDispatchMode` does not see."""

    def _end(self, x: torch.Tensor) -> torch.Tensor:
        return super()._end(x * (1 + np.random.random() if self.training else 1))


@pytest.fixture
def check(make_shards: Any, tmp_path: Path) -> Callable[[Any, dict[str, Any]], None]:
    """Returns a function that checks a training of a network over a mesh; texts are for transformers."""
    rng = np.random.default_rng(0)
    manifest = make_shards(columns_of(64, WIDTH) | {"ids": rng.integers(0, 11, size=(64, 6))})

    def check(model: nn.Module | ModelSpec, mesh: dict[str, Any]) -> None:
        spec = model if isinstance(model, ModelSpec) else None
        given = {} if spec is None else {"model": spec}
        given |= {**over(mesh), "collective": "torch"}
        given |= {"gradient_accumulation": 2 if "pipeline" in mesh else 1}
        given |= {"input_columns": ("ids" if spec and spec.target != "mlp" else "x",)}
        config = config_of(manifest, tmp_path, **given)
        check_training(config, UserObjects(module=None if spec else model), manifest)

    return check


@pytest.mark.parametrize(
    ("network", "mesh", "message"),
    [
        (Mixing, {"tensor": 2}, "Mixing under .* evaluation mode, output 0 is off by .*leave 'tensor' out"),
        (Fast, {"tensor": 2}, "in evaluation mode, output 0 is off by"),
        (Scaled, {"tensor": 2}, "in training mode, the gradient of 'scale' is off by"),
        (Skipping, {"pipeline": 2}, "in evaluation mode, output 0 is off by .* links"),
        # A short last batch may have fewer rows than workers.
        (Flat, {"expert": 2}, "Flat cannot take a batch without rows .*cannot reshape.*x.flatten"),
    ],
    ids=["mixing", "fast", "scaled", "skipping", "flat"],
)
def test_a_network_that_a_mesh_changes_is_refused(check: Any, network: Any, mesh: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(network(), mesh)


_TRANSFORMER = {"vocab_size": 11, "max_seq_len": 6, "dim": 8, "depth": 4, "num_heads": 2, "out_features": 1}
MLP = ModelSpec("mlp", {"in_features": WIDTH, "hidden": [16] * 5, "out_features": 1, "norm": "batch"})
TRANSFORMER = ModelSpec("transformer_classifier", {**_TRANSFORMER, "padding_id": 0, "dropout": 0.1})
_EXPERTS = {"num_experts": 3, "router": "gshard", "balance_weight": 0.5}
MIXTURE = ModelSpec("transformer_classifier", {**_TRANSFORMER, "experts": _EXPERTS})


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (Pair(), {"tensor": 2}),
        (Pair(), {"pipeline": 2}),
        (Noisy(), {"tensor": 2}),
        (Chaotic(), {"pipeline": 2}),
        (MLP, {"tensor": 2, "pipeline": 2}),
        (MLP, {"tensor": 4, "plan": {"*linear": ["grid", [2, 2]], "head": ["grid", [1, 4]]}}),
        *(
            (MLP, {"pipeline": {"stages": 2, "schedule": name}})
            for name in ("gpipe", "zero_bubble", "pipedream", "2bw")
        ),
        *((MLP, {"pipeline": {"stages": 2, "schedule": s, "virtual": 2}}) for s in ("interleaved", "zbv")),
        (TRANSFORMER, {"data": 2, "tensor": 2, "sequence_parallel": True}),
        (TRANSFORMER, {"sequence": 2}),
        (MIXTURE, {"expert": 2}),
        (MIXTURE, {"pipeline": 2, "expert": 2}),
        (MIXTURE, {"sequence": 2, "tensor": 2}),
    ],
    ids=lambda value: value.target if isinstance(value, ModelSpec) else str(value),
)
def test_a_network_that_a_mesh_computes_alike_is_taken(check: Any, model: Any, mesh: dict[str, Any]) -> None:
    check(model, mesh)
