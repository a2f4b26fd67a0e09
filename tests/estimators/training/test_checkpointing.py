"""Activation checkpointing trains bit-identical weights, with the same dropout masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import GANGS
from small_training import train_gang

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.checkpoint.weights import load_checkpoint
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

VOCAB, SEQ = 12, 6
SPEC = ModelSpec(
    "transformer_lm",
    {
        "vocab_size": VOCAB,
        "max_seq_len": SEQ,
        "dim": 8,
        "depth": 5,
        "num_heads": 2,
        "dropout": 0.2,
        "attention_dropout": 0.1,
    },
)
MakeShards = Callable[..., ShardManifest]


@pytest.fixture
def config(make_shards: MakeShards, tmp_path: Path) -> TrainConfig:
    """Returns 20 steps of a language model; each token follows from the previous one."""
    start = np.random.default_rng(0).integers(0, VOCAB, size=(160, 1))
    tokens = (start + 5 * np.arange(SEQ + 1)) % VOCAB
    manifest = make_shards({"ids": tokens[:, :-1], "next": tokens[:, 1:]})
    return TrainConfig(
        shards_uri=manifest.uri,
        run_uri=str(tmp_path / "plain"),
        model=SPEC.to_json(),
        losses=("cross_entropy",),
        input_columns=("ids",),
        label_columns=("next",),
        batch_size=16,
        learning_rate=0.02,
        epochs=2,
        reader="arrow",
        gradient_accumulation=2,
    )


def _assert_same_training(first: TrainResult, second: TrainResult) -> None:
    assert first.steps == second.steps == 20
    assert [r.train_loss for r in first.history] == [r.train_loss for r in second.history]
    # The loss fell, so the comparison below means something.
    assert first.history[-1].train_loss < first.history[0].train_loss
    nets = SPEC.build(), SPEC.build()
    for net, result in zip(nets, (first, second), strict=True):
        load_checkpoint(result.checkpoint_uri, net)
    for (name, a), b in zip(nets[0].state_dict().items(), nets[1].state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "policy",
    [
        "sqrt",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("all", "3", ("blocks.1", "blocks.2.attention"))),
    ],
    ids=str,
)
def test_one_worker_ends_with_the_same_weights(
    config: TrainConfig, tmp_path: Path, policy: str | tuple[str, ...], precision: str
) -> None:
    config = replace(config, precision=precision)  # type: ignore[arg-type]
    recomputed = replace(config, run_uri=str(tmp_path / "recomputed"), gradient_checkpointing=policy)
    _assert_same_training(train_here(config), train_here(recomputed))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("collective", GANGS)
def test_two_workers_end_with_the_same_weights(config: TrainConfig, tmp_path: Path, collective: str) -> None:
    config = replace(config, num_workers=2, collective=collective)
    recomputed = replace(config, run_uri=str(tmp_path / "recomputed"), gradient_checkpointing="sqrt")
    _assert_same_training(train_gang(config), train_gang(recomputed))
