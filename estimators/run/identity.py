"""Settings, data and model that a resumed run must share with its start, as small JSON."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ringspark.estimators.options.declare import Options
from ringspark.estimators.options.sync import AllReduce, Sync, Zero
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.columns import Column

FORMAT_VERSION = 2

# Config fields that may differ between the starts of one run.
_FREE = {"shards_uri", "run_uri", "own_metrics", "pause_after", "pause_after_step"} | {
    s.field for s in SETTINGS.values() if s.may_differ_on_resume
}
# Names of settings that a resume may change; the run records the change.
_RECORDED = {s.name for s in SETTINGS.values() if s.recorded_on_resume}
_NAMES = {setting.field: setting.name for setting in SETTINGS.values() if setting.field} | {
    "output_widths": "the model's outputs",
    "initial_weights": "initialModel",
    "initial_training_state": "initialState",
}
# Settings whose callables `UserObjects` has.
_SPLIT = [setting for setting in SETTINGS.values() if setting.split is not None]
_RELATIVE_TOLERANCE = 1e-6


def identity_of(config: TrainConfig, objects: UserObjects, manifest: ShardManifest) -> dict[str, Any]:
    """Returns the settings and data that identify a run: name of the Param -> JSON value."""
    settings = {
        _NAMES.get(f.name, f.name): getattr(config, f.name)
        for f in fields(config)
        if f.name not in _FREE and f.name != "model"
    }
    losses = [objects.loss(config, index) for index in range(len(config.label_columns))]
    functions = {f"{s.name} function": getattr(objects, s.field) for s in _SPLIT} | {
        "transformBatch": objects.transform_batch,
        "transformInPrediction": objects.transform_in_prediction,
    }
    settings |= {name: given if given is None else _settings_of(given) for name, given in functions.items()}
    settings |= {
        "loss": [loss if isinstance(loss, str) else _settings_of(loss) for loss in losses],
        # By name alone: their attributes may be folders, counters, or when to stop.
        "callbacks": [_name(callback) for callback in objects.callbacks],
        "own metrics": {name: _describe(given, tensors=False) for name, given in objects.metrics.items()},
    }
    identity = {"settings": settings, "data": _data_of(manifest), "model": _model_of(config, objects)}
    # In the form that is read back later: tuples are lists.
    found: dict[str, Any] = json.loads(json.dumps(identity, default=_plain))
    return found


def list_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns the changes between two identities, one entry each: `name: old -> new`."""
    found = []
    for part in ("settings", "data", "model"):
        before, now = old.get(part, {}), new.get(part, {})
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                found.append(f"{name}: {_short(before.get(name))} -> {_short(now.get(name))}")
    return found


def split_changes(
    old: dict[str, Any], new: dict[str, Any]
) -> tuple[dict[str, tuple[Any, Any]], dict[str, Any]]:
    """Returns the changes that a run may record, setting -> (before, now), and `old` with these changes."""
    before, now = old.get("settings", {}), new.get("settings", {})
    found = {
        name: (before[name], now[name])
        for name in sorted(_RECORDED & before.keys() & now.keys())
        if before[name] != now[name] and (name != "sync" or _only_shards(before[name], now[name]))
    }
    return found, old | {"settings": before | {name: change[1] for name, change in found.items()}}


def _only_shards(*syncs: Any) -> bool:
    """Returns whether values of `sync` differ only in sharding, so that they can use the same checkpoint."""
    made = [Sync.of(sync) for sync in syncs]
    return all(isinstance(sync, AllReduce | Zero) and sync.compressed is None for sync in made)


def _plain(value: Any) -> Any:
    return value.to_values() if isinstance(value, Options) else repr(value)


def list_data_differences(old: ShardManifest, new: ShardManifest) -> list[str]:
    """Returns the differences between the columns and statistics of two sets of shards."""
    found = []
    columns = [[f"{column.name}: {column.kind}" for column in manifest.columns] for manifest in (old, new)]
    if columns[0] != columns[1]:
        return [f"columns: {_short(columns[0])} -> {_short(columns[1])}"]
    for split in ("train", "validation"):
        rows = [manifest.select(split).num_rows for manifest in (old, new)]
        if rows[0] != rows[1]:
            found.append(f"{split} rows: {rows[0]} -> {rows[1]}")
    if found := found or _kind_differences(old.columns, new.columns):
        return found
    for split in sorted(old.stats.keys() & new.stats.keys()):
        for name in sorted(old.stats[split].keys() & new.stats[split].keys()):
            before, now = (vars(m.stats[split][name]) for m in (old, new))
            size = max(abs(before[key] or 0) for key in ("minimum", "maximum"))
            # Rounding errors grow with the size of the summands; the order of the rows changes nothing else.
            rounded = {"mean": size, "deviations": size * size * before["values"]}
            for key in sorted(before.keys() | now.keys()):
                if not _equal(before.get(key), now.get(key), rounded.get(key, 0.0)):
                    found.append(
                        f"{key} of column {name!r}: {_short(before.get(key))} -> {_short(now.get(key))}"
                    )
    return found


def _kind_differences(old: Sequence[Column], new: Sequence[Column]) -> list[str]:
    # The text of a column type does not show all settings, such as padding values.
    found = []
    for before, now in zip(old, new, strict=True):
        known, given = before.kind.to_json(), now.kind.to_json()
        for key in sorted(known.keys() | given.keys()):
            was, is_now = json.dumps(known.get(key)), json.dumps(given.get(key))
            # Compare the texts first, because NaN does not equal itself.
            if was != is_now and json.loads(was) != json.loads(is_now):
                found.append(f"{key} of column {before.name!r}: {_short_text(was)} -> {_short_text(is_now)}")
    return found


def _data_of(manifest: ShardManifest) -> dict[str, Any]:
    files = [
        [f.path.rpartition("/")[2], f.split, f.sha256 or f.state, list(f.row_groups)] for f in manifest.files
    ]
    return {
        "columns": [f"{column.name}: {column.kind}" for column in manifest.columns],
        "train rows": manifest.select("train").num_rows,
        "validation rows": manifest.select("validation").num_rows,
        # The order of files and row groups decides the order of the rows.
        "content of the shards": hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16],
    }


def _model_of(config: TrainConfig, objects: UserObjects) -> dict[str, Any]:
    if config.model is not None:
        return {"model": json.loads(config.model)}
    module = objects.module
    digest = hashlib.sha256()
    shapes = {}
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            shapes[name] = "lazy"
            continue
        if not isinstance(tensor, torch.Tensor):
            continue
        shapes[name] = f"{tensor.dtype} {list(tensor.shape)}"
        digest.update(f"{name} {shapes[name]}".encode())
        digest.update(_bytes(tensor))
    return {
        "model": _name(module),
        "shapes of the weights": shapes,
        "first weights": digest.hexdigest()[:16],
    }


def _name(value: Any) -> str:
    if isinstance(value, functools.partial):
        return f"partial of {_name(value.func)}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _describe(given: Any, *, tensors: bool) -> dict[str, Any]:
    own = {**getattr(given, "__dict__", {})}
    if isinstance(given, functools.partial):
        own |= {"args": given.args} | given.keywords
    if isinstance(given, torch.nn.Module) and tensors:
        own |= {name: tensor for name, tensor in given._buffers.items() if tensor is not None}
    # Tensors of a metric are left out, because they may be its rows.
    states = getattr(given, "_defaults", {})
    plain = {
        name: text
        for name, value in sorted(own.items())
        if name[0] != "_" and name not in states and (tensors or is_plain(value))
        and (text := _text(value)) is not None
    }  # fmt: skip
    return {"is": _name(given), **plain}


def _settings_of(given: Any) -> Any:
    """Returns the name of a loss, transform or factory; adds its settings and its layers' settings, if any.

    A setting is an attribute with the name of a constructor argument; other attributes may change later.
    """
    layers = dict(given.named_modules()) if isinstance(given, torch.nn.Module) else {"": given}
    found = {}
    for path, layer in layers.items():
        known = {"is", *inspect.signature(type(layer).__init__).parameters}
        is_partial = isinstance(layer, functools.partial)
        settings = _describe(layer, tensors=True)
        found[path] = {name: text for name, text in settings.items() if is_partial or name in known}
    # Only the name if there are no settings, as stored runs have it.
    return found if len(found) > 1 or len(found[""]) > 1 else _name(given)


def _text(value: Any) -> str | None:
    if isinstance(value, tuple | list):
        texts = [_text(item) for item in value]
        # Plain values have the text of stored runs.
        return repr(value) if is_plain(value) else None if None in texts else repr(texts)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fbiuc":
        value = torch.as_tensor(np.array(value, value.dtype.newbyteorder("=")))  # a copy in native order
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        digest = hashlib.sha256(_bytes(value)).hexdigest()[:16]
        return f"{value.dtype} {list(value.shape)} {digest}"
    # Text, because JSON has no infinity and no NaN.
    return repr(value) if is_plain(value) else None


def is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _equal(left: Any, right: Any, size: float) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or abs(left - right) <= _RELATIVE_TOLERANCE * size
    return bool(left == right)


def _short(value: Any) -> str:
    return _short_text(json.dumps(value) if not isinstance(value, str) else repr(value))


def _short_text(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
