"""The timeline of a training: what each rank records, on one axis of time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import config_of, train_ranks, weights_of

from ringspark.estimators.collectives import COLLECTIVES
from ringspark.estimators.tracking.timeline import chrome_trace, time_shares
from ringspark.estimators.training.observation.span_file import read_spans
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

GANGS = [name for name in COLLECTIVES if name != "local"]
SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16, 16], "out_features": 1})


@pytest.mark.distributed
@pytest.mark.parametrize("collective", GANGS)
def test_three(make_shards, tmp_path, collective):
    x = np.random.default_rng(0).normal(size=(803, 4)).astype(np.float32)
    manifest = make_shards({"x": x, "y": x.sum(1)}, validation=np.arange(803) % 10 == 0)
    config = config_of(manifest, tmp_path / "run", model=SPEC.to_json(), num_workers=3, collective=collective, timeline_every_steps=5, checkpoint_every_steps=10, profile_steps=(10, 13))
    result = train_ranks(config)[0]
    import os, json
    for f in sorted((tmp_path/"run").rglob("*")): print(f.relative_to(tmp_path), f.stat().st_size)
    for s in read_spans(str(tmp_path/"run")):
        print(s.rank, s.host, s.offsets, len(s.steps), s.taken_steps, s.steps[2])
    print(time_shares(str(tmp_path/"run")))
    t=chrome_trace(str(tmp_path/"run")); print(len(t["traceEvents"]), t["otherData"], t["traceEvents"][:5])
