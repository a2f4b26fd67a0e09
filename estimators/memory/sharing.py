"""Computes what one rank alone does not show: its share of sharded state, and communication buffers.

Adjust these formulas if a collective or a strategy changes what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.parallel.data.compressed_sum import compressed_parameters
from ringspark.estimators.parallel.data.gradient_buckets import deal
from ringspark.estimators.parallel.data.gradient_sum import FLAT_BYTES
from ringspark.estimators.parallel.sharded.fully_sharded import blocks_of
from ringspark.estimators.parallel.sharded.shard_layout import BUCKET_BYTES
from ringspark.estimators.training.settings.config import TrainConfig

# Which parts each way of sharding splits over the ranks (Rajbhandari et al. 2020, "ZeRO").
SHARDED_PARTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer_state",),
    "gradients": ("optimizer_state", "gradients"),
    "parameters": ("optimizer_state", "gradients", "parameters"),
}


def num_summing(config: TrainConfig) -> int:
    """Returns how many ranks sum the gradients of one parameter."""
    sizes = config.axes
    return sizes["data"] * sizes["shard"] * sizes["expert"] * sizes["sequence"]


def num_sharers(config: TrainConfig) -> int:
    """Returns over how many ranks a sharding cuts: those of the axis `shard`, or all that sum gradients."""
    shard = config.axes["shard"]
    return shard if shard > 1 else num_summing(config)


def shares(sharding: str, num_workers: int) -> Mapping[str, float]:
    """Returns the share of each part on one rank; a rank holds all of a part without an entry."""
    return dict.fromkeys(SHARDED_PARTS[sharding], 1.0 / num_workers)


def bucket_bytes(config: TrainConfig, module: nn.Module) -> int:
    """Returns the most bytes of gradients that live at a time while buckets of them leave; 0 if all do.

    Args:
        module: Like that of `communication_bytes`.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    whole = config.sharding == "none" and num_summing(config) > 1 and config.axes["pipeline"] == 1
    if not whole or config.gradient_accumulation > 1 or num_bytes(trained.values()) <= FLAT_BYTES:
        return 0
    return max(num_bytes(bucket.values()) for bucket in deal(trained, BUCKET_BYTES))


def communication_bytes(config: TrainConfig, module: nn.Module) -> int:
    """Returns the bytes of buffers that stay allocated between the ranks' exchanges.

    Args:
        module: Any copy of the network, also one on `meta`: only sizes count.
    """
    if num_summing(config) == 1:
        return 0
    # Ranks of one host share 2 MiB for each of them, which is not counted.
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients = num_bytes(trained.values())
    if config.sharding == "parameters":
        # FSDP2 gathers the running block and the next one; parameters in no block stay for the whole step.
        units = blocks_of(module)
        inside = {parameter for unit in units for parameter in unit.parameters()}
        rest = num_bytes(p for p in module.parameters() if p not in inside)
        return rest + 2 * max([num_bytes(unit.parameters()) for unit in units], default=0)
    if config.sharding != "none":
        # One bucket is filled while the previous one is being sent.
        return min(2 * BUCKET_BYTES, 2 * gradients)
    compressed = 0
    if config.gradient_compression["name"] != "none":
        large = compressed_parameters(trained, config.gradient_compression)
        # What is sent next, and what is left of what was sent before.
        compressed = 2 * num_bytes(large.values())
        trained = {name: p for name, p in trained.items() if name not in large}
        gradients = 0  # the others travel in one message a dtype
    buckets = deal(trained, None if gradients <= FLAT_BYTES else BUCKET_BYTES)
    # Every gradient has a place in a bucket, with a number that says how many ranks had it.
    sizes = [sum(num_bytes([p]) + p.element_size() for p in bucket.values()) for bucket in buckets]
    return compressed + sum(sizes)
