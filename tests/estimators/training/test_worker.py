"""`train_worker` on one rank and on several: the numbers, not the launch."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import equal_to_one_worker
from ranks import GANGS
from small_networks import Net
from small_training import Runs, columns_of, train_on_one_gang, weights_of
from torch import nn

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.checkpoint.weights import map_checkpoint
from ringspark.estimators.training.history import read_history, read_progress
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16, 16], "out_features": 1})
SETTINGS = {"model": SPEC}
_weights = partial(weights_of, module=SPEC.build())


def _distance(one: TrainResult, other: TrainResult) -> float:
    return float((_weights(one) - _weights(other)).abs().max())


def _weighted(rows: int) -> dict[str, np.ndarray]:
    return columns_of(rows) | {"w": np.random.default_rng(1).integers(0, 3, size=rows).astype(np.float64)}


@pytest.mark.distributed
@pytest.mark.parametrize("collective", GANGS)
@pytest.mark.parametrize(("rows", "workers", "steps"), [(803, 2, 52), (65, 3, 6)])
def test_two_workers_equal_one_on_the_same_global_batches(
    runs: Runs, collective: str, rows: int, workers: int, steps: int
) -> None:
    """The last batch of an epoch is short; of 65 rows it has one, so two of three ranks have no rows."""
    config = runs.config(runs.shards(rows, row_group_rows=40))
    one, _ = equal_to_one_worker(config, alone=train_here, num_workers=workers, collective=collective)
    assert one.steps == steps


def _logarithm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has no finite gradient at zero, and a parameter that only training uses."""
    x = x.abs().log()
    return self.linear(x) + (self.extra(x) if self.training else 0)  # type: ignore[no-any-return]


def test_a_rank_without_rows_adds_exactly_nothing(runs: Runs, collective: str) -> None:
    module = Net(_logarithm, linear=nn.Linear(4, 1), extra=nn.Linear(4, 1))
    config, objects = runs.config(33, model=None, epochs=1), UserObjects(module=module)
    equal_to_one_worker(config, objects, alone=train_here, num_workers=2, collective=collective)


def test_row_weights_count_over_the_global_batch(runs: Runs, collective: str) -> None:
    config = runs.config(columns := _weighted(200), weight_column="w")
    one, _ = equal_to_one_worker(config, alone=train_here, num_workers=2, collective=collective)
    assert _distance(one, runs.here(columns)) > 1e-3


def test_integer_weights_equal_repeated_rows(runs: Runs) -> None:
    columns = _weighted(100)
    counts = columns["w"].astype(int)
    repeated = {name: np.repeat(values, counts, axis=0) for name, values in columns.items()}
    weighted = runs.here(columns, weight_column="w", batch_size=400, epochs=10)
    assert _distance(weighted, runs.here(repeated, batch_size=400, epochs=10)) < 1e-5


class _Draws(Callback):
    """Draws a number from each random generator, on every rank."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def on_train_start(self, state: TrainingState) -> None:
        drawn = [torch.rand(1).item(), np.random.random(), random.random()]
        Path(f"{self.path}-{state.rank}").write_text(json.dumps(drawn))


def test_two_runs_with_one_seed_are_bitwise_equal(runs: Runs, collective: str) -> None:
    """Every rank draws from streams of its own, which the seed decides."""
    spec = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 1, "dropout": 0.3})
    gang = {"model": spec, "num_workers": 2, "collective": collective}
    trainings = {
        name: (runs.config(300, seed=seed, **gang), UserObjects(callbacks=(_Draws(runs.folder / name),)))
        for name, seed in (("first", 0), ("second", 0), ("other", 1))
    }
    results = train_on_one_gang(trainings, catches=False)[0].values()
    first, second, other = (weights_of(result, spec.build()) for result in results)
    assert first.equal(second)
    assert not first.equal(other)
    drawn = [[json.loads((runs.folder / f"{name}-{r}").read_text()) for r in (0, 1)] for name in trainings]
    assert drawn[0] == drawn[1]
    assert len({number for ranks in drawn[1:] for rank in ranks for number in rank}) == 12


def test_micro_batches_on_two_workers(runs: Runs, collective: str) -> None:
    whole = runs.here(197, max_grad_norm=0.1)
    parts = runs.gang(197, max_grad_norm=0.1, gradient_accumulation=2, collective=collective)
    assert _distance(whole, parts) < 1e-5


class _Recorder(nn.Linear):
    """Records its training rows in order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.extend(x.tolist())
        return super().forward(x[:, None])


@pytest.mark.parametrize("shuffle", [True, False])
def test_shuffle_is_obeyed_and_every_row_is_seen_once(runs: Runs, shuffle: bool, monkeypatch: Any) -> None:
    rows = np.arange(100, dtype=np.float32)
    manifest = runs.shards({"x": rows, "y": rows}, row_group_rows=16, num_files=1)
    recorder, seen = _Recorder(1, 1), []
    recorder.seen = seen
    monkeypatch.setattr("ringspark.estimators.training.rank_network.build_module", lambda *_: recorder)
    objects = UserObjects(module=recorder)
    runs.here(manifest, objects, epochs=1, shuffle=shuffle, learning_rate=1e-6)
    assert sorted(seen) == rows.tolist()
    assert (seen == rows.tolist()) is not shuffle


def test_validation_rows_are_measured_and_never_trained_on(runs: Runs) -> None:
    columns, held_out = columns_of(200), np.arange(200) % 4 == 0
    result = runs.here(runs.shards(columns, validation=held_out), shuffle=False)
    assert result.rows == 2 * 150
    module = SPEC.build()
    map_checkpoint(result.checkpoint_uri, module)
    with torch.no_grad():
        output = module.eval()(torch.from_numpy(columns["x"][held_out]))[:, 0]
    expected = ((output - torch.from_numpy(columns["y"][held_out])) ** 2).mean().item()
    assert result.history[-1].validation_loss == pytest.approx(expected, rel=1e-5)
    assert runs.here(150).history[-1].validation_loss is None


def _without_graph(network: Net, x: torch.Tensor) -> torch.Tensor:
    assert network.training == torch.is_grad_enabled()
    return network.linear(x)  # type: ignore[no-any-return]


def test_validation_records_no_gradients(runs: Runs) -> None:
    objects = UserObjects(module=Net(_without_graph, linear=nn.Linear(4, 1)))
    result = runs.here(runs.shards(60, validation=np.arange(60) % 4 == 0), objects)
    assert result.history[0].validation_loss is not None


def test_the_run_directory_and_the_result_s_json_tell_the_story(runs: Runs) -> None:
    result = runs.here(100)
    history, progress = read_history(result.run_uri), read_progress(result.run_uri)
    assert tuple(history) == result.history
    assert [(record.epoch, record.rows, record.steps) for record in history] == [(1, 100, 4), (2, 100, 4)]
    assert progress is not None
    assert progress.num_steps == 8
    text = result.to_json()
    assert TrainResult.from_json(text) == result
    assert len(json.dumps(text)) < 4096


def test_training_changes_neither_the_users_module_nor_the_random_state(runs: Runs) -> None:
    module = SPEC.build()
    before = [p.clone() for p in module.parameters()]
    state, others = torch.get_rng_state(), (random.getstate(), str(np.random.get_state()))
    result = runs.here(100, UserObjects(module=module))
    assert torch.get_rng_state().equal(state)
    assert (random.getstate(), str(np.random.get_state())) == others
    assert all(a.equal(b) for a, b in zip(before, module.parameters(), strict=True))
    assert not _weights(result).equal(torch.cat([p.flatten() for p in before]))


@pytest.mark.extras
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_loss_that_is_not_finite_stops_the_training(runs: Runs, compression: str) -> None:
    with pytest.raises(FloatingPointError, match=r"the training loss is .* lower learningRate") as raised:
        runs.here(100, optimizer="sgd", learning_rate=1e20, activation_compression=compression)
    assert ("activationCompression='int8' rounds" in str(raised.value)) == (compression == "int8")
