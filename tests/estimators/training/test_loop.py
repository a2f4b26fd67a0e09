"""The training loop: several labels, metrics, callbacks, early stopping, the best epoch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import TORCH_AND_SLOW_OTHERS
from sklearn import metrics as reference
from small_training import config_of, train_ranks
from torch import nn
from torch.nn import functional

from ringspark.estimators import Callback, TrainingState, WorkerError
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.sync import (
    DiLoCo,
    ElasticAveraging,
    Hogwild,
    LocalSGD,
    ParameterServer,
    Sync,
    Zero,
)
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.check.schema import check_network, find_monitor
from ringspark.estimators.training.checkpoint.weights import load_checkpoint
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.make_heads import make_heads, set_outputs
from ringspark.estimators.training.selection import BestEpoch
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 2})
MakeShards = Callable[..., ShardManifest]
_config = partial(
    config_of,
    task="classification",
    model=SPEC.to_json(),
    losses=("auto",),
    label_columns=("kind",),
)


@pytest.fixture
def columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(301, 4)).astype(np.float32)
    noise = rng.normal(size=301)
    return {
        "x": x,
        "kind": (x[:, 0] + noise > 0).astype(np.int64),
        "size": (x[:, 1] - x[:, 2]).astype(np.float32),
        "w": rng.integers(0, 3, size=301).astype(np.float64),
    }


def _gang(config: TrainConfig, objects: UserObjects | None = None, workers: int = 2) -> list[TrainResult]:
    return train_ranks(replace(config, num_workers=workers), objects)


def _module(result: TrainResult, module: nn.Module | None = None) -> nn.Module:
    module = module or SPEC.build()
    load_checkpoint(result.checkpoint_uri, module)
    return module.eval()


class TwoHeads(nn.Module):
    """Predicts a class and a number from one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.kind, self.size = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x).relu()
        return self.kind(hidden), self.size(hidden)


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_several_labels_train_like_the_loop_one_would_write(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray], collective: str
) -> None:
    manifest = make_shards(columns, num_files=1)
    torch.manual_seed(0)
    module = TwoHeads()
    config = _config(
        manifest,
        tmp_path / "run",
        task="any",
        model=None,
        label_columns=("kind", "size"),
        losses=("cross_entropy", "mse"),
        loss_weights=(1.0, 0.25),
        metrics=("mae", "accuracy"),
        optimizer="sgd",
        shuffle=False,
        collective=collective,
    )
    with pytest.raises(ValueError, match="loss must be one for all labels or a list"):
        replace(config, losses=("mse",))
    result = _gang(config, UserObjects(module=module))[0]

    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x, kind, size = (torch.from_numpy(columns[name]) for name in ("x", "kind", "size"))
    sums = torch.zeros(2)
    for epoch in range(2):
        for rows in torch.arange(301).split(32):
            kinds, sizes = module(x[rows])
            first = functional.cross_entropy(kinds, kind[rows])
            second = functional.mse_loss(sizes[:, 0], size[rows])
            optimizer.zero_grad()
            (first + 0.25 * second).backward()
            optimizer.step()
            if epoch:
                sums += torch.stack([first, second]).detach() * len(rows)
    trained = _module(result, TwoHeads())
    for ours, theirs in zip(trained.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    record = result.history[-1]
    assert record.metrics["train_loss_kind"] == pytest.approx(sums[0].item() / 301, rel=1e-5)
    assert record.metrics["train_loss_size"] == pytest.approx(sums[1].item() / 301, rel=1e-5)
    assert record.train_loss == pytest.approx((sums[0] + 0.25 * sums[1]).item() / 301, rel=1e-5)
    # Each label has the metrics of its type.
    names = {"train_loss_kind", "train_loss_size", "train_accuracy_kind", "train_mae_size"}
    assert set(record.metrics) == names


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_class_weights_and_row_weights_train_like_torchs_own_mean(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray], collective: str
) -> None:
    """`CrossEntropyLoss(weight=w)` divides by the label weights of the batch, over all ranks."""
    weight = torch.tensor([1.0, 5.0])
    torch.manual_seed(0)
    module = SPEC.build()
    changes: dict[str, Any] = {"model": None, "optimizer": "sgd", "learning_rate": 0.1, "shuffle": False}
    config = _config(make_shards(columns, num_files=1), tmp_path / "run", collective=collective, **changes)
    objects = UserObjects(module=module, losses=(nn.CrossEntropyLoss(weight=weight),))
    result = _gang(config, objects)[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, kind = torch.from_numpy(columns["x"]), torch.from_numpy(columns["kind"])
    for _ in range(2):
        for rows in torch.arange(301).split(32):
            loss = functional.cross_entropy(module(x[rows]), kind[rows], weight=weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for ours, theirs in zip(_module(result).parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_metrics_are_those_of_all_rows_of_all_workers(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray], collective: str
) -> None:
    """66 held-out rows in batches of 32: in the last step, one of three ranks has no row."""
    held_out = np.arange(301) >= 235
    manifest = make_shards(columns, validation=held_out)
    config = _config(
        manifest, tmp_path / "run", metrics=("accuracy", "auroc", "f1"), collective=collective, epochs=1
    )
    results = _gang(config, workers=3)
    assert results[0].history[0].metrics == results[1].history[0].metrics == results[2].history[0].metrics
    metrics = results[0].history[0].metrics
    with torch.no_grad():
        logits = _module(results[0])(torch.from_numpy(columns["x"][held_out]))
    labels, scores = columns["kind"][held_out], logits.softmax(1)[:, 1].numpy()
    assert metrics["validation_accuracy"] == pytest.approx(reference.accuracy_score(labels, scores > 0.5))
    assert metrics["validation_auroc"] == pytest.approx(reference.roc_auc_score(labels, scores))
    assert metrics["validation_f1"] == pytest.approx(reference.f1_score(labels, scores > 0.5))
    assert 0 < metrics["train_auroc"] < 1


class Diary(Callback):
    """Records all callback calls; asks to stop on the given rank and epoch."""

    def __init__(self, path: str, stop_rank: int = -1, stop_epoch: int = 0) -> None:
        self._path, self._stop_rank, self._stop_epoch = path, stop_rank, stop_epoch

    def _write(self, state: TrainingState, text: str) -> None:
        with open(f"{self._path}-{state.rank}", "a") as file:
            file.write(text + "\n")

    def on_train_start(self, state: TrainingState) -> None:
        self._write(state, f"start, {state.num_steps} steps, {state.size} ranks")

    def on_step_end(self, state: TrainingState) -> None:
        self._write(state, f"step {state.step} of epoch {state.epoch}")

    def on_epoch_end(self, state: TrainingState) -> None:
        assert state.history[-1].epoch == state.epoch
        self._write(state, f"epoch {state.epoch}")
        if state.rank == self._stop_rank and state.epoch == self._stop_epoch:
            state.stop("enough")

    def on_train_end(self, state: TrainingState) -> None:
        self._write(state, f"end, {state.stop_reason}")


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_callbacks_are_called_on_every_rank_and_one_ranks_word_stops_all(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray], collective: str
) -> None:
    config = _config(make_shards(columns), tmp_path / "run", epochs=9, batch_size=200, collective=collective)
    diary = Diary(str(tmp_path / "diary"), stop_rank=1, stop_epoch=2)
    results = _gang(config, UserObjects(callbacks=(diary,)))
    common = ["start, 18 steps, 2 ranks"]
    common += ["step 1 of epoch 1", "step 2 of epoch 1", "epoch 1"]
    common += ["step 3 of epoch 2", "step 4 of epoch 2", "epoch 2"]
    assert (tmp_path / "diary-0").read_text().splitlines() == [*common, "end, enough"]
    assert (tmp_path / "diary-1").read_text().splitlines() == [*common, "end, enough"]
    assert [len(result.history) for result in results] == [2, 2]
    assert results[0].steps == 4
    assert results[0].rows == 602


def _zigzag(step: int, num_steps: int) -> float:
    """Returns good rates for the first three epochs of ten steps, then far too large ones."""
    return 1.0 if step < 30 else 300.0


@pytest.mark.distributed
@pytest.mark.parametrize("collective", ["local", *TORCH_AND_SLOW_OTHERS])
def test_the_best_checkpoint_is_the_best(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray], collective: str
) -> None:
    manifest = make_shards(columns, validation=np.arange(301) % 4 == 0)
    config = _config(
        manifest,
        tmp_path / "run",
        epochs=8,
        batch_size=23,
        keep="best",
        patience=2,
        optimizer="sgd",
        learning_rate=0.05,
        collective=collective,
    )
    objects = UserObjects(lr_schedule=_zigzag)
    best = train_here(config, objects) if collective == "local" else _gang(config, objects)[0]
    losses = [record.validation_loss for record in best.history]
    assert best.checkpoint_epoch == 1 + int(np.argmin(losses)) == 3
    assert len(losses) == 5, "two epochs without a better one"
    assert best.stop_reason is not None
    assert best.stop_reason.startswith("validation_loss did not improve on 0.")
    assert best.stop_reason.endswith("of epoch 3 for 2 epochs")
    # The held-out loss shows that the weights come from that epoch.
    held_out = np.arange(301) % 4 == 0
    with torch.no_grad():
        logits = _module(best)(torch.from_numpy(columns["x"][held_out]))
    loss = functional.cross_entropy(logits, torch.from_numpy(columns["kind"][held_out])).item()
    assert loss == pytest.approx(losses[2], rel=1e-5)
    kept = [
        path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(("best", "checkpoint"))
    ]
    assert kept == ["best-3"]


def test_without_being_asked_for_the_best_the_last_is_kept(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray]
) -> None:
    manifest = make_shards(columns)
    last = train_here(_config(manifest, tmp_path / "a", epochs=3))
    assert last.checkpoint_epoch == 3
    assert last.stop_reason is None
    assert [path.name for path in (tmp_path / "a").iterdir() if path.is_dir()] == ["checkpoint"]


def _record(epoch: int, **metrics: float) -> EpochRecord:
    values: dict[str, Any] = {"steps": 1, "rows": 1, "seconds": 1.0, "learning_rate": 0.1}
    return EpochRecord(epoch=epoch, train_loss=1.0, validation_loss=None, metrics=metrics, **values)


def test_the_best_of_a_metric_goes_its_way_and_never_to_not_a_number() -> None:
    columns: dict[str, Any] = {"input_columns": ("x",), "label_columns": ("y",)}
    config = TrainConfig(shards_uri="", run_uri="", monitor="validation_auroc", metrics=("auroc",), **columns)
    best = BestEpoch(config, min_delta=0.1)
    values = [float("nan"), 0.5, 0.55, 0.7, 0.1, float("nan")]
    improved = [best.update(_record(i + 1, validation_auroc=v)) for i, v in enumerate(values)]
    assert improved == [False, True, False, True, False, False]
    assert (best.epoch, best.value) == (4, 0.7)
    lowest = BestEpoch(replace(config, monitor="train_loss"))
    assert lowest.update(_record(1))
    assert not lowest.update(_record(2)), "equal is not better"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("", "validation_loss"),
        ("auroc", "validation_auroc"),
        ("train_auroc", "train_auroc"),
        ("train_loss", "train_loss"),
    ],
)
def test_monitor_means_the_held_out_rows_where_there_are_any(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray], given: str, meant: str
) -> None:
    manifest = make_shards(columns, validation=np.arange(301) % 4 == 0)
    config = _config(manifest, tmp_path / "run", metrics=("auroc",), monitor=given)
    heads = make_heads(set_outputs(config, [2]), UserObjects(), manifest)
    assert find_monitor(config.monitor, heads, ("validation", "train")) == meant


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("aurok", "monitor 'aurok' is no entry of this training's history; did you mean 'auroc'"),
        ("validation_auroc", "no row is held out: set validationFraction or validationIndicatorCol"),
        ("zzz", "give one of"),
    ],
)
def test_a_monitor_that_the_history_will_not_have_is_refused(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray], given: str, message: str
) -> None:
    manifest = make_shards(columns)
    config = _config(manifest, tmp_path / "run", metrics=("auroc",), monitor=given, keep="best")
    with pytest.raises(ValueError, match=message):
        train_here(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_bytes_sent_are_those_of_the_ring(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray], collective: str
) -> None:
    config = _config(make_shards(columns), tmp_path / "run", collective=collective)
    two, three = (_gang(replace(config, run_uri=f"{config.run_uri}-{n}"), workers=n)[0] for n in (2, 3))
    gradients = 4 * sum(p.numel() for p in SPEC.build().parameters())
    for result, share in ((two, 1.0), (three, 4 / 3)):
        assert result.steps == 20
        # In addition to the gradients: the initial weights, and a few all-reduces per epoch.
        extra = result.bytes_sent - 20 * share * gradients
        assert 0 < extra < 4 * gradients + 2_000
    assert train_here(config).bytes_sent == 0


class Normed(nn.Module):
    """A lazy first layer, followed by batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.LazyLinear(8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]


@pytest.mark.distributed
@pytest.mark.parametrize("collective", ["local", *TORCH_AND_SLOW_OTHERS])
def test_a_single_row_passes_batch_normalisation_and_lazy_layers_find_their_size(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray], collective: str
) -> None:
    """301 rows in batches of 60: the last batch is one row, on one rank."""
    torch.manual_seed(0)
    config = _config(make_shards(columns), tmp_path / "run", model=None, batch_size=60, collective=collective)
    objects = UserObjects(module=Normed())
    result = train_here(config, objects) if collective == "local" else _gang(config, objects)[0]
    assert result.steps == 12
    trained = Normed()
    trained(torch.zeros(2, 4))
    module = _module(result, trained)
    assert module.norm.num_batches_tracked > 5  # type: ignore[union-attr, operator]
    assert module(torch.zeros(1, 4)).isfinite().all()


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_the_held_out_loss_is_that_of_the_saved_network_with_batch_normalisation(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray], collective: str
) -> None:
    """Each rank has its own running statistics, and the model has those from one rank."""
    torch.manual_seed(0)
    held_out = np.arange(301) % 3 == 0
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.5), nn.ReLU(), nn.Linear(8, 2))
    manifest = make_shards(columns, validation=held_out)
    config = _config(manifest, tmp_path / "run", model=None, collective=collective)
    results = _gang(config, UserObjects(module=module))
    trained = _module(results[0], module)
    x, kind = (torch.from_numpy(columns[name][held_out]) for name in ("x", "kind"))
    loss = functional.cross_entropy(trained(x), kind).item()
    assert results[0].history[-1].validation_loss == pytest.approx(loss, rel=1e-5)


class Memories(nn.Module):
    """Keeps the last batch in a buffer per dtype; NumPy and Python generate the output scale, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        drawn = torch.tensor(np.random.rand() + random.random(), dtype=torch.float64)
        self.register_buffer("scale", drawn)
        for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64):
            self.register_buffer(f"last_{dtype}".replace(".", "_"), torch.zeros(4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x):
            with torch.no_grad():
                for name, buffer in self.named_buffers():
                    if name == "scale":
                        continue
                    buffer.copy_(x[0] > 0 if buffer.dtype == torch.bool else x[0].abs() * 50)
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


class Digest(Callback):
    """Writes each rank's buffers and output scale."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_epoch_end(self, state: TrainingState) -> None:
        values = [(name, buffer.tolist()) for name, buffer in state.module.named_buffers()]
        Path(f"{self._path}-{state.rank}").write_text(repr((state.module.scale, values)))


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_ranks_validate_with_equal_constants_and_buffers_of_every_dtype(
    make_shards: MakeShards,
    tmp_path: Path,
    columns: dict[str, np.ndarray],
    collective: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RINGSPARK_SHARED_MEMORY", "0")
    manifest = make_shards(columns, validation=np.arange(301) % 3 == 0)
    spec = ModelSpec(f"{Memories.__module__}:Memories").to_json()
    config = _config(manifest, tmp_path / "run", model=spec, epochs=1, collective=collective)
    _gang(config, UserObjects(callbacks=(Digest(str(tmp_path / "digest")),)))
    assert (tmp_path / "digest-0").read_text() == (tmp_path / "digest-1").read_text()


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_sparse_embeddings_train_where_a_rank_has_no_rows(
    make_shards: MakeShards, tmp_path: Path, collective: str
) -> None:
    """33 rows in batches of 32: the second batch is one row. Two ranks end like one."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    columns = {"x": rng.integers(0, 9, size=33), "kind": rng.integers(0, 2, size=33)}
    module = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    config = _config(
        make_shards(columns), tmp_path / "run", model=None, optimizer="sgd", epochs=1, shuffle=False
    )
    alone = train_here(config, UserObjects(module=module))
    two = _gang(
        replace(config, collective=collective, run_uri=str(tmp_path / "two")), UserObjects(module=module)
    )
    expected, found = (
        _module(result, nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))).state_dict()
        for result in (alone, two[0])
    )
    for name, weights in expected.items():
        assert torch.allclose(found[name], weights, atol=1e-6), name


def test_one_worker_trains_sparse_embeddings_by_optimizers_of_dense_gradients(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    manifest = make_shards({"x": np.arange(33) % 9, "kind": np.arange(33) % 2})
    weights = []
    for number, is_sparse in enumerate((False, True)):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(9, 4, sparse=is_sparse), nn.Linear(4, 2))
        config = _config(manifest, tmp_path / f"{number}", model=None, optimizer="adamw", epochs=1)
        weights.append(_module(train_here(config, UserObjects(module=module)), module)[0].weight)
    assert torch.equal(*weights)


class OwnLookup(nn.Embedding):
    """Requests sparse gradients in its forward pass only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.embedding(x, self.weight, sparse=True)


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_a_sparse_gradient_that_no_layer_announces_is_refused_in_a_gang(
    make_shards: MakeShards, tmp_path: Path, collective: str
) -> None:
    manifest = make_shards({"x": np.arange(33) % 9, "kind": np.arange(33) % 2})
    config = _config(manifest, tmp_path / "run", model=None, collective=collective, optimizer="sgd")
    objects = UserObjects(module=nn.Sequential(OwnLookup(9, 4), nn.Linear(4, 2)))
    with pytest.raises(WorkerError, match=r"parameter '0\.weight' got a sparse gradient, .*; leave sparse="):
        _gang(config, objects)


def test_an_optimizer_that_takes_only_sparse_gradients_gets_those_of_all_ranks(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    """33 rows in batches of 32: the second batch is one row."""
    manifest = make_shards({"x": np.arange(33) % 9, "kind": np.arange(33) % 2})
    config = _config(manifest, tmp_path / "run", model=None, epochs=1)
    objects = UserObjects(module=nn.Embedding(9, 2, sparse=True), optimizer=torch.optim.SparseAdam)
    alone = train_here(config, objects)
    two = _gang(replace(config, run_uri=str(tmp_path / "two")), objects)
    expected, found = (_module(result, nn.Embedding(9, 2)).weight for result in (alone, two[0]))
    assert torch.allclose(found, expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"SparseAdam takes .* sync=Zero\(stage=1\) .* optimizer='adam'"):
        _gang(replace(config, sync=Zero(stage=1)), objects)


DENSE_SYNCS = [
    *(Zero(stage=stage) for stage in (1, 2, 3)),
    *(LocalSGD(steps=2), DiLoCo(steps=2), ElasticAveraging(steps=2)),
    *(ParameterServer(staleness=0), Hogwild()),
]


@pytest.mark.extras
@pytest.mark.parametrize("sync", DENSE_SYNCS, ids=repr)
def test_a_sync_that_makes_sparse_gradients_dense_says_so(
    make_shards: MakeShards, tmp_path: Path, sync: Sync
) -> None:
    manifest = make_shards({"x": np.arange(33) % 9, "kind": np.arange(33) % 2})
    objects = UserObjects(module=nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)))
    config = _config(manifest, tmp_path / "run", model=None, collective="torch", optimizer="sgd", sync=sync)
    check_training(config, objects, manifest)  # one worker has nothing to synchronize
    with pytest.warns(UserWarning, match=r"sparse=True in the embedding of '0\.weight', but sync=.* dense"):
        check_training(replace(config, num_workers=2), objects, manifest)


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:model Sequential has sparse=True:UserWarning")
@pytest.mark.parametrize("sync", [DENSE_SYNCS[0], DENSE_SYNCS[2], ParameterServer(staleness=0)], ids=repr)
def test_dense_gradients_of_sparse_embeddings_train_like_one_worker(
    make_shards: MakeShards, tmp_path: Path, sync: Sync
) -> None:
    manifest = make_shards({"x": np.arange(33) % 9, "kind": np.arange(33) % 2})
    torch.manual_seed(0)
    objects = UserObjects(module=nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)))
    config = _config(manifest, tmp_path / "one", model=None, collective="torch", optimizer="sgd")
    alone = train_here(config, objects)
    two = _gang(replace(config, sync=sync, run_uri=str(tmp_path / "two")), objects)
    plain = (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)) for _ in range(2))
    expected, found = (_module(result, next(plain)).state_dict() for result in (alone, two[0]))
    for name, weights in expected.items():
        assert torch.allclose(found[name], weights, atol=1e-6), name


def test_layers_that_wait_for_every_rank_are_refused_in_a_gang(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray]
) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8), nn.Linear(8, 2))
    config = _config(make_shards(columns), tmp_path / "run", model=None)
    with pytest.raises(
        ValueError, match=r"layer '1' of model Sequential is a SyncBatchNorm, .*; take BatchNorm"
    ):
        _gang(config, UserObjects(module=module))


def test_embeddings_that_a_forward_pass_changes_are_refused_in_a_gang(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    """Each rank would renormalize the rows of its batch, and the ranks' weights would differ."""
    manifest = make_shards({"x": np.arange(33) % 9, "kind": np.arange(33) % 2})
    config = _config(manifest, tmp_path / "run", model=None, num_workers=2)
    for layer in (nn.Embedding(9, 4, max_norm=1.0), nn.EmbeddingBag(9, 4, max_norm=1.0)):
        module = nn.Sequential(nn.Linear(4, 2), layer)
        with pytest.raises(ValueError, match="layer '1' of model Sequential is an embedding with max_norm"):
            check_network(config, module)
        check_network(replace(config, num_workers=1), module)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_weights_that_leave_nothing_to_average_are_refused(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray], split: str
) -> None:
    held_out = np.arange(301) % 4 == 0
    weights = np.where(held_out == (split == "validation"), 0.0, 1.0)
    manifest = make_shards(columns | {"w": weights}, validation=held_out)
    with pytest.raises(ValueError, match=f"weightCol 'w' is 0 in all {split} rows"):
        train_here(_config(manifest, tmp_path / "run", weight_column="w"))


def test_a_metric_without_a_value_is_no_best(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray]
) -> None:
    """All held-out rows have one class, so AUROC is undefined."""
    held_out = (np.arange(301) % 4 == 0) & (columns["kind"] == 1)
    manifest = make_shards(columns, validation=held_out)
    config = _config(manifest, tmp_path / "run", metrics=("auroc",), monitor="auroc", keep="best", patience=2)
    result = train_here(replace(config, epochs=5))
    assert result.stop_reason == "validation_auroc was not a number in 2 epochs"
    assert result.checkpoint_epoch == 2


class Auxiliary(nn.Module):
    """Network with a second output in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        output = self.linear(x)
        return (output, output) if self.training else output


def test_other_outputs_in_training_than_in_evaluation_are_named(
    make_shards: MakeShards, tmp_path: Path, columns: dict[str, np.ndarray]
) -> None:
    config = _config(make_shards(columns), tmp_path / "run", model=None)
    with pytest.raises(ValueError, match="model Auxiliary returns 2 tensors in training for the labels"):
        train_here(config, UserObjects(module=Auxiliary()))
