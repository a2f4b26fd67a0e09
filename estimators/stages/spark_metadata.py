"""Spark ML's own part of a saved stage: class, uid, and the Params that are JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import pyspark
from pyspark.ml.param import Params

from ringspark.estimators.options.declare import Options
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import fit, parse_object

METADATA = "metadata"

# The fields that Spark's reader needs, and their types.
_METADATA_TYPES = {"class": str, "uid": str, "sparkVersion": str, "paramMap": dict, "defaultParamMap": dict}

# Settings with defaults that depend on the machine's installed packages.
_OF_THE_MACHINE = [setting.name for setting in SETTINGS.values() if setting.default_words]


def write_metadata(stage: Params, uri: str, params: dict[str, Any]) -> None:
    """Writes the files of Spark's `DefaultParamsWriter`, which does not work on Connect before Spark 4."""
    metadata = {
        "class": f"{type(stage).__module__}.{type(stage).__name__}",
        "timestamp": int(time.time() * 1000),
        "sparkVersion": pyspark.__version__,
        "uid": stage.uid,
        "paramMap": params,
        "defaultParamMap": {
            param.name: value.to_values() if isinstance(value, Options) else value
            for param, value in stage._defaultParamMap.items()
            if param.name not in _OF_THE_MACHINE
        },
    }
    folder = storage.join(uri, METADATA)
    storage.make_dirs(folder)
    storage.write_atomic(storage.join(folder, "part-00000"), f"{json.dumps(metadata)}\n".encode())
    storage.write_atomic(storage.join(folder, "_SUCCESS"), b"")


def read_metadata(uri: str) -> dict[str, Any]:
    """Reads the files of `write_metadata` or `DefaultParamsWriter`."""
    folder = storage.join(uri, METADATA)
    (part,) = [name for name in storage.list_names(folder) if name.startswith("part-")]
    # The values of Params may be NaN.
    metadata = parse_object(storage.read_bytes(storage.join(folder, part)), allow_nan=True)
    for name, kind in _METADATA_TYPES.items():
        fit(kind, metadata.get(name), name)
    return metadata
