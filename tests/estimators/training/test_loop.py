"""The training loop: several labels, metrics, callbacks, early stopping, the best epoch."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import equal_to_one_worker
from ranks import TORCH_AND_SLOW_OTHERS
from sklearn import metrics as reference
from small_networks import Net
from small_training import Runs, train_ranks
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
from ringspark.estimators.training.check.schema import check_network, find_monitor
from ringspark.estimators.training.checkpoint.weights import map_checkpoint
from ringspark.estimators.training.make_heads import make_heads, set_outputs
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 2})
SETTINGS = {"task": "classification", "model": SPEC, "losses": ("auto",), "label_columns": ("kind",)}
ROWS = 301
HELD_OUT = np.arange(ROWS) % 4 == 0
# 33 rows in batches of 32: the second batch is one row.
IDS = {"x": np.arange(33) % 9, "kind": np.arange(33) % 2}


def _columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    kind = (x[:, 0] + rng.normal(size=ROWS) > 0).astype(np.int64)
    return {"x": x, "kind": kind, "size": (x[:, 1] - x[:, 2]).astype(np.float32)}


def _tensors(*names: str, rows: Any = slice(None)) -> list[torch.Tensor]:
    return [torch.from_numpy(_columns()[name][rows]) for name in names]


def _module(result: TrainResult, module: nn.Module | None = None) -> nn.Module:
    module = module or SPEC.build()
    map_checkpoint(result.checkpoint_uri, module)
    return module.eval()


def _loss(result: TrainResult, module: nn.Module | None = None) -> float:
    """Returns the loss of the saved network over the held-out rows."""
    x, kind = _tensors("x", "kind", rows=HELD_OUT)
    return functional.cross_entropy(_module(result, module)(x), kind).item()


def _step_by_hand(
    module: nn.Module, rate: float, loss: Callable[[torch.Tensor, int], torch.Tensor], result: TrainResult
) -> None:
    """Trains `module` by SGD on `loss` (rows, epoch), over the rows in order; compares the weights."""
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    for epoch in range(2):
        for rows in torch.arange(ROWS).split(32):
            optimizer.zero_grad()
            loss(rows, epoch).backward()
            optimizer.step()
    trained = _module(result, _two_heads() if isinstance(module, Net) else None)
    for ours, theirs in zip(trained.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def _two_heads() -> Net:
    """Returns a network that predicts a class and a number from one trunk."""
    parts = {"trunk": nn.Linear(4, 8), "kind": nn.Linear(8, 2), "size": nn.Linear(8, 1)}
    return Net(lambda self, x: (self.kind(hidden := self.trunk(x).relu()), self.size(hidden)), **parts)


def test_several_labels_train_like_the_loop_one_would_write(runs: Runs, collective: str) -> None:
    module = _two_heads()
    result = runs.gang(
        runs.shards(_columns(), num_files=1),
        UserObjects(module=module),
        task="any",
        label_columns=("kind", "size"),
        losses=("cross_entropy", "mse"),
        loss_weights=(1.0, 0.25),
        metrics=("mae", "accuracy"),
        optimizer="sgd",
        shuffle=False,
        collective=collective,
    )
    x, kind, size = _tensors("x", "kind", "size")
    sums = torch.zeros(2)

    def loss(rows: torch.Tensor, epoch: int) -> torch.Tensor:
        kinds, sizes = module(x[rows])
        losses = functional.cross_entropy(kinds, kind[rows]), functional.mse_loss(sizes[:, 0], size[rows])
        sums.add_(torch.stack(losses).detach() * len(rows) * epoch)  # of the second epoch
        return losses[0] + 0.25 * losses[1]

    _step_by_hand(module, 0.01, loss, result)
    record, means = result.history[-1], (sums / ROWS).tolist()
    assert record.metrics["train_loss_kind"] == pytest.approx(means[0], rel=1e-5)
    assert record.metrics["train_loss_size"] == pytest.approx(means[1], rel=1e-5)
    assert record.train_loss == pytest.approx(means[0] + 0.25 * means[1], rel=1e-5)
    # Each label has the metrics of its type.
    names = {"train_loss_kind", "train_loss_size", "train_accuracy_kind", "train_mae_size"}
    assert set(record.metrics) == names


def test_class_weights_train_like_torchs_own_mean(runs: Runs, collective: str) -> None:
    """`CrossEntropyLoss(weight=w)` divides by the label weights of the batch, over all ranks."""
    weight, module = torch.tensor([1.0, 5.0]), SPEC.build()
    changes = {"optimizer": "sgd", "learning_rate": 0.1, "shuffle": False}
    objects = UserObjects(module=module, losses=(nn.CrossEntropyLoss(weight=weight),))
    result = runs.gang(runs.shards(_columns(), num_files=1), objects, collective=collective, **changes)
    x, kind = _tensors("x", "kind")

    def loss(rows: torch.Tensor, epoch: int) -> torch.Tensor:
        return functional.cross_entropy(module(x[rows]), kind[rows], weight=weight)

    _step_by_hand(module, 0.1, loss, result)


def test_metrics_are_those_of_all_rows_of_all_workers(runs: Runs, collective: str) -> None:
    """66 held-out rows in batches of 32: in the last step, one of three ranks has no row."""
    held_out = np.arange(ROWS) >= 235
    manifest, names = runs.shards(_columns(), validation=held_out), ("accuracy", "auroc", "f1")
    config = runs.config(manifest, metrics=names, collective=collective, epochs=1, num_workers=3)
    results = train_ranks(config)
    metrics = results[0].history[0].metrics
    assert [result.history[0].metrics for result in results] == [metrics] * 3
    x, kind = _tensors("x", "kind", rows=held_out)
    with torch.no_grad():
        scores = _module(results[0])(x).softmax(1)[:, 1].numpy()
    labels = kind.numpy()
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


def test_callbacks_are_called_on_every_rank_and_one_ranks_word_stops_all(runs: Runs, collective: str) -> None:
    changes = {"epochs": 9, "batch_size": 200, "collective": collective, "num_workers": 2}
    diary = Diary(str(runs.folder / "diary"), stop_rank=1, stop_epoch=2)
    results = train_ranks(runs.config(_columns(), **changes), UserObjects(callbacks=(diary,)))
    expected = [
        "start, 18 steps, 2 ranks",
        *("step 1 of epoch 1", "step 2 of epoch 1", "epoch 1"),
        *("step 3 of epoch 2", "step 4 of epoch 2", "epoch 2"),
        "end, enough",
    ]
    for rank in (0, 1):
        assert (runs.folder / f"diary-{rank}").read_text().splitlines() == expected
        assert len(results[rank].history) == 2
    assert (results[0].steps, results[0].rows) == (4, 602)


def _zigzag(step: int, num_steps: int) -> float:
    """Returns good rates for the first three epochs of ten steps, then far too large ones."""
    return 1.0 if step < 30 else 300.0


@pytest.mark.distributed
@pytest.mark.parametrize("collective", ["local", *TORCH_AND_SLOW_OTHERS])
def test_the_best_checkpoint_is_the_best(runs: Runs, collective: str) -> None:
    settings = {"epochs": 8, "batch_size": 23, "optimizer": "sgd", "learning_rate": 0.05}
    config = runs.config(
        runs.shards(_columns(), validation=HELD_OUT),
        run="run",
        keep="best",
        patience=2,
        collective=collective,
        num_workers=1 + (collective != "local"),
        **settings,
    )
    objects = UserObjects(lr_schedule=_zigzag)
    best = train_here(config, objects) if collective == "local" else train_ranks(config, objects)[0]
    losses = [record.validation_loss for record in best.history]
    assert best.checkpoint_epoch == 1 + int(np.argmin(losses)) == 3
    assert len(losses) == 5, "two epochs without a better one"
    assert best.stop_reason is not None
    assert best.stop_reason.startswith("validation_loss did not improve on 0.")
    assert best.stop_reason.endswith("of epoch 3 for 2 epochs")
    # The held-out loss shows that the weights come from that epoch.
    assert _loss(best) == pytest.approx(losses[2], rel=1e-5)
    kept = [path.name for path in (runs.folder / "run").iterdir()]
    assert [name for name in kept if name.startswith(("best", "checkpoint"))] == ["best-3"]


def test_monitor_means_the_held_out_rows_where_there_are_any(runs: Runs) -> None:
    manifest = runs.shards(_columns(), validation=HELD_OUT)
    config = runs.config(manifest, metrics=("auroc",))
    heads = make_heads(set_outputs(config, [2]), UserObjects(), manifest)
    wanted = {"": "validation_loss", "auroc": "validation_auroc"}
    for given, meant in (wanted | {name: name for name in ("train_auroc", "train_loss")}).items():
        asked = replace(config, monitor=given)
        assert find_monitor(asked, UserObjects(), heads, ("validation", "train")) == meant


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("aurok", "monitor 'aurok' is no entry of this training's history; did you mean 'auroc'"),
        ("validation_auroc", "no row is held out: set validationFraction or validationIndicatorCol"),
        ("zzz", "give one of"),
    ],
)
def test_a_monitor_that_the_history_will_not_have_is_refused(runs: Runs, given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runs.here(_columns(), run="run", metrics=("auroc",), monitor=given, keep="best")
    assert not (runs.folder / "run").exists()


def _normed() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.distributed
@pytest.mark.parametrize("collective", ["local", *TORCH_AND_SLOW_OTHERS])
def test_a_single_row_passes_batch_normalisation_and_lazy_layers_fit_it(runs: Runs, collective: str) -> None:
    """301 rows in batches of 60: the last batch is one row, on one rank."""
    train = runs.here if collective == "local" else runs.gang
    objects = UserObjects(module=_normed())
    result = train(_columns(), objects, batch_size=60, collective=collective)
    assert result.steps == 12
    trained = _normed()
    trained(torch.zeros(2, 4))
    module = _module(result, trained)
    assert module[1].num_batches_tracked > 5  # type: ignore[index]
    assert module(torch.zeros(1, 4)).isfinite().all()


def test_the_held_out_loss_is_the_saved_networks_with_batch_norm(runs: Runs, collective: str) -> None:
    """Each rank has its own running statistics, and the model has those from one rank."""
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.5), nn.ReLU(), nn.Linear(8, 2))
    manifest = runs.shards(_columns(), validation=HELD_OUT)
    result = runs.gang(manifest, UserObjects(module=module), collective=collective)
    assert result.history[-1].validation_loss == pytest.approx(_loss(result, module), rel=1e-5)


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


def test_ranks_validate_with_equal_constants_and_buffers_of_every_dtype(
    runs: Runs, collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGSPARK_SHARED_MEMORY", "0")
    digest = runs.folder / "digest"
    runs.gang(
        runs.shards(_columns(), validation=HELD_OUT),
        UserObjects(callbacks=(Digest(str(digest)),)),
        model=ModelSpec(f"{Memories.__module__}:Memories"),
        epochs=1,
        collective=collective,
    )
    first, second = (Path(f"{digest}-{rank}").read_text() for rank in (0, 1))
    assert first == second


def _lookup(is_sparse: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4, sparse=is_sparse), nn.Linear(4, 2))


DENSE_SYNCS = [
    *(Zero(stage=stage) for stage in (1, 2, 3)),
    *(LocalSGD(steps=2), DiLoCo(steps=2), ElasticAveraging(steps=2)),
    *(ParameterServer(staleness=0), Hogwild()),
]


def test_sparse_embeddings_train_where_a_rank_has_no_rows(runs: Runs, collective: str) -> None:
    _equal_lookups(runs, shuffle=False, collective=collective)


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:model Sequential has sparse=True:UserWarning")
@pytest.mark.parametrize("sync", [DENSE_SYNCS[0], DENSE_SYNCS[2], ParameterServer(staleness=0)], ids=repr)
def test_dense_gradients_of_sparse_embeddings_train_like_one_worker(runs: Runs, sync: Sync) -> None:
    _equal_lookups(runs, sync=sync, collective="torch")


def _equal_lookups(runs: Runs, **changes: Any) -> None:
    config = runs.config(IDS, model=None, optimizer="sgd")
    objects = UserObjects(module=_lookup())
    equal_to_one_worker(config, objects, alone=train_here, bound=1e-6, num_workers=2, **changes)


def test_one_worker_trains_sparse_embeddings_by_optimizers_of_dense_gradients(runs: Runs) -> None:
    weights = []
    for is_sparse in (False, True):
        module = _lookup(is_sparse)
        result = runs.here(IDS, UserObjects(module=module), optimizer="adamw", epochs=1)
        weights.append(_module(result, module)[0].weight)  # type: ignore[index]
    assert torch.equal(*weights)


class OwnLookup(nn.Embedding):
    """Requests sparse gradients in its forward pass only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.embedding(x, self.weight, sparse=True)


def test_a_sparse_gradient_that_no_layer_announces_is_refused_in_a_gang(runs: Runs, collective: str) -> None:
    objects = UserObjects(module=nn.Sequential(OwnLookup(9, 4), nn.Linear(4, 2)))
    with pytest.raises(WorkerError, match=r"parameter '0\.weight' got a sparse gradient, .*; leave sparse="):
        runs.gang(IDS, objects, collective=collective, optimizer="sgd")


def test_an_optimizer_that_takes_only_sparse_gradients_gets_those_of_all_ranks(runs: Runs) -> None:
    objects = UserObjects(module=nn.Embedding(9, 2, sparse=True), optimizer=torch.optim.SparseAdam)
    config = runs.config(IDS, model=None, epochs=1, collective="torch")
    equal_to_one_worker(config, objects, alone=train_here, bound=1e-6, num_workers=2)
    with pytest.raises(ValueError, match=r"SparseAdam takes .* sync=Zero\(stage=1\) .* optimizer='adam'"):
        runs.gang(IDS, objects, sync=Zero(stage=1))


@pytest.mark.extras
@pytest.mark.parametrize("sync", DENSE_SYNCS, ids=repr)
def test_a_sync_that_makes_sparse_gradients_dense_says_so(runs: Runs, sync: Sync) -> None:
    objects = UserObjects(module=_lookup())
    changes: dict[str, Any] = {"collective": "torch", "optimizer": "sgd", "sync": sync}
    runs.check(IDS, objects, **changes)  # one worker has nothing to synchronize
    with pytest.warns(UserWarning, match=r"sparse=True in the embedding of '0\.weight', but sync=.* dense"):
        runs.check(IDS, objects, num_workers=2, **changes)


MAX_NORM = "layer '1' of model Sequential is an embedding with max_norm"


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.SyncBatchNorm(8), r"layer '1' of model Sequential is a SyncBatchNorm, .*; take BatchNorm"),
        # Each rank would renormalize the rows of its batch, and the ranks' weights would differ.
        (nn.Embedding(9, 4, max_norm=1.0), MAX_NORM),
        (nn.EmbeddingBag(9, 4, max_norm=1.0), MAX_NORM),
    ],
)
def test_layers_that_ranks_cannot_share_are_refused(runs: Runs, layer: nn.Module, message: str) -> None:
    module = nn.Sequential(nn.Linear(4, 8), layer)
    with pytest.raises(ValueError, match=message):
        runs.check(_columns(), UserObjects(module=module), num_workers=2)
    check_network(runs.config(IDS, model=None), UserObjects(), module)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_weights_that_leave_nothing_to_average_are_refused(runs: Runs, split: str) -> None:
    weights = np.where((split == "validation") == HELD_OUT, 0.0, 1.0)
    manifest = runs.shards(_columns() | {"w": weights}, validation=HELD_OUT)
    with pytest.raises(ValueError, match=f"weightCol 'w' is 0 in all {split} rows"):
        runs.check(manifest, weight_column="w")


def test_a_metric_without_a_value_is_no_best(runs: Runs) -> None:
    """All held-out rows have one class, so AUROC is undefined."""
    manifest = runs.shards(_columns(), validation=HELD_OUT & (_columns()["kind"] == 1))
    changes: dict[str, Any] = {"metrics": ("auroc",), "monitor": "auroc", "keep": "best", "patience": 2}
    result = runs.here(manifest, epochs=5, **changes)
    assert result.stop_reason == "validation_auroc was not a number in 2 epochs"
    assert result.checkpoint_epoch == 2


class Auxiliary(nn.Linear):
    """Has a second output in training mode only."""

    def forward(self, x: torch.Tensor) -> Any:
        output = super().forward(x)
        return (output, output) if self.training else output


def test_other_outputs_in_training_than_in_evaluation_are_named(runs: Runs) -> None:
    with pytest.raises(ValueError, match="model Auxiliary returns 2 tensors in training for the labels"):
        runs.check(_columns(), UserObjects(module=Auxiliary(4, 2)))
