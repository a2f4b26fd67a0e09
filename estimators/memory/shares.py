"""Each rank's share of sharded state."""

from __future__ import annotations

from collections.abc import Mapping

from ringspark.estimators.training.settings.config import TrainConfig

# Sharding -> parts that it splits over the ranks (Rajbhandari et al. 2020, "ZeRO").
SHARDED_PARTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer_state",),
    "gradients": ("optimizer_state", "gradients"),
    "parameters": ("optimizer_state", "gradients", "parameters"),
}


def data_parallel_size(config: TrainConfig) -> int:
    """Returns the number of ranks that all-reduce the gradient of one parameter."""
    sizes = config.axes
    return sizes["data"] * sizes["shard"] * sizes["expert"] * sizes["sequence"]


def shard_group_size(config: TrainConfig) -> int:
    """Returns the number of ranks that split sharded state: axis `shard`, or all data-parallel ranks."""
    shard = config.axes["shard"]
    return shard if shard > 1 else data_parallel_size(config)


def shares(sharding: str, num_workers: int) -> Mapping[str, float]:
    """Returns the share of each part on one rank; a part without an entry is not split."""
    return dict.fromkeys(SHARDED_PARTS[sharding], 1.0 / num_workers)


def checkpoint_writers(config: TrainConfig) -> int:
    """Returns the number of ranks that together write one shard of the network to a checkpoint."""
    return 1 if config.cuts_network or config.sync.sharding == "none" else shard_group_size(config)
