"""Settings, columns and networks that would publish rows without noise are refused on the driver."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_shards import ROWS, WIDTH, MakeConfig, columns, network, objects, privacy, private_config
from pyspark.ml.evaluation import RegressionEvaluator
from small_networks import Net
from small_training import bare_config
from torch import nn

from ringspark.estimators import (
    LocalSGD,
    Mesh,
    PowerSGD,
    Privacy,
    TorchClassifier,
    TorchRegressionModel,
    TorchRegressor,
    Zero,
)
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.finetuning import Pretrained
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.objective.losses import NETWORK_LOSS
from ringspark.extras.privacy.technique import DifferentialPrivacy
from ringspark.extras.search import OptunaSearch, Uniform
from ringspark.extras.tuning import cross_validate
from ringspark.models import ModelSpec
from ringspark.models.reports import add_loss
from ringspark.pipelines import HashBuckets, Padded, ShardManifest, Vocabulary

GIVEN: dict[str, Any] = {"epsilon": 3, "delta": 1e-6, "maxGradNorm": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": True}, "compile .True. needs one gradient for a whole batch, but privacy clips"),
        ({"num_workers": 2, "parallelism": Mesh(tensor=2), "collective": "torch"}, "gives each worker only"),
        ({"num_workers": 2, "sync": Zero(stage=1)}, r"sync=Zero\(stage=1\) synchronizes workers in another"),
        ({"num_workers": 2, "sync": LocalSGD(steps=2)}, r"sync=LocalSGD\(steps=2\) synchronizes workers in"),
        ({"sync": {"name": "allreduce", "compression": PowerSGD(rank=1)}}, "needs a plain all-reduce of the"),
        ({"batch_size_schedule": ((2, 64),)}, "changes the share of the rows"),
        ({"training_step": "own"}, "trainingStep needs one gradient for a whole batch"),
        ({"losses": (NETWORK_LOSS,)}, "a loss that takes the module needs one gradient"),
        ({"soft_label_column": "teacher"}, "may reveal the rows that it was trained on"),
        ({"certify": True, "run_uri": "r"}, "certify needs steps that can be repeated"),
        ({"noise_scale": True}, "noiseScale needs values .* without noise, but privacy adds noise"),
        ({"precision": "fp16"}, "'fp16' needs to skip a step because of single rows"),
        ({"on_non_finite": "skip"}, "onNonFinite 'skip' needs to skip a step because of"),
        ({"gradient_checkpointing": "sqrt"}, "gradientCheckpointing .* needs one gradient for"),
        ({"activation_offload": "disk"}, "activationOffload .* needs one gradient for"),
        ({"cache": "none"}, "set cache='disk'"),
        ({"keep": "best", "monitor": "train_loss"}, "needs values of the training rows without noise"),
    ],
)
def test_settings_that_need_other_numbers_are_refused(changes: dict[str, Any], message: str) -> None:
    bare_config(**changes)
    with pytest.raises(ValueError, match=message):
        bare_config(**changes, privacy=privacy())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": 3, "delta": 1e-6}, "Privacy needs the option 'max_grad_norm'"),
        ({"epsilon": 3, "delta": 1e-6, "maxGradNorm": 0}, "max_grad_norm must be above 0 and finite, got 0"),
        ({"epsilon": 3, "delta": 1, "maxGradNorm": 1}, "delta must lie between 0 and 1, got 1"),
        ({"delta": 1e-6, "maxGradNorm": 1}, "needs either epsilon or noise_multiplier"),
        ({"epsilon": 3, "noiseMultiplier": 1, "delta": 1e-6, "maxGradNorm": 1}, "needs either epsilon or"),
        ({"epsilon": 3, "delta": 1e-6, "maxGradNorm": 1, "accountant": "gdp"}, "must be 'rdp' or 'prv'"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchRegressor(privacy=given)


def test_a_dict_and_both_spellings_mean_the_same() -> None:
    wanted = Privacy(epsilon=3, delta=1e-6, max_grad_norm=1.0)
    assert Privacy(**GIVEN) == wanted
    assert TorchRegressor(privacy=GIVEN).getPrivacy() == wanted
    assert TorchRegressor(privacy=wanted).setPrivacy(None).getPrivacy() is None


@pytest.fixture
def check(manifest: ShardManifest, config: MakeConfig) -> Callable[..., object]:
    return lambda changes={}, **given: check_training(config(**changes), objects(**given), manifest)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.layer(x)


class Largest(Counts):
    """Keeps the largest number of the rows, which rows of zeros do not move."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.copy_(torch.maximum(self.seen, x.detach().abs().max()))
        return self.layer(x)


class Reports(Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        add_loss(x.square().mean(1))
        return self.layer(x)


HEAD = nn.Linear(4, 1)
# Shrinks the embeddings of the ids that it sees, also without a gradient.
LIMITED = Net(lambda self, x: self.ids(x[:, 0].long().clamp(0, 49)), ids=nn.Embedding(50, 1, max_norm=0.5))
PAIRS = Net(lambda self, x: self.head(x.view(-1, 2, WIDTH)).flatten(0, 1), head=nn.Linear(WIDTH, 1))
HIDDEN = Net(lambda self, x: self.heads[0](self.layer(x)), layer=nn.Linear(WIDTH, 4), heads=[HEAD])


def listed(way: str) -> Net:
    layer = nn.Linear(WIDTH, 4)
    weight = layer.weight
    ways: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
        "list": lambda self, x: x @ self.weights[0].T,
        "closure": lambda self, x: x @ weight.T,
        "both": lambda self, x: x @ weight.T + self.layer(x),
    }
    return Net(lambda self, x: self.head(ways[way](self, x)), layer=layer, head=HEAD, weights=[weight])


LISTED = r"forward .* reads the weights ('layer\.weight'|of shape \(4, 6\)) from a list, a closure"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)), "BatchNorm1d '0' takes mea.*GroupNorm"),
        (Counts(), "also change the buffer 'seen' of model Counts"),
        (Largest(), "also change the buffer 'seen' of model Largest"),
        (LIMITED, "changes the weights 'ids.weight' of single rows, as an Embedding with max_norm"),
        (Reports(), "add losses by add_loss; leave add_loss out"),
        (PAIRS, "model Net cannot run a single row"),
        *((listed(way), LISTED) for way in ("list", "closure", "both")),
        (HIDDEN, r"reads the weights of shape \((1, 4|1,)\) from a list"),
    ],
)
def test_networks_that_mix_or_keep_rows_are_refused(check: Any, module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(module=module)


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({}, {"transform_batch": lambda inputs, labels: (inputs, labels)}, "transformBatch can mix"),
        ({"privacy": privacy(delta=0.01)}, {}, r"delta must be below 1 / rows \(0\.0042\), .*lower delta"),
        ({"batch_size": ROWS + 1}, {}, "must not exceed the 240 training rows"),
        # The default of monitor is the training loss, if no row is held out.
        ({"keep": "best"}, {}, "monitor 'train_loss' needs values of the training rows"),
        ({"patience": 1}, {}, "monitor 'train_loss' needs values of the training rows"),
        # An output that does not fit the label is said first.
        ({}, {"module": nn.Linear(WIDTH, 3)}, r"must return .* change the model's last layer"),
    ],
)
def test_other_uses_of_rows_are_refused(check: Any, changes: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(changes, **given)


@pytest.mark.parametrize("named", ["run", "model", "model/weights/model.safetensors", "link", "file"])
def test_weights_of_a_private_run_are_refused(manifest: Any, config: Any, tmp_path: Path, named: str) -> None:
    result = train_here(config(epochs=1), objects())
    model = TorchRegressionModel(model=ModelSpec("linear", {"in_features": WIDTH, "out_features": 1}))
    model._set_trained(result.checkpoint_uri, [()], TrainingSummary.of(result), input_columns=["x"])
    model.save(str(tmp_path / "model"))
    (tmp_path / "link").symlink_to(tmp_path / "model")
    (tmp_path / "file").symlink_to(tmp_path / "model" / "weights")
    weights = Pretrained(uri=result.checkpoint_uri if named == "run" else str(tmp_path / named))
    more = replace(config(pretrained=weights), run_uri=str(tmp_path / "more"))
    with pytest.raises(ValueError, match=r"weights of a private training, .* set initialModel to its model"):
        check_training(more, objects(), manifest)


def test_early_stopping_by_rows_without_protection_is_allowed(make_shards: Any, tmp_path: Path) -> None:
    manifest = make_shards(columns(), validation=np.arange(ROWS) % 4 == 0)
    config = private_config(manifest, tmp_path / "run", patience=1, keep="best", epochs=3, ema_decay=0.9)
    result = train_here(config, objects())
    assert result.privacy is not None
    assert sum(steps for *_, steps in result.privacy.charged) == result.steps


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Vocabulary(max_size=9), r"words of column 'c', .*Vocabulary\(words=\[...\]\)"),
        (Padded(), r"longest array of column 'c', .*Padded\(length=...\)"),
    ],
)
def test_column_types_that_learn_from_rows_are_refused(kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DifferentialPrivacy().check_columns(objects(), {"c": kind})
    public = {"a": Vocabulary(words=("x",)), "b": HashBuckets(9), "c": Padded(length=4)}
    DifferentialPrivacy().check_columns(objects(), public)


@pytest.mark.telling
def test_fits_that_look_at_all_rows_or_train_often_are_refused(spark: Any) -> None:
    frame = spark.createDataFrame([(float(i), float(i % 2)) for i in range(20)], ["x", "label"])
    given: dict[str, Any] = {"privacy": GIVEN, "batchSize": 4, "inputCols": ["x"]}
    with pytest.raises(ValueError, match="give model a network of your own"):
        TorchClassifier(**given).fit(frame)
    regressor = TorchRegressor(model=nn.Linear(1, 1), **given)
    held_out = regressor.copy({regressor.validationFraction: 0.25})
    for stage in (held_out, held_out.copy({held_out.timeCol: "x"})):
        with pytest.raises(ValueError, match=r"validationFraction=0\.25 would take validation rows"):
            stage.fit(frame)
    search = OptunaSearch(estimator=regressor, space={"learningRate": Uniform(1e-4, 1e-2)})
    with pytest.raises(ValueError, match="OptunaSearch publishes results of many on the same rows"):
        search.fit(frame)
    with pytest.raises(ValueError, match="cross_validate publishes results of many"):
        cross_validate(regressor, [(frame, frame)], RegressionEvaluator())
    with pytest.raises(ValueError, match="as in a CrossValidator, publishes results of many"):
        regressor.fit(frame, [{regressor.epochs: 1}, {regressor.epochs: 2}])
    text = frame.selectExpr("x", "CAST(label AS string) AS label")
    classifier = TorchClassifier(model=network(), **given)
    with pytest.raises(ValueError, match="does not cover the words of column 'label'"):
        classifier.fit(text)
