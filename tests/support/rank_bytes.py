"""What one rank of a mesh holds of a training: counted from its tensors, and by arithmetic.

The network is the product's `mlp` with equal layers: layers of W x W numbers, of which a mesh cuts whole ones
or halves, so that what a rank should hold can be said in one line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from held_bytes import held_bytes
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training import worker
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

KINDS = ("parameters", "gradients", "optimizer", "activations")
AXES = ("data", "shard", "tensor", "pipeline")
# What each level of sharding cuts.
CUT = {
    "none": (),
    "optimizer": ("optimizer",),
    "gradients": ("optimizer", "gradients"),
    "parameters": ("optimizer", "gradients", "parameters"),
}


def spec_of(layers: int, width: int) -> ModelSpec:
    """`layers` hidden ones and the head, all of width x width."""
    sizes = {"in_features": width, "hidden": [width] * layers, "out_features": width}
    return ModelSpec("mlp", {**sizes, "activation": "tanh"})


def columns(rows: int, width: int) -> dict[str, np.ndarray]:
    """Inputs `x` and labels `y`."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(rows, width)).astype(np.float32) for name in ("x", "y")}


def config_of(
    manifest: ShardManifest, folder: Path, layers: int, width: int, rows: int, **changes: Any
) -> TrainConfig:
    """One epoch of AdamW over all rows, `rows` a step."""
    config = TrainConfig(
        shards_uri=manifest.uri,
        run_uri=str(folder),
        model=spec_of(layers, width).to_json(),
        task="any",
        losses=("mse",),
        input_columns=("x",),
        label_columns=("y",),
        batch_size=rows,
        epochs=1,
        optimizer="adamw",
        learning_rate=1e-4,
        collective="torch",
        reader="arrow",
    )
    return replace(config, **changes)


def expected_bytes(config: TrainConfig, layers: int, width: int) -> dict[str, float]:
    """What theory gives the rank that holds most, by kind; biases, 1/width of all, are left out.

    Activations are what waits for the backward pass: each layer's input, and for the loss the outputs and
    labels, fp32. A pair of matrices that `tensor` cuts keeps what is between them in parts. The first stage
    of p holds p micro-batches (1F1B), and of one of them what it passes on in place of a loss.
    """
    sizes = config.axes
    weights = (layers + 1) * width * width * 4 / (sizes["tensor"] * sizes["pipeline"])
    sharers = sizes["shard"] if sizes["shard"] > 1 else sizes["data"]
    found: dict[str, float] = {"parameters": weights, "gradients": weights, "optimizer": 2 * weights}
    for kind in CUT[config.sharding]:
        found[kind] /= sharers
    micro = config.gradient_accumulation
    rows = config.batch_size / (sizes["data"] * sizes["shard"]) / micro
    values = (layers + 1) / sizes["pipeline"] * (1 + 1 / sizes["tensor"]) / 2
    values = values * min(sizes["pipeline"], micro) + 1 if sizes["pipeline"] > 1 else values + 2
    found["activations"] = rows * width * 4 * values
    return found


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that wait for backward passes, each memory once, without parameters."""

    def __init__(self) -> None:
        super().__init__(self._pack, _unpack)
        self.most = 0
        self._live: dict[int, list[int]] = {}

    def _pack(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        return _Kept(tensor, self)

    def add(self, tensor: torch.Tensor, sign: int) -> None:
        """Notes one more use of a tensor's memory, or one less."""
        # Rows of a batch may lie in a longer memory of the reader's, which is none of the step's.
        address = tensor.untyped_storage().data_ptr()
        entry = self._live.setdefault(address, [0, 0])
        entry[0] += sign
        entry[1] = max(entry[1], tensor.nbytes)
        if not entry[0]:
            del self._live[address]
        self.most = max(self.most, sum(size for _, size in self._live.values()))


class _Kept:
    def __init__(self, tensor: torch.Tensor, counter: SavedBytes) -> None:
        self.tensor, self._counter = tensor, counter
        counter.add(tensor, 1)

    def __del__(self) -> None:
        self._counter.add(self.tensor, -1)


def _unpack(kept: Any) -> Any:
    return kept.tensor if isinstance(kept, _Kept) else kept


def _counting(config: TrainConfig, collective: Collective, device: str, status: Status) -> str:
    """Trains; returns the most bytes of each kind when the backward passes of a step are over."""
    found = dict.fromkeys(KINDS, 0)
    tied = worker._tied

    def watched(*arguments: Any) -> Any:
        sync = tied(*arguments)
        reduce = sync.reduce

        def counted(*given: Any) -> None:
            for kind, count in held_bytes(sync).items():
                found[kind] = max(found[kind], count)
            reduce(*given)

        sync.reduce = counted  # type: ignore[method-assign]
        return sync

    worker._tied = watched
    saved = SavedBytes()
    with saved:
        worker.train_worker(config, collective, None, device, status)
    found["activations"] = saved.most
    return json.dumps(found)


def counted_bytes(config: TrainConfig) -> list[dict[str, int]]:
    """What each rank of a training holds, by kind."""
    work = partial(_counting, config)
    texts = run_spawned(config.num_workers, config.collective, work, timeout_seconds=300)
    return [json.loads(text) for text in texts]
