"""The Params that estimators and models share: the columns that go in and come out, and the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pyspark.ml.param import Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasInputCols,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
)
from torch import nn

from ringspark.estimators.stages.converters import param, to_choice, to_count, to_model
from ringspark.models import ModelSpec

Self = TypeVar("Self", bound=Params)


class _ModelParams(HasFeaturesCol, HasInputCols, HasPredictionCol):
    """What estimator and model share: the columns that go in and come out, and the network."""

    model = param("model", "the network: a ModelSpec or an nn.Module instance", to_model)
    predictionCols = param(
        "predictionCols",
        "prediction columns of a network with several outputs, one a tensor; instead of predictionCol",
        TypeConverters.toListString,
    )
    handleInvalid = param(
        "handleInvalid",
        "what transform does with rows that have a null or NaN in an input: 'error' raises, 'skip' leaves "
        "them out, 'keep' leaves them in with null predictions",
        to_choice("handleInvalid", "error", "skip", "keep"),
    )
    inferenceBatchSize = param(
        "inferenceBatchSize", "rows per forward pass in transform", to_count("inferenceBatchSize")
    )
    inferenceUseGpu = param(
        "inferenceUseGpu",
        "whether transform computes on a GPU: the one that Spark gave the task, else one by partition",
        TypeConverters.toBoolean,
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # 2048 rows: the activations of a layer of a few hundred numbers stay in a core's cache.
        self._setDefault(
            featuresCol="features",
            predictionCol="prediction",
            handleInvalid="error",
            inferenceBatchSize=2048,
            inferenceUseGpu=False,
        )

    def _set(self: Self, **values: Any) -> Self:
        """Sets Params by name; None clears one, in setters as in constructors."""
        for name in [name for name, value in values.items() if value is None]:
            self.clear(self.getParam(name))
            del values[name]
        super()._set(**values)
        return self

    def getModel(self) -> ModelSpec | nn.Module:
        return self.getOrDefault(self.model)  # type: ignore[no-any-return]

    def getPredictionCols(self) -> list[str]:
        return list(self.getOrDefault(self.predictionCols))

    def setPredictionCols(self: Self, value: list[str]) -> Self:
        return self._set(predictionCols=value)

    def getHandleInvalid(self) -> str:
        return str(self.getOrDefault(self.handleInvalid))

    def setHandleInvalid(self: Self, value: str) -> Self:
        return self._set(handleInvalid=value)

    def getInferenceBatchSize(self) -> int:
        return int(self.getOrDefault(self.inferenceBatchSize))

    def setInferenceBatchSize(self: Self, value: int) -> Self:
        return self._set(inferenceBatchSize=value)

    def getInferenceUseGpu(self) -> bool:
        return bool(self.getOrDefault(self.inferenceUseGpu))

    def setInferenceUseGpu(self: Self, value: bool) -> Self:
        return self._set(inferenceUseGpu=value)

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

    def predictionColumns(self, num_outputs: int) -> list[str]:
        """One prediction column per output of the network.

        Raises:
            ValueError: There are more or fewer outputs than names.
        """
        if self.isSet(self.predictionCols):
            names = self.getPredictionCols()
            if len(names) != num_outputs or len(set(names)) != len(names) or not all(names):
                raise ValueError(
                    f"predictionCols must name one column for each of the model's {num_outputs} outputs, "
                    f"got {names}"
                )
            return names
        if num_outputs != 1:
            raise ValueError(
                f"the model has {num_outputs} outputs, predictionCol names one column; set "
                f"predictionCols=[...] with {num_outputs} names"
            )
        return [self.getPredictionCol()]


class _ClassifierParams(HasRawPredictionCol, HasProbabilityCol):
    """The further output columns of a classifier, and how it decides."""

    thresholds = param(
        "thresholds",
        "one number per class: the class with the largest probability / threshold is predicted; none may be "
        "negative, one at most 0",
        TypeConverters.toListFloat,
    )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._setDefault(rawPredictionCol="rawPrediction", probabilityCol="probability")

    def setRawPredictionCol(self: Self, value: str) -> Self:
        return self._set(rawPredictionCol=value)

    def setProbabilityCol(self: Self, value: str) -> Self:
        return self._set(probabilityCol=value)

    def getThresholds(self) -> list[float]:
        return list(self.getOrDefault(self.thresholds))

    def setThresholds(self: Self, value: list[float]) -> Self:
        return self._set(thresholds=value)


def check_distinct(names: Sequence[str]) -> None:
    """Refuses output columns of one name, as Spark sees names.

    Raises:
        ValueError: Names it.
    """
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise ValueError(f"the output columns must differ from each other, got {list(names)}")
        seen.add(name.lower())


def check_thresholds(thresholds: Sequence[float], num_classes: int) -> None:
    """Refuses thresholds that do not fit the classes.

    Raises:
        ValueError: Their number, a negative one, or more than one zero.
    """
    if len(thresholds) != num_classes:
        raise ValueError(
            f"thresholds must hold one number for each of the {num_classes} classes, got {len(thresholds)}"
        )
    if not all(threshold >= 0 for threshold in thresholds) or sum(t == 0 for t in thresholds) > 1:
        raise ValueError(
            f"thresholds must not be negative and at most one may be 0, got {list(thresholds)}; "
            "a class's threshold is what its probability is divided by"
        )
