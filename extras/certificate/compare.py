"""Compares a replayed checkpoint with the claimed one."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.reading import read_record
from ringspark.estimators.training.checkpoint.record import Position, Record
from ringspark.estimators.training.checkpoint.shards import map_shards, name_files
from ringspark.estimators.training.checkpoint.snapshot import AVERAGE, OPTIMIZER, RANKS
from ringspark.estimators.training.checkpoint.weights import WEIGHTS
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import storage

# Kinds of files, in the order of the comparison.
_NAMES = {
    WEIGHTS: "other weights",
    OPTIMIZER: "another optimizer state",
    AVERAGE: "another average of the weights",
    RANKS: "other random generators, buffers or sums of the epoch",
}
# Times of a training, and how often it was resumed.
_TIMES = ("seconds", "epoch_seconds", "resumed_steps", "history")
Tensors = dict[str, torch.Tensor]

# The relative error of one fp32 number.
_ROUNDING = 2.0**-23


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a replayed checkpoint is from the claimed one.

    Attributes:
        text: Result of the replay in words, such as "other weights"; empty if it is equal.
        distance: Distance of the weights as a share of their change in the interval; 0 if they are equal.
    """

    text: str = ""
    distance: float = 0.0


def compare_bitwise(start: str, claimed: str, replayed: str, config: TrainConfig) -> Difference:
    """Compares every bit of weights, optimizer state, average and rank states in two checkpoint folders.

    States of the user's callbacks are left out, because they may hold times and folders.
    """
    left, right = read_record(claimed), read_record(replayed)
    files = [_plain_names(record) for record in (left, right)]
    for kind, words in _NAMES.items():
        found = [{n: d for n, d in own.items() if n.startswith(kind.partition(".")[0])} for own in files]
        if found[0] != found[1]:
            return Difference(text=words, distance=measure_distance(start, claimed, replayed))
    for name in ("optimizer", "optimizer_values", "optimizer_groups", "spreads", "num_parts"):
        if getattr(left, name) != getattr(right, name):
            return Difference(text=f"another {name.replace('_', ' ')}")
    for name in vars(left.position):
        if name not in _TIMES and getattr(left.position, name) != getattr(right.position, name):
            return Difference(text=f"another {name.replace('_', ' ')} of the position")
    if _describe_history(left.position) != _describe_history(right.position):
        return Difference(text="other losses or metrics in the history")
    for rank, values in enumerate(zip(left.ranks, right.ranks, strict=True)):
        claimed_rank, found_rank = (_describe_rank(each, config) for each in values)
        if claimed_rank != found_rank:
            return Difference(text=f"another state of rank {rank}: generators, patience or the best epoch")
    return Difference()


def compare_roughly(start: str, claimed: str, replayed: str, tolerance: float) -> Difference:
    """Compares two checkpoint folders within `tolerance`, a share of the change from `start` to `claimed`.

    Optimizer state, average and position count too, because they decide the weights of later checkpoints.
    """
    weights = _rate(measure_distance(start, claimed, replayed), tolerance)
    if weights.text:
        return weights
    for kind in (OPTIMIZER, AVERAGE):
        folders = [_read_tensors(uri, kind) for uri in (start, claimed, replayed)]
        for name, apart in _measure_groups(*folders).items():
            if not apart <= tolerance:
                text = f"{_NAMES[kind]}: {name!r} at a distance of {apart:.3g} of its change"
                return Difference(text=f"{text}, above {tolerance:g}", distance=apart)
    left, right = read_record(claimed), read_record(replayed)
    for name in ("optimizer", "optimizer_values", "optimizer_groups"):
        if not _is_near(getattr(left, name), getattr(right, name)):
            return Difference(text=f"another {name.replace('_', ' ')}", distance=weights.distance)
    for name in vars(left.position):
        values = (getattr(left.position, name), getattr(right.position, name))
        if name not in (*_TIMES, "scaler", "non_finite") and not _is_near(*values):
            text = f"another {name.replace('_', ' ')} of the position"
            return Difference(text=text, distance=weights.distance)
    return weights


def compare_weights(start: str, claimed: str, replayed: str, tolerance: float) -> Difference:
    """Compares the weights of two folders without an optimizer state, as `compare_roughly` does."""
    read = tensor_file.read
    tensors = [_read_tensors(start, WEIGHTS), *(read(storage.join(u, WEIGHTS)) for u in (claimed, replayed))]
    return _rate(_measure(*tensors), tolerance)


def _rate(distance: float, tolerance: float) -> Difference:
    text = f"weights at a distance of {distance:.3g} of their change, above {tolerance:g}"
    return Difference(text="" if distance <= tolerance else text, distance=distance)


def measure_distance(start: str, claimed: str, replayed: str) -> float:
    """Returns |replayed - claimed| / |claimed - start| over all weights, as 2-norms.

    The rounding of the weights themselves counts as no distance. Infinite if the weights do not fit.
    """
    return _measure(*(_read_tensors(uri, WEIGHTS) for uri in (start, claimed, replayed)))


def _measure(before: Tensors, left: Tensors, right: Tensors) -> float:
    if {n: t.shape for n, t in left.items()} != {n: t.shape for n, t in right.items()}:
        return float("inf")
    apart = change = size = 0.0
    for name, tensor in left.items():
        if tensor.is_floating_point():
            values = tensor.double()
            # A new optimizer has no state yet.
            first = before[name].double() if name in before else torch.zeros_like(values)
            apart += float((right[name].double() - values).square().sum())
            size += float(values.square().sum())
            change += float((values - first).square().sum())
        elif not torch.equal(tensor, right[name]):
            return float("inf")
    distance = max(0.0, apart**0.5 - _ROUNDING * size**0.5)
    if not math.isfinite(distance):
        return float("inf")
    return distance / change**0.5 if change else (float("inf") if distance else 0.0)


def _measure_groups(*folders: Tensors) -> dict[str, float]:
    """Returns the distance of each entry of the optimizer's state, such as 'exp_avg', over all weights."""
    names = {name.rpartition("/")[2] for folder in folders for name in folder}
    return {
        group: _measure(*({n: t for n, t in f.items() if n.rpartition("/")[2] == group} for f in folders))
        for group in sorted(names)
    }


def _is_near(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal, up to the rounding of numbers."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_near(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_is_near, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-6)
    return bool(left == right)


def draws_random_numbers(start: str, claimed: str) -> bool:
    """Whether a generator of rank 0 advanced between two checkpoints, as with dropout."""
    files = [tensor_file.read(storage.join(uri, RANKS)) for uri in (start, claimed)]
    states = [{n: t for n, t in tensors.items() if n.startswith("0/random/")} for tensors in files]
    return states[0].keys() != states[1].keys() or any(
        not torch.equal(tensor, states[1][name]) for name, tensor in states[0].items()
    )


def _plain_names(record: Record) -> dict[str, Any]:
    # The token in a shard's name is new in each training.
    return {
        re.sub(rf"\.{record.token}\.", ".", name) if record.token else name: found.sha256
        for name, found in record.files.items()
    }


def _describe_history(position: Position) -> str:
    # As JSON, because NaN does not equal itself.
    return json.dumps([drop_times(epoch) for epoch in position.history])


def drop_times(epoch: EpochRecord) -> dict[str, Any]:
    """Returns the entries of an epoch that another training gets again."""
    return {name: value for name, value in asdict(epoch).items() if name not in ("seconds", "cost")}


def _describe_rank(values: dict[str, Any], config: TrainConfig) -> str:
    # The callbacks of `keep` and `patience` come last.
    own = int(config.keep == "best") + int(config.patience is not None)
    callbacks = values.get("callbacks", [])
    found = values | {"callbacks": callbacks[len(callbacks) - own :]}
    if config.time_budget_seconds is not None:
        found.pop("stop_reason", None)  # a replay has its own time
    return json.dumps(found, sort_keys=True)


def _read_tensors(uri: str, kind: str) -> Tensors:
    """Returns the tensors of one kind of file in a checkpoint; empty if it has none."""
    record = read_record(uri)
    names = name_files(kind, record.num_parts, record.token)
    if not record.files.keys() & set(names):
        return {}
    paths = [storage.join(uri, name) for name in names]
    return dict(map_shards(paths, record.spreads.get(kind, {})))
