"""`train_worker` gives the model of one worker under every sharding."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from parity import difference, equal_to_one_worker
from short_sync import sync_of
from small_training import columns_of, config_of, train_gang

from ringspark.estimators.collectives import COLLECTIVES
from ringspark.estimators.options.sync import SHARDINGS, Zero
from ringspark.models import ModelSpec

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16] * 4, "out_features": 1, "dropout": 0.0})
_config = partial(config_of, model=SPEC.to_json())
SHARDED = [
    (sharding, collective)
    for sharding in SHARDINGS
    for collective in COLLECTIVES
    if collective != "local" and sharding != "none" and (sharding, collective) != ("parameters", "horovod")
]


@pytest.mark.distributed
@pytest.mark.parametrize(("sharding", "collective"), SHARDED)
def test_the_best_checkpoint_of_two_workers_is_that_of_one(make_shards, tmp_path, sharding, collective):
    """The last training batch and the only validation batch leave a rank without rows."""
    held_out = np.arange(104) >= 97
    manifest = make_shards(columns_of(104), validation=held_out, row_group_rows=97)
    config = _config(
        manifest,
        tmp_path / "run",
        keep="best",
        gradient_accumulation=2,
        max_grad_norm=0.5,
        lr_schedule="cosine",
        parameter_groups=({"params": ["*.bias"], "weightDecay": 0.0},),
    )
    spread = {"num_workers": 2, "collective": collective, "sync": sync_of(sharding=sharding)}
    one, two = equal_to_one_worker(config, **spread)
    assert two.checkpoint_epoch == one.checkpoint_epoch


@pytest.mark.distributed
@pytest.mark.parametrize("policy", [pytest.param("sqrt", marks=pytest.mark.slow), "all"])
def test_sharded_parameters_go_with_checkpointing_and_mixed_precision(make_shards, tmp_path, policy):
    manifest = make_shards(columns_of(97))
    plain = _config(manifest, tmp_path / "a", num_workers=2, collective="torch", precision="bf16")
    sharded = replace(plain, run_uri=str(tmp_path / "b"), sync=Zero(stage=3), gradient_checkpointing=policy)
    assert difference(train_gang(plain), train_gang(sharded), plain) < 1e-5
