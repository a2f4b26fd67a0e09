# Written by scripts/show_stubs.py from autoencoder_params.py.
# mypy: disable-error-code="assignment, override"
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from pyspark.ml.param import Param
from ringspark.estimators.stages.declared import DeclaredParams, Getter, Setter
from ringspark.estimators.options.finetuning import LoRA, Pretrained
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.privacy import Privacy
from ringspark.estimators.options.scaling import ScaleLearningRate
from ringspark.estimators.options.sync import Sync

class AutoencoderParams(DeclaredParams):
    def __init__(self, *,
        featuresCol: str | None = ..., inputCols: str | Sequence[str] | None = ...,
        handleInvalid: Literal['error', 'skip', 'keep'] | None = ..., monotone: Any = ..., columns: Any = ...,
        weightCol: str | None = ..., validationIndicatorCol: str | None = ..., validationFraction: float | None = ...,
        timeCol: str | None = ..., storageUri: str | None = ..., data: Literal['copy', 'inPlace', 'auto'] | None = ...,
        reader: str | None = ..., cache: Literal['auto', 'memory', 'disk', 'none'] | None = ...,
        predictionCol: str | None = ..., predictionCols: str | Sequence[str] | None = ..., innerCols: Any = ...,
        contributionsCol: str | None = ..., inferenceBatchSize: int | None = ...,
        inferenceOffload: Literal['none', 'disk'] | None = ...,
        inferencePrecision: Literal['fp32', 'bf16', 'int8'] | None = ..., inferenceUseGpu: bool | None = ..., model: Any = ...,
        transformInPrediction: Any = ..., metrics: Any = ..., loss: Any = ..., transformBatch: Any = ...,
        initialModel: Any = ..., initialState: Literal['weights', 'optimizer'] | None = ..., teacher: Any = ...,
        freeze: Any = ..., lora: LoRA | str | int | Mapping[str, Any] | None = ...,
        pretrained: Pretrained | str | int | Mapping[str, Any] | None = ..., temperature: float | None = ...,
        alpha: float | None = ..., emaDecay: float | None = ..., optimizer: Any = ..., lrSchedule: Any = ...,
        parameterGroups: Any = ..., learningRate: float | None = ...,
        scaleLearningRate: ScaleLearningRate | str | int | Mapping[str, Any] | None = ..., warmupSteps: int | None = ...,
        weightDecay: float | None = ..., maxGradNorm: float | None = ..., epochs: int | None = ..., batchSize: int | None = ...,
        batchSizeSchedule: Any = ..., gradientAccumulation: int | None = ...,
        privacy: Privacy | str | int | Mapping[str, Any] | None = ..., noiseScale: bool | None = ..., seed: int | None = ...,
        shuffle: bool | None = ..., patience: int | None = ..., minDelta: float | None = ...,
        timeBudgetSeconds: float | None = ..., keep: Literal['last', 'best'] | None = ..., monitor: str | None = ...,
        trainingStep: Any = ..., callbacks: Any = ..., numWorkers: int | None = ...,
        sync: Sync | str | int | Mapping[str, Any] | None = ...,
        parallelism: Mesh | str | int | Mapping[str, Any] | Literal['auto'] | None = ..., useGpu: bool | None = ...,
        launch: Literal['barrier', 'tasks'] | None = ..., collective: str | None = ...,
        compile: bool | Literal['default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs'] | None = ...,
        precision: Literal['fp32', 'bf16', 'fp16'] | None = ..., gradientCheckpointing: Any = ...,
        activationOffload: Literal['none', 'host', 'disk'] | None = ...,
        activationCompression: Literal['none', 'bits', 'int8', 'fp8'] | None = ..., memoryBudget: Any = ...,
        checkpointEverySteps: int | None = ..., checkpointEverySeconds: float | None = ...,
        checkpointEveryEpochs: int | None = ..., keepCheckpoints: int | None = ..., keepTrainingState: bool | None = ...,
        certify: bool | None = ..., onNonFinite: Literal['stop', 'skip', 'rollback'] | None = ...,
        maxRestarts: int | None = ..., minWorkers: int | None = ..., maxWorkers: int | None = ...,
        timeoutSeconds: float | None = ..., runUri: str | None = ..., resume: bool | None = ...,
        logEverySteps: int | None = ..., timelineEverySteps: int | None = ..., profileSteps: Any = ...,
        showProgress: bool | None = ..., tracking: Any = ..., noise: float | None = ..., mask: float | None = ...,
        maskValue: float | Sequence[float] | None = ..., maskId: int | None = ...
    ) -> None: ...
    noise: Param[Any]; getNoise: Getter[float]; setNoise: Setter[float | None]
    mask: Param[Any]; getMask: Getter[float | None]; setMask: Setter[float | None]
    maskValue: Param[Any]; getMaskValue: Getter[float | list[float] | None]; setMaskValue: Setter[float | Sequence[float] | None]
    maskId: Param[Any]; getMaskId: Getter[int | None]; setMaskId: Setter[int | None]
