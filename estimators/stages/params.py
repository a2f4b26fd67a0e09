"""How an estimator trains: names, types, defaults, getters and setters of its Params.

Params that hold Python objects (`model`, `loss`, `optimizer`, `lrSchedule` when callables) live in
Spark's param map like any other, so `copy` and `fit(df, {param: value})` treat them alike;
`persistence.py` gives them a form on disk.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pyspark.ml.param import Params, TypeConverters
from pyspark.ml.param.shared import HasLabelCol, HasSeed, HasValidationIndicatorCol, HasWeightCol
from torch import nn

from ringspark.estimators.stages.converters import (
    param,
    to_bytes,
    to_callbacks,
    to_choice,
    to_groups,
    to_losses,
    to_name_or_callable,
    to_names,
    to_policy,
    to_uri,
)
from ringspark.estimators.stages.model_params import _ModelParams
from ringspark.estimators.stages.recovery_params import _RecoveryParams
from ringspark.estimators.training.callbacks import Callback
from ringspark.estimators.training.optimizers import OPTIMIZERS
from ringspark.estimators.training.optimizers.schedules import SCHEDULES
from ringspark.models import ModelSpec
from ringspark.pipelines import default_engine

Self = TypeVar("Self", bound=Params)


class _TrainingParams(
    _ModelParams, _RecoveryParams, HasLabelCol, HasWeightCol, HasValidationIndicatorCol, HasSeed
):
    """How an estimator trains. Defaults stand in `__init__`."""

    loss = param(
        "loss",
        "loss by name (of this package or of torch.nn), an nn loss, or a callable (output, label) -> one "
        "value per row, which gets both as network and column give them; a list has one for each label; "
        "'auto': cross entropy for classes, mean squared error else",
        to_losses,
    )
    optimizer = param(
        "optimizer",
        "optimizer by name, or a callable parameters -> torch.optim.Optimizer",
        to_name_or_callable("optimizer", list(OPTIMIZERS)),
    )
    parameterGroups = param(
        "parameterGroups",
        "settings for some parameters: a list of {'params': name pattern or patterns, 'learningRate': ..., "
        "'weightDecay': ...}; the first match counts",
        to_groups,
    )
    learningRate = param("learningRate", "learning rate; never scaled by numWorkers", TypeConverters.toFloat)
    lrSchedule = param(
        "lrSchedule",
        "schedule by name, a callable (step, num_steps) -> factor on the learning rate, or a callable "
        "optimizer -> torch LRScheduler that is stepped after every optimizer step",
        to_name_or_callable("lrSchedule", list(SCHEDULES)),
    )
    warmupSteps = param(
        "warmupSteps",
        "optimizer steps in which the rate rises linearly, before the schedule",
        TypeConverters.toInt,
    )
    weightDecay = param("weightDecay", "weight decay of the optimizer", TypeConverters.toFloat)
    maxGradNorm = param(
        "maxGradNorm", "bound of the gradient's 2-norm; unset: no clipping", TypeConverters.toFloat
    )
    metrics = param(
        "metrics",
        "metrics by name, over the training and the held-out rows of every epoch",
        to_names("metrics"),
    )
    callbacks = param(
        "callbacks", "instances of Callback, called on every worker at fixed points", to_callbacks
    )
    monitor = param(
        "monitor",
        "the loss or metric that tells which epoch is best, such as 'validation_auroc' or 'auroc'; unset: "
        "the loss of the held-out rows, or of the training rows where none is held out",
        TypeConverters.toString,
    )
    patience = param(
        "patience",
        "epochs without a better `monitor` before training stops; unset: all epochs",
        TypeConverters.toInt,
    )
    minDelta = param(
        "minDelta", "what `monitor` must gain to count as better for patience", TypeConverters.toFloat
    )
    keep = param(
        "keep",
        "the model that fit returns: of the 'last' epoch or of the 'best'",
        to_choice("keep", "last", "best"),
    )
    validationFraction = param(
        "validationFraction", "share of the rows to hold out, drawn by the seed", TypeConverters.toFloat
    )
    epochs = param("epochs", "passes over the training rows", TypeConverters.toInt)
    batchSize = param("batchSize", "rows per optimizer step over all workers together", TypeConverters.toInt)
    shuffle = param("shuffle", "whether each epoch has its own order of rows", TypeConverters.toBoolean)
    numWorkers = param("numWorkers", "workers that train at the same time", TypeConverters.toInt)
    useGpu = param("useGpu", "whether each worker trains on a GPU of its own", TypeConverters.toBoolean)
    collective = param(
        "collective",
        "how gradients are summed: 'horovod' or 'torch' ('local' for one worker)",
        to_choice("collective", "horovod", "torch", "local"),
    )
    precision = param(
        "precision",
        "'fp32', 'bf16' or 'fp16' (with loss scaling)",
        to_choice("precision", "fp32", "bf16", "fp16"),
    )
    gradientCheckpointing = param(
        "gradientCheckpointing",
        "activations to recompute instead of keeping: 'none', 'sqrt', 'all', a segment count, or a list of "
        "submodule names",
        to_policy,
    )
    activationOffload = param(
        "activationOffload",
        "where activations wait for the backward pass: 'none' (in place), 'host' (for a GPU: the host's "
        "pinned memory) or 'disk' (a temporary file)",
        to_choice("activationOffload", "none", "host", "disk"),
    )
    activationCompression = param(
        "activationCompression",
        "how kept activations are packed: 'none', 'bits' (exact: one bit a value where only the sign is "
        "needed), 'int8' or 'fp8' (these too, and 8 bits a value elsewhere, with a small error)",
        to_choice("activationCompression", "none", "bits", "int8", "fp8"),
    )
    sharding = param(
        "sharding",
        "what each worker has only its part of: 'none', 'optimizer' (state; ZeRO 1), 'gradients' (these too; "
        "ZeRO 2) or 'parameters' (all; ZeRO 3)",
        to_choice("sharding", "none", "optimizer", "gradients", "parameters"),
    )
    gradientAccumulation = param(
        "gradientAccumulation", "micro-batches per optimizer step", TypeConverters.toInt
    )
    memoryBudget = param(
        "memoryBudget",
        "memory of each worker for tensors, in bytes or as Spark writes sizes ('4g'): fit refuses what would "
        "not fit, before any worker starts; unset: no check",
        to_bytes("memoryBudget"),
    )
    storageUri = param(
        "storageUri",
        "folder that all workers reach, for shards and runs; unset: a temporary one, local masters only",
        to_uri,
    )
    reader = param(
        "reader",
        "engine that reads the shards: 'petastorm' or 'arrow'",
        to_choice("reader", "petastorm", "arrow"),
    )
    showProgress = param(
        "showProgress", "whether the driver shows progress while it waits", TypeConverters.toBoolean
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._setDefault(
            labelCol="label",
            loss="auto",
            optimizer="adamw",
            learningRate=1e-3,
            lrSchedule="constant",
            warmupSteps=0,
            metrics=[],
            callbacks=[],
            minDelta=0.0,
            keep="last",
            weightDecay=0.0,
            epochs=1,
            batchSize=1024,
            seed=0,
            shuffle=True,
            numWorkers=1,
            useGpu=False,
            collective=default_collective(),
            precision="fp32",
            gradientCheckpointing="none",
            gradientAccumulation=1,
            activationOffload="none",
            activationCompression="none",
            sharding="none",
            reader=default_engine(),
            showProgress=True,
        )

    def setModel(self: Self, value: ModelSpec | nn.Module) -> Self:
        return self._set(model=value)

    def setLabelCol(self: Self, value: str) -> Self:
        return self._set(labelCol=value)

    def setWeightCol(self: Self, value: str) -> Self:
        return self._set(weightCol=value)

    def setValidationIndicatorCol(self: Self, value: str) -> Self:
        return self._set(validationIndicatorCol=value)

    def getValidationFraction(self) -> float | None:
        return self.getOrDefault(self.validationFraction) if self.isDefined(self.validationFraction) else None

    def setValidationFraction(self: Self, value: float) -> Self:
        return self._set(validationFraction=value)

    def setSeed(self: Self, value: int) -> Self:
        return self._set(seed=value)

    def getLoss(self) -> Any:
        return self.getOrDefault(self.loss)

    def setLoss(self: Self, value: Any) -> Self:
        return self._set(loss=value)

    def getOptimizer(self) -> Any:
        return self.getOrDefault(self.optimizer)

    def setOptimizer(self: Self, value: Any) -> Self:
        return self._set(optimizer=value)

    def getLearningRate(self) -> float:
        return float(self.getOrDefault(self.learningRate))

    def setLearningRate(self: Self, value: float) -> Self:
        return self._set(learningRate=value)

    def getLrSchedule(self) -> Any:
        return self.getOrDefault(self.lrSchedule)

    def setLrSchedule(self: Self, value: Any) -> Self:
        return self._set(lrSchedule=value)

    def getParameterGroups(self) -> list[dict[str, Any]]:
        return list(self.getOrDefault(self.parameterGroups)) if self.isDefined(self.parameterGroups) else []

    def setParameterGroups(self: Self, value: list[dict[str, Any]]) -> Self:
        return self._set(parameterGroups=value)

    def getWarmupSteps(self) -> int:
        return int(self.getOrDefault(self.warmupSteps))

    def setWarmupSteps(self: Self, value: int) -> Self:
        return self._set(warmupSteps=value)

    def getMetrics(self) -> list[str]:
        return list(self.getOrDefault(self.metrics))

    def setMetrics(self: Self, value: list[str]) -> Self:
        return self._set(metrics=value)

    def getCallbacks(self) -> list[Callback]:
        return list(self.getOrDefault(self.callbacks))

    def setCallbacks(self: Self, value: list[Callback]) -> Self:
        return self._set(callbacks=value)

    def getMonitor(self) -> str | None:
        return self.getOrDefault(self.monitor) if self.isDefined(self.monitor) else None

    def setMonitor(self: Self, value: str) -> Self:
        return self._set(monitor=value)

    def getPatience(self) -> int | None:
        return self.getOrDefault(self.patience) if self.isDefined(self.patience) else None

    def setPatience(self: Self, value: int) -> Self:
        return self._set(patience=value)

    def getMinDelta(self) -> float:
        return float(self.getOrDefault(self.minDelta))

    def setMinDelta(self: Self, value: float) -> Self:
        return self._set(minDelta=value)

    def getKeep(self) -> str:
        return str(self.getOrDefault(self.keep))

    def setKeep(self: Self, value: str) -> Self:
        return self._set(keep=value)

    def getWeightDecay(self) -> float:
        return float(self.getOrDefault(self.weightDecay))

    def setWeightDecay(self: Self, value: float) -> Self:
        return self._set(weightDecay=value)

    def getMaxGradNorm(self) -> float | None:
        return self.getOrDefault(self.maxGradNorm) if self.isDefined(self.maxGradNorm) else None

    def setMaxGradNorm(self: Self, value: float) -> Self:
        return self._set(maxGradNorm=value)

    def getEpochs(self) -> int:
        return int(self.getOrDefault(self.epochs))

    def setEpochs(self: Self, value: int) -> Self:
        return self._set(epochs=value)

    def getBatchSize(self) -> int:
        return int(self.getOrDefault(self.batchSize))

    def setBatchSize(self: Self, value: int) -> Self:
        return self._set(batchSize=value)

    def getShuffle(self) -> bool:
        return bool(self.getOrDefault(self.shuffle))

    def setShuffle(self: Self, value: bool) -> Self:
        return self._set(shuffle=value)

    def getNumWorkers(self) -> int:
        return int(self.getOrDefault(self.numWorkers))

    def setNumWorkers(self: Self, value: int) -> Self:
        return self._set(numWorkers=value)

    def getUseGpu(self) -> bool:
        return bool(self.getOrDefault(self.useGpu))

    def setUseGpu(self: Self, value: bool) -> Self:
        return self._set(useGpu=value)

    def getCollective(self) -> str:
        return str(self.getOrDefault(self.collective))

    def setCollective(self: Self, value: str) -> Self:
        return self._set(collective=value)

    def getPrecision(self) -> str:
        return str(self.getOrDefault(self.precision))

    def setPrecision(self: Self, value: str) -> Self:
        return self._set(precision=value)

    def getGradientCheckpointing(self) -> str | list[str]:
        value: str | list[str] = self.getOrDefault(self.gradientCheckpointing)
        return value

    def setGradientCheckpointing(self: Self, value: str | int | list[str]) -> Self:
        return self._set(gradientCheckpointing=value)

    def getActivationOffload(self) -> str:
        return str(self.getOrDefault(self.activationOffload))

    def setActivationOffload(self: Self, value: str) -> Self:
        return self._set(activationOffload=value)

    def getActivationCompression(self) -> str:
        return str(self.getOrDefault(self.activationCompression))

    def setActivationCompression(self: Self, value: str) -> Self:
        return self._set(activationCompression=value)

    def getSharding(self) -> str:
        return str(self.getOrDefault(self.sharding))

    def setSharding(self: Self, value: str) -> Self:
        return self._set(sharding=value)

    def getGradientAccumulation(self) -> int:
        return int(self.getOrDefault(self.gradientAccumulation))

    def setGradientAccumulation(self: Self, value: int) -> Self:
        return self._set(gradientAccumulation=value)

    def getMemoryBudget(self) -> int | None:
        """In bytes."""
        return self.getOrDefault(self.memoryBudget) if self.isDefined(self.memoryBudget) else None

    def setMemoryBudget(self: Self, value: int | str) -> Self:
        return self._set(memoryBudget=value)

    def getStorageUri(self) -> str | None:
        return self.getOrDefault(self.storageUri) if self.isDefined(self.storageUri) else None

    def setStorageUri(self: Self, value: str) -> Self:
        return self._set(storageUri=value)

    def getReader(self) -> str:
        return str(self.getOrDefault(self.reader))

    def setReader(self: Self, value: str) -> Self:
        return self._set(reader=value)

    def getShowProgress(self) -> bool:
        return bool(self.getOrDefault(self.showProgress))

    def setShowProgress(self: Self, value: bool) -> Self:
        return self._set(showProgress=value)


class _MultiLabelParams(Params):
    """Several labels, one for each output of the network."""

    labelCols = param(
        "labelCols",
        "one label column for each output of the network, instead of labelCol",
        to_names("labelCols"),
    )
    lossWeights = param(
        "lossWeights", "factor of each label's loss in their sum; unset: 1 each", TypeConverters.toListFloat
    )

    def getLabelCols(self) -> list[str] | None:
        return list(self.getOrDefault(self.labelCols)) if self.isDefined(self.labelCols) else None

    def setLabelCols(self: Self, value: list[str]) -> Self:
        return self._set(labelCols=value)

    def getLossWeights(self) -> list[float] | None:
        return list(self.getOrDefault(self.lossWeights)) if self.isDefined(self.lossWeights) else None

    def setLossWeights(self: Self, value: list[float]) -> Self:
        return self._set(lossWeights=value)


def default_collective() -> str:
    """Horovod where it is installed, torch.distributed else."""
    from importlib.util import find_spec

    return "horovod" if find_spec("horovod") is not None else "torch"
