"""Shards and settings of the tests of private training."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from private_shards import MakeConfig, columns, private_config

from ringspark.pipelines import ShardManifest


@pytest.fixture
def manifest(make_shards: Any) -> ShardManifest:
    return make_shards(columns())  # type: ignore[no-any-return]


@pytest.fixture
def config(manifest: ShardManifest, tmp_path: Path) -> MakeConfig:
    return partial(private_config, manifest, tmp_path / "run")
