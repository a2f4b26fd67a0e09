# Written by scripts/show_stubs.py from window_params.py.
# mypy: disable-error-code="assignment, override"
from collections.abc import Sequence
from typing import Any, Literal
from pyspark.ml.param import Param
from ringspark.estimators.stages.declared import DeclaredParams, Getter, Setter
from pyspark.ml.param.shared import HasLabelCol, HasOutputCol, HasOutputCols

def days_and_microseconds(text: str) -> tuple[int, int]: ...

class WindowParams(DeclaredParams, HasOutputCol, HasOutputCols, HasLabelCol):
    def __init__(self, *,
        handleInvalid: Literal['error', 'skip'] | None = ..., labelCol: str | None = ..., timeCol: str | None = ...,
        keyCols: str | Sequence[str] | None = ..., valueCols: str | Sequence[str] | None = ..., steps: int | None = ...,
        stride: int | None = ..., targetCol: str | None = ..., horizon: int | None = ..., maxGap: Any = ...,
        outputCol: str | None = ..., outputCols: str | Sequence[str] | None = ..., targetTimeCol: str | None = ...,
        handleUnlabeled: Literal['skip', 'keep'] | None = ...
    ) -> None: ...
    keyCols: Param[Any]; getKeyCols: Getter[list[str]]; setKeyCols: Setter[str | Sequence[str] | None]
    timeCol: Param[Any]; getTimeCol: Getter[str]; setTimeCol: Setter[str | None]
    valueCols: Param[Any]; getValueCols: Getter[list[str]]; setValueCols: Setter[str | Sequence[str] | None]
    steps: Param[Any]; getSteps: Getter[int]; setSteps: Setter[int | None]
    stride: Param[Any]; getStride: Getter[int]; setStride: Setter[int | None]
    targetCol: Param[Any]; getTargetCol: Getter[str | None]; setTargetCol: Setter[str | None]
    horizon: Param[Any]; getHorizon: Getter[int]; setHorizon: Setter[int | None]
    maxGap: Param[Any]; getMaxGap: Getter[str | int | None]; setMaxGap: Setter[Any]
    outputCol: Param[Any]; getOutputCol: Getter[str]; setOutputCol: Setter[str | None]
    outputCols: Param[Any]; getOutputCols: Getter[list[str]]; setOutputCols: Setter[str | Sequence[str] | None]
    labelCol: Param[Any]; getLabelCol: Getter[str]; setLabelCol: Setter[str | None]
    targetTimeCol: Param[Any]; getTargetTimeCol: Getter[str | None]; setTargetTimeCol: Setter[str | None]
    handleInvalid: Param[Any]; getHandleInvalid: Getter[Literal['error', 'skip']]; setHandleInvalid: Setter[Literal['error', 'skip'] | None]
    handleUnlabeled: Param[Any]; getHandleUnlabeled: Getter[Literal['skip', 'keep']]; setHandleUnlabeled: Setter[Literal['skip', 'keep'] | None]
