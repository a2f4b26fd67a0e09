"""The Spark ML Params of the estimators and models: names, types, defaults, getters and setters.

Params that hold Python objects (`model`, `loss`, `optimizer`, `lrSchedule` when callables) live in
Spark's param map like any other, so `copy` and `fit(df, {param: value})` treat them alike;
`persistence.py` gives them a form on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasInputCols,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
    HasValidationIndicatorCol,
    HasWeightCol,
)
from torch import nn

from ringspark.estimators.training.losses import LOSSES
from ringspark.estimators.training.optimizers import OPTIMIZERS, check_name
from ringspark.estimators.training.schedules import SCHEDULES
from ringspark.models import ModelSpec
from ringspark.pipelines import default_engine

Self = TypeVar("Self", bound=Params)


def _to_model(value: Any) -> ModelSpec | nn.Module:
    if isinstance(value, ModelSpec | nn.Module):
        return value
    raise TypeError(
        f"model must be a ModelSpec or an nn.Module, got {type(value).__name__}; "
        "pass an instance such as ModelSpec('mlp', {...}) or MyNet()"
    )


def _to_name_or_callable(kind: str, known: Sequence[str]) -> Any:
    def convert(value: Any) -> Any:
        if isinstance(value, str):
            check_name(kind, value, known)
            return value
        if callable(value):
            return value
        raise TypeError(f"{kind} must be a name or a callable, got {type(value).__name__}")

    return convert


def _to_choice(kind: str, *choices: str) -> Any:
    def convert(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{kind} must be one of {list(choices)}, got {value!r}")
        return str(value)

    return convert


def _to_policy(value: Any) -> str:
    """`gradientCheckpointing`: a name, or a segment count given as an int or a string."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"gradientCheckpointing must be a name or a segment count, got {value!r}")
    return str(value)


def _param(name: str, doc: str, converter: Any) -> Param[Any]:
    return Param(Params._dummy(), name, doc, converter)


class _InputParams(HasFeaturesCol, HasInputCols, HasPredictionCol):
    """What estimator and model share: the columns that go in and come out, and the network."""

    model = _param("model", "the network: a ModelSpec or an nn.Module instance", _to_model)
    inferenceBatchSize = _param(
        "inferenceBatchSize", "rows per forward pass in transform", TypeConverters.toInt
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._setDefault(featuresCol="features", predictionCol="prediction", inferenceBatchSize=4096)

    def getModel(self) -> ModelSpec | nn.Module:
        return self.getOrDefault(self.model)  # type: ignore[no-any-return]

    def getInferenceBatchSize(self) -> int:
        return int(self.getOrDefault(self.inferenceBatchSize))

    def setInferenceBatchSize(self: Self, value: int) -> Self:
        return self._set(inferenceBatchSize=value)

    def setFeaturesCol(self: Self, value: str) -> Self:
        return self._set(featuresCol=value)

    def setInputCols(self: Self, value: list[str]) -> Self:
        return self._set(inputCols=value)

    def setPredictionCol(self: Self, value: str) -> Self:
        return self._set(predictionCol=value)

    def inputColumns(self) -> list[str]:
        """The columns that become the positional arguments of `forward`, in order."""
        if self.isSet(self.inputCols):
            return list(self.getInputCols())
        return [self.getOrDefault(self.featuresCol)]


class _ClassifierParams(HasRawPredictionCol, HasProbabilityCol):
    """The further output columns of a classifier."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._setDefault(rawPredictionCol="rawPrediction", probabilityCol="probability")

    def setRawPredictionCol(self: Self, value: str) -> Self:
        return self._set(rawPredictionCol=value)

    def setProbabilityCol(self: Self, value: str) -> Self:
        return self._set(probabilityCol=value)


class _TrainingParams(_InputParams, HasLabelCol, HasWeightCol, HasValidationIndicatorCol, HasSeed):
    """How an estimator trains. Defaults stand in `__init__`."""

    loss = _param(
        "loss",
        "loss by name, a callable (output, label) -> one value per row, or an nn loss; "
        "'auto' takes cross entropy for classes, mean squared error else",
        _to_name_or_callable("loss", ["auto", *LOSSES]),
    )
    optimizer = _param(
        "optimizer",
        "optimizer by name, or a callable parameters -> torch.optim.Optimizer",
        _to_name_or_callable("optimizer", list(OPTIMIZERS)),
    )
    learningRate = _param("learningRate", "learning rate; never scaled by numWorkers", TypeConverters.toFloat)
    lrSchedule = _param(
        "lrSchedule",
        "schedule by name, or a callable (step, num_steps) -> factor on the learning rate",
        _to_name_or_callable("lrSchedule", list(SCHEDULES)),
    )
    weightDecay = _param("weightDecay", "weight decay of the optimizer", TypeConverters.toFloat)
    maxGradNorm = _param(
        "maxGradNorm", "bound of the gradient's 2-norm; unset: no clipping", TypeConverters.toFloat
    )
    epochs = _param("epochs", "passes over the training rows", TypeConverters.toInt)
    batchSize = _param("batchSize", "rows per optimizer step over all workers together", TypeConverters.toInt)
    shuffle = _param("shuffle", "whether each epoch has its own order of rows", TypeConverters.toBoolean)
    numWorkers = _param("numWorkers", "workers that train at the same time", TypeConverters.toInt)
    useGpu = _param("useGpu", "whether each worker trains on a GPU of its own", TypeConverters.toBoolean)
    collective = _param(
        "collective",
        "how gradients are summed: 'horovod' or 'torch' ('local' for one worker)",
        _to_choice("collective", "horovod", "torch", "local"),
    )
    precision = _param(
        "precision",
        "'fp32', 'bf16' or 'fp16' (with loss scaling)",
        _to_choice("precision", "fp32", "bf16", "fp16"),
    )
    gradientCheckpointing = _param(
        "gradientCheckpointing",
        "activations to recompute instead of keeping: 'none', 'sqrt', 'all' or a segment count",
        _to_policy,
    )
    gradientAccumulation = _param(
        "gradientAccumulation", "micro-batches per optimizer step", TypeConverters.toInt
    )
    storageUri = _param(
        "storageUri",
        "folder that all workers reach, for shards and runs; unset: a temporary one, local masters only",
        TypeConverters.toString,
    )
    reader = _param(
        "reader",
        "engine that reads the shards: 'petastorm' or 'arrow'",
        _to_choice("reader", "petastorm", "arrow"),
    )
    timeoutSeconds = _param(
        "timeoutSeconds", "how long a worker waits for the others in one operation", TypeConverters.toFloat
    )
    showProgress = _param(
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
            reader=default_engine(),
            timeoutSeconds=600.0,
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

    def getGradientCheckpointing(self) -> str:
        return str(self.getOrDefault(self.gradientCheckpointing))

    def setGradientCheckpointing(self: Self, value: str | int) -> Self:
        return self._set(gradientCheckpointing=value)

    def getGradientAccumulation(self) -> int:
        return int(self.getOrDefault(self.gradientAccumulation))

    def setGradientAccumulation(self: Self, value: int) -> Self:
        return self._set(gradientAccumulation=value)

    def getStorageUri(self) -> str | None:
        return self.getOrDefault(self.storageUri) if self.isDefined(self.storageUri) else None

    def setStorageUri(self: Self, value: str) -> Self:
        return self._set(storageUri=value)

    def getReader(self) -> str:
        return str(self.getOrDefault(self.reader))

    def setReader(self: Self, value: str) -> Self:
        return self._set(reader=value)

    def getTimeoutSeconds(self) -> float:
        return float(self.getOrDefault(self.timeoutSeconds))

    def setTimeoutSeconds(self: Self, value: float) -> Self:
        return self._set(timeoutSeconds=value)

    def getShowProgress(self) -> bool:
        return bool(self.getOrDefault(self.showProgress))

    def setShowProgress(self: Self, value: bool) -> Self:
        return self._set(showProgress=value)


def default_collective() -> str:
    """Horovod where it is installed, torch.distributed else."""
    from importlib.util import find_spec

    return "horovod" if find_spec("horovod") is not None else "torch"


def set_params(stage: Params, keywords: dict[str, Any]) -> None:
    """Sets constructor keywords; None means unset.

    Raises:
        TypeError: A keyword is no Param; names the nearest one. Or its value has the wrong type.
    """
    names = [param.name for param in stage.params]
    for name in keywords:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; its Params are {names}"
            raise TypeError(f"{type(stage).__name__} has no Param {name!r}{hint}")
    stage._set(**{name: value for name, value in keywords.items() if value is not None})
