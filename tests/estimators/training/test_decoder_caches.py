"""Decoders of transformers keep keys and values by default, which a recomputed block would append again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hugging_face_families import FAMILIES, make_config
from small_training import weights_of

from ringspark.estimators.launch.local import train_here

pytest.importorskip("transformers")


def test_recomputed_blocks_train_like_kept_ones_and_the_users_config_stays(tmp_path: Path) -> None:
    family = FAMILIES["Llama"]
    trained = []
    for policy in ("none", "all"):
        config, objects = (
            make_config(family, tmp_path / policy, gradient_checkpointing=policy),
            family.objects(),
        )
        trained.append(weights_of(train_here(config, objects), family.build()))
        assert objects.module.config.use_cache
    assert torch.equal(*trained)
