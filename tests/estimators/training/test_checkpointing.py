"""Activation checkpointing trains bit-identical weights, with the same dropout masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face_families import FAMILIES, make_config
from parity import assert_equal_states
from small_training import Runs

from ringspark.estimators.launch.local import train_here
from ringspark.models import ModelSpec

VOCAB, SEQ = 12, 6
TEXT = {"vocab_size": VOCAB, "max_seq_len": SEQ, "dim": 8, "depth": 5, "num_heads": 2}
SETTINGS = {
    "model": ModelSpec("transformer_lm", {**TEXT, "dropout": 0.2, "attention_dropout": 0.1}),
    "task": "any",
    "losses": ("cross_entropy",),
    "batch_size": 16,
    "learning_rate": 0.02,
    "gradient_accumulation": 2,
}


def _assert_same_training(train: Any, policy: Any, **changes: Any) -> None:
    """Takes 20 steps of a language model, in which each token follows from the previous one."""
    start = np.random.default_rng(0).integers(0, VOCAB, size=(160, 1))
    tokens = (start + 5 * np.arange(SEQ + 1)) % VOCAB
    columns = {"x": tokens[:, :-1], "y": tokens[:, 1:]}
    first, second = (train(columns, gradient_checkpointing=p, **changes) for p in ("none", policy))
    assert first.steps == second.steps == 20
    losses = [record.train_loss for record in first.history]
    assert [record.train_loss for record in second.history] == losses
    # The loss fell, so the comparison below means something.
    assert losses[-1] < losses[0]
    assert_equal_states(first, second)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "policy",
    [
        "sqrt",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("all", "3", ("blocks.1", "blocks.2.attention"))),
    ],
    ids=str,
)
def test_one_worker_ends_with_the_same_weights(runs: Runs, policy: Any, precision: str) -> None:
    _assert_same_training(runs.here, policy, precision=precision)


@pytest.mark.slow
def test_two_workers_end_with_the_same_weights(runs: Runs, collective: str) -> None:
    _assert_same_training(runs.gang, "sqrt", collective=collective)


def test_decoders_that_keep_keys_and_values_recompute_and_the_users_config_stays(tmp_path: Path) -> None:
    """A recomputed block would append its keys and values again."""
    pytest.importorskip("transformers")
    family, results = FAMILIES["Llama"], []
    for policy in ("none", "all"):
        config = make_config(family, tmp_path / policy, gradient_checkpointing=policy)
        results.append(train_here(config, objects := family.objects()))
        assert objects.module.config.use_cache
    assert_equal_states(*results)
