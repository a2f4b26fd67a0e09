"""The claims of one start of a training: settings, data, code and versions."""

from __future__ import annotations

import hashlib
import json
import platform
from typing import Any

import torch

from ringspark.estimators.run.identity import identity_of
from ringspark.estimators.training.run_environment import list_versions
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.certificate.code_digest import digest_objects, digest_package
from ringspark.pipelines import ShardManifest

# Fields of the config that are places, which change when the run's folder moves.
PLACES = ("shards_uri", "run_uri")


def list_claims(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, device: torch.device
) -> dict[str, Any]:
    """Returns the claims, as JSON. Runs on the rank that writes.

    `config` holds seed, number of workers and mesh. `data` is the SHA-256 of the manifest, which has the
    SHA-256 of each file of rows.
    """
    settings = json.loads(config.to_json())
    return {
        "config": {name: value for name, value in settings.items() if name not in PLACES},
        "identity": identity_of(config, objects, manifest),
        "data": digest_manifest(manifest),
        "code": digest_objects(objects),
        "platform": describe_platform(device),
    }


def digest_manifest(manifest: ShardManifest) -> str:
    return hashlib.sha256(manifest.to_json().encode()).hexdigest()


def describe_platform(device: torch.device) -> dict[str, Any]:
    """Returns everything besides the settings that can change the last bits of a sum."""
    on_gpu = device.type == "cuda"
    return list_versions() | {
        "ringspark source": digest_package(),
        "machine": platform.machine(),
        "cpu kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
    }
