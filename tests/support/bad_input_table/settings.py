"""Refusals of settings of a fit, except for meshes."""

import warnings
from typing import Any

import torch
from torch import nn

from bad_input_table.place import BadInput, Locked, Place, blocked, cut, gone, unread
from ringspark.estimators import TorchAutoencoder, TorchEstimator, TorchRegressor
from ringspark.models import ModelSpec
from ringspark.pipelines import Padded, Ragged, write_shards

R = BadInput


def part_as_weights(place: Place) -> Any:
    rows = place.table.select("uneven", "label")
    uri = place.prepared(damage=lambda folder: write_shards(rows, str(folder), columns={"uneven": Padded()}))
    return place.fit(inputCols=["uneven"], weightCol="uneven.length", run=lambda e: e.fitOnShards(uri))


def below_zero() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1), nn.LogSigmoid())


BLOCKS = ModelSpec("mlp", {"in_features": 2, "hidden": [4] * 3, "out_features": 1})
TRACKING: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "mlflow", "experiment": ""}, "experiment of 'mlflow' must be", "a non-empty string"),
    ({"name": "mlflow", "tags": "a"}, "tags of 'mlflow' must be a dict", "got 'a'"),
    ({"name": "mlflow", "registered_model_name": "m", "log_model": False}, "registered_model", "drop one"),
    ({"name": "mlflow", "alias": "champion"}, "alias of 'mlflow' needs registered_model_name", "set it too"),
    ({"name": "mlflow", "runtime": "onxx"}, "runtime of 'mlflow' must be", "got 'onxx'"),
    ({"name": "jsonl", "path": "/"}, "path of 'jsonl' must be a local file, got '/'", "give one"),
    ({"name": "jsonl", "path": 5}, "path of 'jsonl' must be a local file, got 5", "give one"),
    ({"name": "tensorboard", "log_dir": 3}, "log_dir of 'tensorboard' must be", "a string"),
]
SCALING = {"rule": "linear", "baseBatchSize": 4}

# fmt: off
SETTINGS = [
    R("fit: no model", lambda p: TorchEstimator().fit(p.table),
      "TorchEstimator needs a model", "ModelSpec"),
    R("fit: model is a class", lambda p: p.fit(model=nn.Linear),
      "model must be", "pass an instance", TypeError),
    R("fit: no such Param", lambda p: p.fit(bachSize=8),
      "no Param 'bachSize'", "mean 'batchSize'", TypeError),
    R("fit: unknown optimizer", lambda p: p.fit(optimizer="adamm"),
      "optimizer must be", "did you mean 'adam"),
    R("fit: unknown loss", lambda p: p.fit(loss="cross_entropi"),
      "loss must be", "did you mean 'cross_entropy'"),
    R("fit: unknown metric", lambda p: p.fit(metrics=["acuracie"]),
      "metrics must be", "did you mean 'accuracy'"),
    R("fit: metric without a name", lambda p: p.fit(metrics=[lambda outputs, labels: 0]),
      "metrics holds a lambda", "name it, as in"),
    R("fit: metric that fails", lambda p: p.train(metrics=[not_a_metric]),
      "metric 'not_a_metric' cannot take outputs and labels .* KeyError", "called as metric"),
    R("fit: metric of many numbers",
      lambda p: p.train(metrics=[{"all": lambda outputs, labels: outputs[None]}]),
      "metric 'all' must give one number per row or one number, got a tensor", "average it"),
    R("fit: metric of one argument", lambda p: unread(p, metrics=[{"mean": lambda x: x}]),
      "metric 'mean' cannot take outputs and labels: too many", r"called as metric\(outputs, labels\)"),
    R("fit: best by a metric of unknown direction", lambda p: unread(p,
        metrics=[{"mean": lambda outputs, labels: outputs.mean()}], monitor="mean", keep="best"),
      "monitor 'train_mean' is of a metric that does not say", "higher_is_better"),
    R("fit: transform that drops rows", lambda p: p.train(transformBatch=lambda x: x[:1]),
      "transformBatch must return 1 inputs of 2 rows, .*got a tensor", "but neither drop nor repeat"),
    R("fit: row weights beside a transform of labels",
      lambda p: unread(p, transformBatch=lambda x, labels: (x, labels), weightCol="half"),
      "weightCol 'half' gives one weight per row, .* weights would not fit", "leave out one of the two"),
    R("fit: transform of other inputs", lambda p: unread(p, transformInPrediction=lambda x, y: x),
      r"transformInPrediction cannot take the inputs \['features'\]: missing", "called on a whole batch"),
    R("fit: transform of rows end to end",
      lambda p: unread(p, inputCols=["uneven"], columns={"uneven": Ragged()}, transformBatch=lambda *x: x),
      "transformBatch needs inputs with one entry per row", r"take Padded\(\) columns"),
    R("fit: transform that cannot travel", lambda p: p.fit(transformInPrediction=Locked()),
      "cannot be sent to the workers", "locks"),
    R("fit: metric of values", lambda p: p.fit(metrics=["rmse"]),
      "metrics of a classification must be among", "'accuracy'.* got 'rmse'"),
    R("fit: no patience", lambda p: p.fit(patience=0), "patience must be at least 1", "leave it unset"),
    R("fit: warm-up longer than all", lambda p: p.train(warmupSteps=500),
      "warmupSteps must be below", "got 500"),
    R("fit: rate scaled from no batch", lambda p: p.fit(scaleLearningRate="linear"),
      "scaleLearningRate must be a ScaleLearningRate or a dict", "got 'linear'", TypeError),
    R("fit: rate scaled by no rule", lambda p: p.fit(scaleLearningRate={"rule": "linera"}),
      "ScaleLearningRate needs the option 'base_batch_size'", "it takes base_batch_size, rule"),
    R("fit: rate scaled by another key",
      lambda p: p.fit(scaleLearningRate={"rule": "sqrt", "baseBatchSize": 4, "warmupEpoch": 1}),
      "ScaleLearningRate has no option 'warmupEpoch'", "did you mean 'warmup_epochs'"),
    R("fit: two warm-ups",
      lambda p: p.fit(warmupSteps=2, scaleLearningRate={**SCALING, "warmupEpochs": 0.5}),
      r"warmup_epochs \(0.5\) and warmupSteps \(2\) both raise the rate", "set warmupSteps=0"),
    R("fit: warm-up of all epochs", lambda p: p.fit(scaleLearningRate={**SCALING, "warmupEpochs": 2}),
      r"warmup_epochs must be below epochs \(2\), got 2.0", "train for more epochs"),
    R("fit: warm-up of nearly all epochs",
      lambda p: p.train(scaleLearningRate={**SCALING, "warmupEpochs": 1.999}),
      "warmup_epochs must end before the last of the training's steps", "train for more epochs"),
    R("fit: endless warm-up",
      lambda p: p.fit(scaleLearningRate={**SCALING, "warmupEpochs": float("inf")}),
      "ScaleLearningRate's warmup_epochs must be", "finite, got inf"),
    R("fit: batch sizes without epochs", lambda p: p.fit(batchSizeSchedule=[256, 512]),
      "batchSizeSchedule must map epochs to batch sizes", r"such as {4: 512, 7: 1024} .* got \[256, 512\]"),
    R("fit: a later size of the first epoch", lambda p: p.fit(batchSizeSchedule={1: 16}),
      "batchSizeSchedule's epochs must be whole numbers from 2", "because batchSize sets epoch 1, got 1"),
    R("fit: batches of no row", lambda p: p.fit(batchSizeSchedule={2: 0}),
      "batchSizeSchedule's sizes must be", "of at least 1, got 0 from epoch 2 on"),
    R("fit: two batch sizes for an epoch", lambda p: p.fit(batchSizeSchedule=[[2, 16], [2, 32]]),
      "batchSizeSchedule must have one size for an epoch, got two for epoch 2", "drop one"),
    R("fit: later batches of less rows than workers",
      lambda p: p.fit(numWorkers=4, batchSizeSchedule={2: 3}),
      r"batchSizeSchedule counts rows over all workers, .* numWorkers \(4\)", "raise the size or lower"),
    R("fit: empty micro-batches later on",
      lambda p: p.fit(gradientAccumulation=8, batchSizeSchedule={2: 4}),
      r"gradientAccumulation \(8\) .* size of batchSizeSchedule", "lower gradientAccumulation or"),
    R("fit: schedule without step", lambda p: p.train(lrSchedule=lambda: 1.0),
      "lrSchedule", "got one with 0 arg"),
    R("fit: optimizer makes none", lambda p: p.train(optimizer=lambda parameters: None),
      "optimizer must return a torch.optim.Optimizer", "got NoneType"),
    R("fit: two losses, one label", lambda p: p.fit(loss=["mse", "mse"]), "loss must be one for all", "got"),
    R("fit: unknown schedule", lambda p: p.fit(lrSchedule="cosin"),
      "lrSchedule must be", "did you mean 'cosine'"),
    R("fit: unknown monitor", lambda p: unread(p, monitor="train_los", keep="best"),
      "monitor 'train_los'", "did you mean 'train_loss'"),
    R("fit: unknown collective", lambda p: p.fit(collective="mpi"),
      "collective must be", "torch.* got 'mpi'"),
    R("fit: loss of values for classes", lambda p: p.train(loss="KLDivLoss"),
      "loss 'KLDivLoss' takes", "take 'cross"),
    R("fit: loss of another power", lambda p: p.fit(TorchRegressor, loss="tweedie_2.5"),
      "'tweedie_2.5' needs a power between 1 and 2", "take 'poisson' for 1 and 'gamma' for 2"),
    R("fit: loss of counts for classes", lambda p: p.train(loss="poisson"),
      "loss 'poisson' compares the label with a positive mean", "set another loss"),
    R("fit: counts below 0", lambda p: p.train(TorchRegressor, labelCol="negative", loss="poisson"),
      "labelCol 'negative' has the value -30, but loss 'poisson' takes", "drop such rows"),
    R("fit: a mean below 0", lambda p: p.train(TorchRegressor, model=below_zero(), loss="poisson"),
      "loss 'poisson' compares the label with a positive mean, but model Sequential", "torch.nn.Softplus"),
    R("offset: no such column", lambda p: unread(p, offsetCol="hafl"),
      "offsetCol 'hafl' is not a column", "did you mean 'half'"),
    R("offset: arrays", lambda p: unread(p, offsetCol="features"),
      "offsetCol 'features' has type array<float>", "one number per row"),
    R("offset: holes", lambda p: p.fit(offsetCol="holey"),
      "'holey' has nulls in 1 of 60", "handleInvalid='skip'"),
    R("offset: an own step", lambda p: unread(p, offsetCol="half", trainingStep=lambda step: None),
      "offsetCol adds an input to the network, but trainingStep calls", "add its column to inputCols"),
    R("offset: three classes",
      lambda p: p.train(model=ModelSpec("linear", {"in_features": 2, "out_features": 3}), offsetCol="half"),
      "offsetCol shifts a prediction of two classes, but the network returns 3 values", "leave offsetCol"),
    R("fit: loss of two logits", lambda p: p.train(loss="cross_entropy"),
      "'cross_entropy' needs one logit", "set loss"),
    R("fit: number as a column", lambda p: p.fit(labelCol=5),
      "labelCol must be a string", "got 5", TypeError),
    R("fit: no epoch", lambda p: p.fit(epochs=0), "epochs must be", "at least 1, got 0"),
    R("fit: all of the loss and more", lambda p: p.fit(alpha=1.5), "alpha must be", "from 0 to 1"),
    R("fit: too many workers", lambda p: p.fit(numWorkers=999, batchSize=4096),
      r"numWorkers \(999\)", "lower numW"),
    R("fit: less rows than workers", lambda p: p.fit(numWorkers=9),
      "batchSize .* numWorkers", "raise batchSize"),
    R("fit: empty micro-batches",
      lambda p: p.fit(gradientAccumulation=9),
      r"gradientAccumulation \(9\) times .* batchSize \(8\)", "lower gradientAccumulation or"),
    R("fit: GPUs where there are none", lambda p: p.fit(useGpu=True), "useGpu", "useGpu=False"),
    R("fit: offload to where it is", lambda p: p.fit(activationOffload="host"),
      "'host'", "activationOffload='disk'"),
    R("fit: no chain to recompute", lambda p: p.train(gradientCheckpointing="sqrt"),
      "found no chain of blocks", ";"),
    R("fit: larger than the host", lambda p: p.train(model=huge()),
      "training needs at least .* per worker .* are available", "take an optimizer"),
    R("fit: budget of no size", lambda p: p.fit(memoryBudget="4x"), "memoryBudget must be", "such as '4g'"),
    R("fit: budget too small", lambda p: p.train(memoryBudget=10), "memoryBudget is 10 B", "no settings fit"),
    R("fit: one threshold", lambda p: p.train(thresholds=[0.5]),
      "thresholds must hold", "each of the 2 classes, got 1"),
    R("fit: callback is a class", lambda p: p.fit(callbacks=[dict]),
      "callbacks must be", "pass an inst", TypeError),
    R("fit: no such parameter", lambda p: unread(p, parameterGroups=[{"params": "x"}]), "'x'", "linear"),
    R("fit: unwritable storage", lambda p: p.fit(storageUri=blocked(p)),
      "cannot be written", "choose a folder"),
    R("fit: shards gone", lambda p: p.on_damaged(gone), "parquet' is missing", "write the shards again"),
    R("fit: shards cut", lambda p: p.on_damaged(cut),
      r"parquet' has \d+ bytes, but", "write the shards again"),
    R("fitOnShards: part of a column as weights", part_as_weights,
      "have no column 'uneven.length'", "known: uneven, label"),
    R("fit: no shards", lambda p: p.fit(run=lambda e: e.fitOnShards(p.storage)),
      "holds no shards", "write_shards"),
    R("autoencoder: a label", lambda p: p.fit(TorchAutoencoder, labelCol="label"),
      "has no Param 'labelCol'", "", TypeError),
    R("autoencoder: a mask and a loss", lambda p: unread(p, TorchAutoencoder, mask=0.2, loss="l1"),
      "mask=0.2 sets a loss that compares only masked values", "leave loss unset"),
    R("autoencoder: a mask and metrics", lambda p: unread(p, TorchAutoencoder, mask=0.2, metrics=["rmse"]),
      "mask=0.2", "leave metrics unset"),
    R("autoencoder: noise and a transform",
      lambda p: unread(p, TorchAutoencoder, noise=0.2, transformBatch=nn.Identity()),
      "transformBatch", "put your function into the network"),
    R("fit: no such block", lambda p: p.train(model=BLOCKS, gradientCheckpointing=["trunk.9"]),
      "gradientCheckpointing.*'trunk.9'", "did you mean 'trunk."),
    R("fit: more segments than blocks", lambda p: p.train(model=BLOCKS, gradientCheckpointing=9),
      "gradientCheckpointing", "must be from 2 to 3"),
    R("fit: a ScriptModule", lambda p: p.fit(model=script()),
      "got a ScriptModule", "give the nn.Module it was made from", TypeError),
    *(
        R(f"tracking: {options}", lambda p, o=options: p.fit(tracking=[o]), f"tracking: {subject}", remedy)
        for options, subject, remedy in TRACKING
    ),
]
# fmt: on


def script() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(nn.Linear(2, 1), torch.ones(1, 2))


def huge() -> ModelSpec:
    return ModelSpec("mlp", {"in_features": 2, "hidden": [20_000] * 150, "out_features": 1})


def not_a_metric(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    raise KeyError("nothing")
