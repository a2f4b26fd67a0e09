# Written by scripts/show_stubs.py from params.py.
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
from pyspark.ml.param.shared import HasFeaturesCol, HasInputCols, HasLabelCol, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol, HasSeed, HasValidationIndicatorCol, HasWeightCol
from ringspark.pipelines.kinds import Kind

class ModelSettings(DeclaredParams, HasFeaturesCol, HasInputCols, HasPredictionCol):
    model: Param[Any]; getModel: Getter[Any]
    transformInPrediction: Param[Any]; getTransformInPrediction: Getter[Any]; setTransformInPrediction: Setter[Any]
    featuresCol: Param[Any]; getFeaturesCol: Getter[str]; setFeaturesCol: Setter[str | None]
    inputCols: Param[Any]; getInputCols: Getter[list[str] | None]; setInputCols: Setter[str | Sequence[str] | None]
    handleInvalid: Param[Any]; getHandleInvalid: Getter[Literal['error', 'skip', 'keep']]; setHandleInvalid: Setter[Literal['error', 'skip', 'keep'] | None]
    predictionCol: Param[Any]; getPredictionCol: Getter[str]; setPredictionCol: Setter[str | None]
    predictionCols: Param[Any]; getPredictionCols: Getter[list[str] | None]; setPredictionCols: Setter[str | Sequence[str] | None]
    innerCols: Param[Any]; getInnerCols: Getter[dict[str, Any] | None]; setInnerCols: Setter[Any]
    contributionsCol: Param[Any]; getContributionsCol: Getter[str | None]; setContributionsCol: Setter[str | None]
    inferenceBatchSize: Param[Any]; getInferenceBatchSize: Getter[int]; setInferenceBatchSize: Setter[int | None]
    inferenceOffload: Param[Any]; getInferenceOffload: Getter[Literal['none', 'disk']]; setInferenceOffload: Setter[Literal['none', 'disk'] | None]
    inferencePrecision: Param[Any]; getInferencePrecision: Getter[Literal['fp32', 'bf16', 'int8']]; setInferencePrecision: Setter[Literal['fp32', 'bf16', 'int8'] | None]
    inferenceUseGpu: Param[Any]; getInferenceUseGpu: Getter[bool]; setInferenceUseGpu: Setter[bool | None]

class OffsetParams(DeclaredParams):
    offsetCol: Param[Any]; getOffsetCol: Getter[str | None]; setOffsetCol: Setter[str | None]

class EvaluatedParams(OffsetParams, HasLabelCol):
    labelCol: Param[Any]; getLabelCol: Getter[str]; setLabelCol: Setter[str | None]
    metrics: Param[Any]; getMetrics: Getter[list[Any]]; setMetrics: Setter[Any]

class ClassifierParams(DeclaredParams, HasRawPredictionCol, HasProbabilityCol):
    rawPredictionCol: Param[Any]; getRawPredictionCol: Getter[str]; setRawPredictionCol: Setter[str | None]
    probabilityCol: Param[Any]; getProbabilityCol: Getter[str]; setProbabilityCol: Setter[str | None]
    predictedLabelCol: Param[Any]; getPredictedLabelCol: Getter[str]; setPredictedLabelCol: Setter[str | None]
    thresholds: Param[Any]; getThresholds: Getter[list[float] | None]; setThresholds: Setter[Sequence[float] | None]

class RegressorParams(DeclaredParams):
    quantiles: Param[Any]; getQuantiles: Getter[list[float] | None]; setQuantiles: Setter[Sequence[float] | None]
    quantilesCol: Param[Any]; getQuantilesCol: Getter[str]; setQuantilesCol: Setter[str | None]
    intervals: Param[Any]; getIntervals: Getter[float | None]; setIntervals: Setter[float | None]
    intervalCol: Param[Any]; getIntervalCol: Getter[str]; setIntervalCol: Setter[str | None]
    intervalGroupCol: Param[Any]; getIntervalGroupCol: Getter[str | None]; setIntervalGroupCol: Setter[str | None]

class RegressionModelParams(DeclaredParams):
    quantiles: Param[Any]; getQuantiles: Getter[list[float] | None]
    quantilesCol: Param[Any]; getQuantilesCol: Getter[str]; setQuantilesCol: Setter[str | None]
    intervals: Param[Any]; getIntervals: Getter[float | None]
    intervalCol: Param[Any]; getIntervalCol: Getter[str]; setIntervalCol: Setter[str | None]
    intervalGroupCol: Param[Any]; getIntervalGroupCol: Getter[str | None]; setIntervalGroupCol: Setter[str | None]
    intervalCorrections: Param[Any]; getIntervalCorrections: Getter[dict[str, Any] | None]

class TrainingParams(DeclaredParams, HasWeightCol, HasValidationIndicatorCol, HasSeed):
    def getColumns(self) -> dict[str, Kind]: ...
    monotone: Param[Any]; getMonotone: Getter[dict[str, Any] | None]; setMonotone: Setter[Any]
    columns: Param[Any]; setColumns: Setter[Any]
    weightCol: Param[Any]; getWeightCol: Getter[str | None]; setWeightCol: Setter[str | None]
    validationIndicatorCol: Param[Any]; getValidationIndicatorCol: Getter[str | None]; setValidationIndicatorCol: Setter[str | None]
    validationFraction: Param[Any]; getValidationFraction: Getter[float | None]; setValidationFraction: Setter[float | None]
    timeCol: Param[Any]; getTimeCol: Getter[str | None]; setTimeCol: Setter[str | None]
    storageUri: Param[Any]; getStorageUri: Getter[str | None]; setStorageUri: Setter[str | None]
    data: Param[Any]; getData: Getter[Literal['copy', 'inPlace', 'auto']]; setData: Setter[Literal['copy', 'inPlace', 'auto'] | None]
    reader: Param[Any]; getReader: Getter[str]; setReader: Setter[str | None]
    cache: Param[Any]; getCache: Getter[Literal['auto', 'memory', 'disk', 'none']]; setCache: Setter[Literal['auto', 'memory', 'disk', 'none'] | None]
    model: Param[Any]; getModel: Getter[Any]; setModel: Setter[Any]
    transformInPrediction: Param[Any]; getTransformInPrediction: Getter[Any]; setTransformInPrediction: Setter[Any]
    metrics: Param[Any]; getMetrics: Getter[list[Any]]; setMetrics: Setter[Any]
    loss: Param[Any]; getLoss: Getter[Any]; setLoss: Setter[Any]
    transformBatch: Param[Any]; getTransformBatch: Getter[Any]; setTransformBatch: Setter[Any]
    initialModel: Param[Any]; getInitialModel: Getter[Any]; setInitialModel: Setter[Any]
    initialState: Param[Any]; getInitialState: Getter[Literal['weights', 'optimizer']]; setInitialState: Setter[Literal['weights', 'optimizer'] | None]
    teacher: Param[Any]; getTeacher: Getter[Any]; setTeacher: Setter[Any]
    freeze: Param[Any]; getFreeze: Getter[list[str]]; setFreeze: Setter[Any]
    lora: Param[Any]; getLora: Getter[LoRA | None]; setLora: Setter[LoRA | str | int | Mapping[str, Any] | None]
    pretrained: Param[Any]; getPretrained: Getter[Pretrained | None]; setPretrained: Setter[Pretrained | str | int | Mapping[str, Any] | None]
    temperature: Param[Any]; getTemperature: Getter[float]; setTemperature: Setter[float | None]
    alpha: Param[Any]; getAlpha: Getter[float]; setAlpha: Setter[float | None]
    emaDecay: Param[Any]; getEmaDecay: Getter[float | None]; setEmaDecay: Setter[float | None]
    optimizer: Param[Any]; getOptimizer: Getter[Any]; setOptimizer: Setter[Any]
    lrSchedule: Param[Any]; getLrSchedule: Getter[Any]; setLrSchedule: Setter[Any]
    parameterGroups: Param[Any]; getParameterGroups: Getter[list[dict[str, Any]]]; setParameterGroups: Setter[Any]
    learningRate: Param[Any]; getLearningRate: Getter[float]; setLearningRate: Setter[float | None]
    scaleLearningRate: Param[Any]; getScaleLearningRate: Getter[ScaleLearningRate | None]; setScaleLearningRate: Setter[ScaleLearningRate | str | int | Mapping[str, Any] | None]
    warmupSteps: Param[Any]; getWarmupSteps: Getter[int]; setWarmupSteps: Setter[int | None]
    weightDecay: Param[Any]; getWeightDecay: Getter[float]; setWeightDecay: Setter[float | None]
    maxGradNorm: Param[Any]; getMaxGradNorm: Getter[float | None]; setMaxGradNorm: Setter[float | None]
    epochs: Param[Any]; getEpochs: Getter[int]; setEpochs: Setter[int | None]
    batchSize: Param[Any]; getBatchSize: Getter[int]; setBatchSize: Setter[int | None]
    batchSizeSchedule: Param[Any]; getBatchSizeSchedule: Getter[list[list[int]]]; setBatchSizeSchedule: Setter[Any]
    gradientAccumulation: Param[Any]; getGradientAccumulation: Getter[int]; setGradientAccumulation: Setter[int | None]
    privacy: Param[Any]; getPrivacy: Getter[Privacy | None]; setPrivacy: Setter[Privacy | str | int | Mapping[str, Any] | None]
    noiseScale: Param[Any]; getNoiseScale: Getter[bool]; setNoiseScale: Setter[bool | None]
    seed: Param[Any]; getSeed: Getter[int]; setSeed: Setter[int | None]
    shuffle: Param[Any]; getShuffle: Getter[bool]; setShuffle: Setter[bool | None]
    patience: Param[Any]; getPatience: Getter[int | None]; setPatience: Setter[int | None]
    minDelta: Param[Any]; getMinDelta: Getter[float]; setMinDelta: Setter[float | None]
    timeBudgetSeconds: Param[Any]; getTimeBudgetSeconds: Getter[float | None]; setTimeBudgetSeconds: Setter[float | None]
    keep: Param[Any]; getKeep: Getter[Literal['last', 'best']]; setKeep: Setter[Literal['last', 'best'] | None]
    monitor: Param[Any]; getMonitor: Getter[str | None]; setMonitor: Setter[str | None]
    trainingStep: Param[Any]; getTrainingStep: Getter[Any]; setTrainingStep: Setter[Any]
    callbacks: Param[Any]; getCallbacks: Getter[list[Any]]; setCallbacks: Setter[Any]
    numWorkers: Param[Any]; getNumWorkers: Getter[int]; setNumWorkers: Setter[int | None]
    sync: Param[Any]; getSync: Getter[Sync]; setSync: Setter[Sync | str | int | Mapping[str, Any] | None]
    parallelism: Param[Any]; getParallelism: Getter[Mesh | Literal['auto']]; setParallelism: Setter[Mesh | str | int | Mapping[str, Any] | Literal['auto'] | None]
    useGpu: Param[Any]; getUseGpu: Getter[bool]; setUseGpu: Setter[bool | None]
    launch: Param[Any]; getLaunch: Getter[Literal['barrier', 'tasks'] | None]; setLaunch: Setter[Literal['barrier', 'tasks'] | None]
    collective: Param[Any]; getCollective: Getter[str]; setCollective: Setter[str | None]
    compile: Param[Any]; getCompile: Getter[bool | Literal['default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs']]; setCompile: Setter[bool | Literal['default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs'] | None]
    precision: Param[Any]; getPrecision: Getter[Literal['fp32', 'bf16', 'fp16']]; setPrecision: Setter[Literal['fp32', 'bf16', 'fp16'] | None]
    gradientCheckpointing: Param[Any]; getGradientCheckpointing: Getter[str | list[str]]; setGradientCheckpointing: Setter[Any]
    activationOffload: Param[Any]; getActivationOffload: Getter[Literal['none', 'host', 'disk']]; setActivationOffload: Setter[Literal['none', 'host', 'disk'] | None]
    activationCompression: Param[Any]; getActivationCompression: Getter[Literal['none', 'bits', 'int8', 'fp8']]; setActivationCompression: Setter[Literal['none', 'bits', 'int8', 'fp8'] | None]
    memoryBudget: Param[Any]; getMemoryBudget: Getter[int | None]; setMemoryBudget: Setter[Any]
    checkpointEverySteps: Param[Any]; getCheckpointEverySteps: Getter[int | None]; setCheckpointEverySteps: Setter[int | None]
    checkpointEverySeconds: Param[Any]; getCheckpointEverySeconds: Getter[float | None]; setCheckpointEverySeconds: Setter[float | None]
    checkpointEveryEpochs: Param[Any]; getCheckpointEveryEpochs: Getter[int | None]; setCheckpointEveryEpochs: Setter[int | None]
    keepCheckpoints: Param[Any]; getKeepCheckpoints: Getter[int]; setKeepCheckpoints: Setter[int | None]
    keepTrainingState: Param[Any]; getKeepTrainingState: Getter[bool]; setKeepTrainingState: Setter[bool | None]
    certify: Param[Any]; getCertify: Getter[bool]; setCertify: Setter[bool | None]
    onNonFinite: Param[Any]; getOnNonFinite: Getter[Literal['stop', 'skip', 'rollback']]; setOnNonFinite: Setter[Literal['stop', 'skip', 'rollback'] | None]
    maxRestarts: Param[Any]; getMaxRestarts: Getter[int]; setMaxRestarts: Setter[int | None]
    minWorkers: Param[Any]; getMinWorkers: Getter[int | None]; setMinWorkers: Setter[int | None]
    maxWorkers: Param[Any]; getMaxWorkers: Getter[int | None]; setMaxWorkers: Setter[int | None]
    timeoutSeconds: Param[Any]; getTimeoutSeconds: Getter[float]; setTimeoutSeconds: Setter[float | None]
    runUri: Param[Any]; getRunUri: Getter[str | None]; setRunUri: Setter[str | None]
    resume: Param[Any]; getResume: Getter[bool]; setResume: Setter[bool | None]
    logEverySteps: Param[Any]; getLogEverySteps: Getter[int]; setLogEverySteps: Setter[int | None]
    timelineEverySteps: Param[Any]; getTimelineEverySteps: Getter[int | None]; setTimelineEverySteps: Setter[int | None]
    profileSteps: Param[Any]; getProfileSteps: Getter[list[int] | None]; setProfileSteps: Setter[Any]
    showProgress: Param[Any]; getShowProgress: Getter[bool]; setShowProgress: Setter[bool | None]
    tracking: Param[Any]; getTracking: Getter[list[Any]]; setTracking: Setter[Any]

class LabelParams(DeclaredParams, HasLabelCol):
    labelCol: Param[Any]; getLabelCol: Getter[str]; setLabelCol: Setter[str | None]

class MultiLabelParams(LabelParams):
    labelCols: Param[Any]; getLabelCols: Getter[list[str] | None]; setLabelCols: Setter[str | Sequence[str] | None]
    lossWeights: Param[Any]; getLossWeights: Getter[list[float] | None]; setLossWeights: Setter[Sequence[float] | None]

class ClassifierKeywords:
    def __init__(self, *,
        featuresCol: str | None = ..., inputCols: str | Sequence[str] | None = ...,
        handleInvalid: Literal['error', 'skip', 'keep'] | None = ..., labelCol: str | None = ..., offsetCol: str | None = ...,
        monotone: Any = ..., columns: Any = ..., weightCol: str | None = ..., validationIndicatorCol: str | None = ...,
        validationFraction: float | None = ..., timeCol: str | None = ..., storageUri: str | None = ...,
        data: Literal['copy', 'inPlace', 'auto'] | None = ..., reader: str | None = ...,
        cache: Literal['auto', 'memory', 'disk', 'none'] | None = ..., predictionCol: str | None = ...,
        predictionCols: str | Sequence[str] | None = ..., innerCols: Any = ..., contributionsCol: str | None = ...,
        inferenceBatchSize: int | None = ..., inferenceOffload: Literal['none', 'disk'] | None = ...,
        inferencePrecision: Literal['fp32', 'bf16', 'int8'] | None = ..., inferenceUseGpu: bool | None = ...,
        rawPredictionCol: str | None = ..., probabilityCol: str | None = ..., predictedLabelCol: str | None = ...,
        thresholds: Sequence[float] | None = ..., model: Any = ..., transformInPrediction: Any = ..., metrics: Any = ...,
        loss: Any = ..., transformBatch: Any = ..., initialModel: Any = ...,
        initialState: Literal['weights', 'optimizer'] | None = ..., teacher: Any = ..., freeze: Any = ...,
        lora: LoRA | str | int | Mapping[str, Any] | None = ...,
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
        showProgress: bool | None = ..., tracking: Any = ...
    ) -> None: ...

class RegressorKeywords:
    def __init__(self, *,
        featuresCol: str | None = ..., inputCols: str | Sequence[str] | None = ...,
        handleInvalid: Literal['error', 'skip', 'keep'] | None = ..., labelCol: str | None = ..., offsetCol: str | None = ...,
        monotone: Any = ..., columns: Any = ..., weightCol: str | None = ..., validationIndicatorCol: str | None = ...,
        validationFraction: float | None = ..., timeCol: str | None = ..., storageUri: str | None = ...,
        data: Literal['copy', 'inPlace', 'auto'] | None = ..., reader: str | None = ...,
        cache: Literal['auto', 'memory', 'disk', 'none'] | None = ..., predictionCol: str | None = ...,
        predictionCols: str | Sequence[str] | None = ..., innerCols: Any = ..., contributionsCol: str | None = ...,
        inferenceBatchSize: int | None = ..., inferenceOffload: Literal['none', 'disk'] | None = ...,
        inferencePrecision: Literal['fp32', 'bf16', 'int8'] | None = ..., inferenceUseGpu: bool | None = ...,
        quantiles: Sequence[float] | None = ..., quantilesCol: str | None = ..., intervals: float | None = ...,
        intervalCol: str | None = ..., intervalGroupCol: str | None = ..., model: Any = ..., transformInPrediction: Any = ...,
        metrics: Any = ..., loss: Any = ..., transformBatch: Any = ..., initialModel: Any = ...,
        initialState: Literal['weights', 'optimizer'] | None = ..., teacher: Any = ..., freeze: Any = ...,
        lora: LoRA | str | int | Mapping[str, Any] | None = ...,
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
        showProgress: bool | None = ..., tracking: Any = ...
    ) -> None: ...

class EstimatorKeywords:
    def __init__(self, *,
        featuresCol: str | None = ..., inputCols: str | Sequence[str] | None = ...,
        handleInvalid: Literal['error', 'skip', 'keep'] | None = ..., labelCol: str | None = ...,
        labelCols: str | Sequence[str] | None = ..., lossWeights: Sequence[float] | None = ..., monotone: Any = ...,
        columns: Any = ..., weightCol: str | None = ..., validationIndicatorCol: str | None = ...,
        validationFraction: float | None = ..., timeCol: str | None = ..., storageUri: str | None = ...,
        data: Literal['copy', 'inPlace', 'auto'] | None = ..., reader: str | None = ...,
        cache: Literal['auto', 'memory', 'disk', 'none'] | None = ..., predictionCol: str | None = ...,
        predictionCols: str | Sequence[str] | None = ..., innerCols: Any = ..., contributionsCol: str | None = ...,
        inferenceBatchSize: int | None = ..., inferenceOffload: Literal['none', 'disk'] | None = ...,
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
        showProgress: bool | None = ..., tracking: Any = ...
    ) -> None: ...
