"""The driver refuses a mesh whose results differ from the unsharded network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_networks import Net
from small_training import columns_of, config_of, over
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.extras.experts.layer import MixtureOfExperts
from ringspark.models import ModelSpec
from ringspark.models.chain import Link

WIDTH = 8


def last(*values: Any) -> Any:
    return values[-1]


class Pair(nn.Module):
    """Two layers: the first is sharded by its outputs, the second by its inputs."""

    def __init__(self, between: Any = last, after: Any = last, scale: Any = None) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, 1)
        self.between, self.after, self.scale = between, after, scale

    def tensor_plan(self, ranks: int) -> dict[str, str]:
        return {"up": "column", "down": "row"}

    def links(self) -> list[Link]:
        return [Link("up", self.up, ("up",)), Link("down", self._end, ("norm", "down"))]

    def _end(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.between(self, x))
        out: torch.Tensor = self.down(x) + self.norm.weight.sum() + self.norm.bias.sum()
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self, self._end(self.up(x)))  # type: ignore[no-any-return]


def noisy(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    dropped = F.dropout(x, 0.5, self.training)
    return dropped + torch.randn_like(x) if self.training else dropped


# Networks with features that each rank has only some of, weights that are read directly, a scalar of whose
# gradient each rank has only a share, an operation that is missing in links(), and no batch without rows.
MIXING = Pair(lambda self, x: torch.softmax(x, -1))
FAST = Pair(after=lambda self, x: x if self.training else x + self.up.weight.sum())
SCALED = Pair(lambda self, x: x * self.scale, scale=nn.Parameter(torch.ones(())))
SKIPPING = Pair(after=lambda self, x: x * 1.1)
FLAT = Net(
    lambda self, x: self.head(self.mixture(x.view(-1, 2, 4)).view(x.shape[0], -1)),
    mixture=MixtureOfExperts(4, 8, num_experts=2),
    head=nn.Linear(WIDTH, 1),
)
# Draws random numbers that a `TorchDispatchMode` does not see.
CHAOTIC = Pair(lambda self, x: x * (1 + np.random.random() if self.training else 1))


@pytest.fixture
def check(make_shards: Any, tmp_path: Path) -> Callable[[Any, dict[str, Any]], None]:
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
        (MIXING, {"tensor": 2}, "Pair under .* evaluation mode, output 0 is off by .*leave 'tensor' out"),
        (FAST, {"tensor": 2}, "in evaluation mode, output 0 is off by"),
        (SCALED, {"tensor": 2}, "in training mode, the gradient of 'scale' is off by"),
        (SKIPPING, {"pipeline": 2}, "in evaluation mode, output 0 is off by .* links"),
        # A short last batch may have fewer rows than workers.
        (FLAT, {"expert": 2}, "Net cannot take a batch without rows .*cannot reshape.*x.flatten"),
    ],
    ids=["mixing", "fast", "scaled", "skipping", "flat"],
)
def test_a_network_that_a_mesh_changes_is_refused(check: Any, network: Any, mesh: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(network, mesh)


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
        (Pair(noisy), {"tensor": 2}),
        (CHAOTIC, {"pipeline": 2}),
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
