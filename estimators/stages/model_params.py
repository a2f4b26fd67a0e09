"""The Params that estimators and models share: the columns that go in and come out, and the network."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.types import StructType

from ringspark.estimators.columns.schema import FieldIndex
from ringspark.estimators.inference.precision import check_int8
from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.stages.params import ModelSettings, TrainingParams


class _ModelParams(ModelSettings):
    def _check_precision(self) -> None:
        """Raises ValueError if the network cannot predict in `inferencePrecision`."""
        if self.getInferencePrecision() != "int8":
            return
        if self.getInferenceUseGpu():
            raise ValueError(
                "inferencePrecision='int8' runs on the CPU, not with inferenceUseGpu; set 'bf16'"
            )
        if self.getInferenceOffload() != "none":
            raise ValueError(
                "inferencePrecision='int8' keeps quantized weights in memory, so inferenceOffload must be "
                f"'none', got {self.getInferenceOffload()!r}; set inferencePrecision='bf16'"
            )
        check_int8(self.getModel())

    def inputColumns(self) -> list[str]:
        """Returns the columns that become the positional arguments of `forward`, in order."""
        names = list(self.getInputCols() or ()) if self.isSet(self.inputCols) else [self.getFeaturesCol()]
        offset = value_of(self, "offsetCol") if self.hasParam("offsetCol") else None
        return [*names, offset] if offset else names

    def _find_offset(self, fields: FieldIndex) -> str | None:
        """Returns the name of the offset's column; None if there is no offset."""
        given = value_of(self, "offsetCol") if self.hasParam("offsetCol") else None
        return fields.find(given, "offsetCol").name if given else None

    def predictionColumns(self, num_outputs: int) -> list[str]:
        """Returns one prediction column per output of the network."""
        names = self.getPredictionCols()
        if names is not None:
            if len(names) != num_outputs or len(set(names)) != len(names) or not all(names):
                raise ValueError(
                    f"predictionCols must name one column for each of the model's {num_outputs} outputs, "
                    f"got {names}"
                )
            return names
        if num_outputs != 1:
            raise ValueError(
                f"the model has {num_outputs} outputs, but predictionCol names one column; set "
                f"predictionCols=[...] with {num_outputs} names"
            )
        return [self.getPredictionCol()]


class _EstimatorParams(_ModelParams, TrainingParams):
    """The Params of all estimators."""


def check_distinct(names: Sequence[str], exact: bool = False) -> None:
    """Raises ValueError if two output columns have the same name. `exact`: whether case counts."""
    if len({name if exact else name.lower() for name in names}) < len(names):
        raise ValueError(f"the output columns must differ from each other, got {list(names)}")


def check_free(schema: StructType, names: Sequence[str], exact: bool) -> None:
    """Raises ValueError if an output column exists already or two are equal. `exact`: whether case counts."""
    check_distinct(names, exact)
    fields = FieldIndex(schema, exact)
    for name in names:
        if fields.all(name):
            raise ValueError(
                f"Output column {name} already exists; drop it first, or give the model another name "
                f"for its output"
            )


def check_thresholds(thresholds: Sequence[float], num_classes: int) -> None:
    if len(thresholds) != num_classes:
        raise ValueError(
            f"thresholds must hold one number for each of the {num_classes} classes, got {len(thresholds)}"
        )
    if not all(threshold >= 0 for threshold in thresholds) or sum(t == 0 for t in thresholds) > 1:
        raise ValueError(
            f"thresholds must not be negative and at most one may be 0, got {list(thresholds)}; "
            "the probability of each class is divided by its threshold"
        )
