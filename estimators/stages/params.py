"""Lists the settings that estimators have as Params; each setting is explained where it is declared."""

from __future__ import annotations

from pyspark.ml.param.shared import HasLabelCol, HasSeed, HasValidationIndicatorCol, HasWeightCol

from ringspark.estimators.stages.declared import (
    declared,
    param_of,
    setter,
    value_of,
)
from ringspark.estimators.stages.model_params import _ModelParams
from ringspark.estimators.training.settings import (
    data,
    memory,
    network,
    observation,
    recovery,
    training,
    workers,
)
from ringspark.pipelines.kinds import Kind, kind_from_json


class _TrainingParams(_ModelParams, HasWeightCol, HasValidationIndicatorCol, HasSeed):
    setModel = setter(network.MODEL)
    loss, getLoss, setLoss = declared(network.LOSS)
    optimizer, getOptimizer, setOptimizer = declared(training.OPTIMIZER)
    trainingStep, getTrainingStep, setTrainingStep = declared(training.TRAINING_STEP)
    parameterGroups, getParameterGroups, setParameterGroups = declared(training.PARAMETER_GROUPS)
    lrSchedule, getLrSchedule, setLrSchedule = declared(training.LR_SCHEDULE)
    metrics, getMetrics, setMetrics = declared(network.METRICS)
    transformBatch, getTransformBatch, setTransformBatch = declared(network.TRANSFORM_BATCH)
    callbacks, getCallbacks, setCallbacks = declared(training.CALLBACKS)

    learningRate, getLearningRate, setLearningRate = declared(training.LEARNING_RATE)
    warmupSteps, getWarmupSteps, setWarmupSteps = declared(training.WARMUP_STEPS)
    weightDecay, getWeightDecay, setWeightDecay = declared(training.WEIGHT_DECAY)
    maxGradNorm, getMaxGradNorm, setMaxGradNorm = declared(training.MAX_GRAD_NORM)
    epochs, getEpochs, setEpochs = declared(training.EPOCHS)
    batchSize, getBatchSize, setBatchSize = declared(training.BATCH_SIZE)
    batchSizeSchedule, getBatchSizeSchedule, setBatchSizeSchedule = declared(training.BATCH_SIZE_SCHEDULE)
    scaleLearningRate, getScaleLearningRate, setScaleLearningRate = declared(training.SCALE_LEARNING_RATE)
    gradientAccumulation, getGradientAccumulation, setGradientAccumulation = declared(
        training.GRADIENT_ACCUMULATION
    )
    privacy, getPrivacy, setPrivacy = declared(training.PRIVACY)
    noiseScale, getNoiseScale, setNoiseScale = declared(training.NOISE_SCALE)
    seed, setSeed = param_of(training.SEED), setter(training.SEED)
    shuffle, getShuffle, setShuffle = declared(training.SHUFFLE)
    monitor, getMonitor, setMonitor = declared(training.MONITOR)
    patience, getPatience, setPatience = declared(training.PATIENCE)
    minDelta, getMinDelta, setMinDelta = declared(training.MIN_DELTA)
    timeBudgetSeconds, getTimeBudgetSeconds, setTimeBudgetSeconds = declared(training.TIME_BUDGET_SECONDS)
    keep, getKeep, setKeep = declared(training.KEEP)
    validationFraction, getValidationFraction, setValidationFraction = declared(data.VALIDATION_FRACTION)

    freeze, getFreeze, setFreeze = declared(network.FREEZE)
    lora, getLora, setLora = declared(network.LORA)
    pretrained, getPretrained, setPretrained = declared(network.PRETRAINED)
    initialModel, getInitialModel, setInitialModel = declared(network.INITIAL_MODEL)
    initialState, getInitialState, setInitialState = declared(network.INITIAL_STATE)
    teacher, getTeacher, setTeacher = declared(network.TEACHER)
    temperature, getTemperature, setTemperature = declared(network.TEMPERATURE)
    alpha, getAlpha, setAlpha = declared(network.ALPHA)
    emaDecay, getEmaDecay, setEmaDecay = declared(network.EMA_DECAY)

    columns, setColumns = param_of(data.COLUMNS), setter(data.COLUMNS)
    weightCol, setWeightCol = param_of(data.WEIGHT_COL), setter(data.WEIGHT_COL)
    validationIndicatorCol = param_of(data.VALIDATION_INDICATOR_COL)
    setValidationIndicatorCol = setter(data.VALIDATION_INDICATOR_COL)
    timeCol, getTimeCol, setTimeCol = declared(data.TIME_COL)

    numWorkers, getNumWorkers, setNumWorkers = declared(workers.NUM_WORKERS)
    useGpu, getUseGpu, setUseGpu = declared(workers.USE_GPU)
    collective, getCollective, setCollective = declared(workers.COLLECTIVE)
    compile, getCompile, setCompile = declared(workers.COMPILE)
    parallelism, getParallelism, setParallelism = declared(workers.PARALLELISM)
    sync, getSync, setSync = declared(workers.SYNC)
    showProgress, getShowProgress, setShowProgress = declared(observation.SHOW_PROGRESS)
    tracking, getTracking, setTracking = declared(observation.TRACKING)
    logEverySteps, getLogEverySteps, setLogEverySteps = declared(observation.LOG_EVERY_STEPS)

    precision, getPrecision, setPrecision = declared(memory.PRECISION)
    gradientCheckpointing, getGradientCheckpointing, setGradientCheckpointing = declared(
        memory.GRADIENT_CHECKPOINTING
    )
    activationOffload, getActivationOffload, setActivationOffload = declared(memory.ACTIVATION_OFFLOAD)
    activationCompression, getActivationCompression, setActivationCompression = declared(
        memory.ACTIVATION_COMPRESSION
    )
    memoryBudget, getMemoryBudget, setMemoryBudget = declared(memory.MEMORY_BUDGET)

    storageUri, getStorageUri, setStorageUri = declared(data.STORAGE_URI)
    reader, getReader, setReader = declared(data.READER)
    cache, getCache, setCache = declared(data.CACHE)

    checkpointEverySteps, getCheckpointEverySteps, setCheckpointEverySteps = declared(
        recovery.CHECKPOINT_EVERY_STEPS
    )
    checkpointEverySeconds, getCheckpointEverySeconds, setCheckpointEverySeconds = declared(
        recovery.CHECKPOINT_EVERY_SECONDS
    )
    checkpointEveryEpochs, getCheckpointEveryEpochs, setCheckpointEveryEpochs = declared(
        recovery.CHECKPOINT_EVERY_EPOCHS
    )
    keepCheckpoints, getKeepCheckpoints, setKeepCheckpoints = declared(recovery.KEEP_CHECKPOINTS)
    keepTrainingState, getKeepTrainingState, setKeepTrainingState = declared(recovery.KEEP_TRAINING_STATE)
    certify, getCertify, setCertify = declared(recovery.CERTIFY)
    onNonFinite, getOnNonFinite, setOnNonFinite = declared(recovery.ON_NON_FINITE)
    runUri, getRunUri, setRunUri = declared(recovery.RUN_URI)
    resume, getResume, setResume = declared(recovery.RESUME)
    maxRestarts, getMaxRestarts, setMaxRestarts = declared(recovery.MAX_RESTARTS)
    minWorkers, getMinWorkers, setMinWorkers = declared(recovery.MIN_WORKERS)
    timeoutSeconds, getTimeoutSeconds, setTimeoutSeconds = declared(recovery.TIMEOUT_SECONDS)

    timelineEverySteps, getTimelineEverySteps, setTimelineEverySteps = declared(
        observation.TIMELINE_EVERY_STEPS
    )
    profileSteps, getProfileSteps, setProfileSteps = declared(observation.PROFILE_STEPS)

    # The last one, because it hides the module of this name.
    data, getData, setData = declared(data.DATA)

    def getColumns(self) -> dict[str, Kind]:
        """Gets `columns`: the chosen column types by name."""
        given = value_of(self, data.COLUMNS) or {}
        return {name: kind_from_json(kind) for name, kind in given.items()}


class _LabelParams(HasLabelCol):
    labelCol, setLabelCol = param_of(data.LABEL_COL), setter(data.LABEL_COL)


class _MultiLabelParams(_LabelParams):
    labelCols, getLabelCols, setLabelCols = declared(data.LABEL_COLS)
    lossWeights, getLossWeights, setLossWeights = declared(network.LOSS_WEIGHTS)
