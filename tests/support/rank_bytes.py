"""Memory of one rank of a mesh: counted from tensors, computed, and measured under a limit."""

import ctypes
import re
import resource
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import small_training
import torch
from held_bytes import held_bytes
from peak_memory import memory_use
from ranks import run_ranks
from torch import nn

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import Collective
from ringspark.estimators.training import rank_network, worker
from ringspark.estimators.training.checkpoint import resume
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

KINDS = ("parameters", "gradients", "optimizer", "activations")
AXES = ("data", "shard", "tensor", "pipeline")
# The states that each level of sharding splits.
CUT = {
    "none": (),
    "optimizer": ("optimizer",),
    "gradients": ("optimizer", "gradients"),
    "parameters": ("optimizer", "gradients", "parameters"),
}


def spec_of(layers: int, width: int) -> ModelSpec:
    sizes = {"in_features": width, "hidden": [width] * layers, "out_features": width}
    return ModelSpec("mlp", {**sizes, "activation": "tanh"})


def columns(rows: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(rows, width)).astype(np.float32) for name in ("x", "y")}


def config_of(
    manifest: ShardManifest, folder: Path, layers: int, width: int, rows: int, **changes: Any
) -> TrainConfig:
    given = {"model": spec_of(layers, width), "task": "any", "batch_size": rows, "epochs": 1}
    given |= {"optimizer": "adamw", "learning_rate": 1e-4, "collective": "torch"}
    return small_training.config_of(manifest, folder, **given | changes)


def expected_bytes(config: TrainConfig, layers: int, width: int) -> dict[str, float]:
    """Returns the expected bytes on the largest rank, by kind, without biases (1/width of the total).

    Activations wait for the backward pass: each layer's input, and for the loss the outputs and labels, in
    fp32. Between two tensor-parallel matrices they are sharded. With 1F1B the first of p stages holds p
    micro-batches; for one of them it also holds its output, because it computes no loss.
    """
    sizes = config.axes
    weights = (layers + 1) * width * width * 4 / (sizes["tensor"] * sizes["pipeline"])
    sharers = sizes["shard"] if sizes["shard"] > 1 else sizes["data"]
    found: dict[str, float] = {"parameters": weights, "gradients": weights, "optimizer": 2 * weights}
    for kind in CUT[config.sync.sharding]:
        found[kind] /= sharers
    micro = config.gradient_accumulation
    rows = config.batch_size / (sizes["data"] * sizes["shard"]) / micro
    values = (layers + 1) / sizes["pipeline"] * (1 + 1 / sizes["tensor"]) / 2
    values = values * min(sizes["pipeline"], micro) + 1 if sizes["pipeline"] > 1 else values + 2
    found["activations"] = rows * width * 4 * values
    return found


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes saved for backward passes: each storage once, without parameters."""

    def __init__(self) -> None:
        super().__init__(self._pack, _unpack)
        self.most = 0
        self._live: dict[int, list[int]] = {}

    def _pack(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        return _Kept(tensor, self)

    def add(self, tensor: torch.Tensor, sign: int) -> None:
        """Adds one use of a tensor's storage, or removes one."""
        # A batch may be a view of a larger block of the reader, which does not belong to the step.
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


def _counting(config: TrainConfig, collective: Collective) -> dict[str, int]:
    """Trains; returns the peak bytes of each kind at the end of a step's backward passes."""
    found = dict.fromkeys(KINDS, 0)
    wrap = rank_network.wrap_network

    def watched(*arguments: Any) -> Any:
        sync = wrap(*arguments)
        reduce = sync.reduce

        def counted(*given: Any) -> None:
            for kind, count in held_bytes(sync).items():
                found[kind] = max(found[kind], count)
            reduce(*given)

        sync.reduce = counted
        return sync

    rank_network.wrap_network = watched
    saved = SavedBytes()
    with saved:
        worker.train_worker(config, collective)
    found["activations"] = saved.most
    return found


def counted_bytes(config: TrainConfig) -> list[dict[str, int]]:
    work = partial(_counting, config)
    return run_ranks(config.num_workers, config.collective, work, timeout_seconds=300)


def _copying(config: TrainConfig, collective: Collective) -> dict[str, int]:
    """Trains; returns the most bytes that a copy for a checkpoint keeps, its peak, and the training state."""
    found = {"kept": 0, "peak": 0, "training": 0}
    take = resume.take_snapshot

    def counted(*arguments: Any) -> Any:
        taken: list[Any] = []
        use = memory_use(lambda: taken.append(take(*arguments)))
        found["kept"], found["peak"] = max(found["kept"], use.kept), max(found["peak"], use.peak)
        sync = arguments[0]
        found["training"] = max(found["training"], sum(held_bytes(sync).values()))
        return taken.pop()

    resume.take_snapshot = counted
    worker.train_worker(config, collective)
    return found


def copied_bytes(config: TrainConfig) -> list[dict[str, int]]:
    return run_ranks(config.num_workers, config.collective, partial(_copying, config), timeout_seconds=300)


def data_bytes() -> int:
    """Returns the bytes of private writable memory, which RLIMIT_DATA limits."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def keep_tensors_apart() -> None:
    """Gives each tensor of 1 MiB or more its own mapping, like the variable MALLOC_MMAP_THRESHOLD_.

    Otherwise, after the first free, the C library places tensors of up to 32 MiB next to each other and
    cannot return gaps: 16 MiB matrices then take up to four times their size. Arrow's own allocator reserves
    1 GiB of addresses, which the limit counts, so Arrow uses the system's allocator here.
    """
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())


def _limited(config: TrainConfig, most: int, collective: Collective) -> dict[str, Any]:
    """Trains in a process that may allocate at most `most` more bytes than now."""
    torch.set_num_threads(1)
    keep_tensors_apart()
    before = data_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (before + most, hard))
    result = worker.train_worker(config, collective)
    return {"steps": result.steps, "weights": result.checkpoint_uri}


def trained_within(config: TrainConfig, most: int) -> Mapping[str, Any]:
    """Trains on ranks with at most `most` bytes each; returns the steps and the folder of the weights.

    Raises:
        WorkerError: A rank needed more.
    """
    work = partial(_limited, config, most)
    return run_ranks(config.num_workers, config.collective, work, timeout_seconds=600)[0]


def is_of_the_limit(error: WorkerError) -> bool:
    """Returns whether a rank ended because it could not get memory."""
    return re.search(r"can't allocate memory|MemoryError|Cannot allocate|bad_alloc", str(error)) is not None
