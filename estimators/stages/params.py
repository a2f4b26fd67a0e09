"""Lists the settings that estimators have as Params; each setting is explained where it is declared.

Params that hold Python objects (`model`, `loss`, `optimizer`, `lrSchedule` when callables) live in
Spark's param map like any other, so `copy` and `fit(df, {param: value})` treat them alike;
`persistence.py` gives them a form on disk.
"""

from __future__ import annotations

from pyspark.ml.param import Params
from pyspark.ml.param.shared import HasLabelCol, HasSeed, HasValidationIndicatorCol, HasWeightCol

from ringspark.estimators.stages.declared import declared, param_of, setter, value_of
from ringspark.estimators.stages.model_params import _ModelParams
from ringspark.estimators.training.settings import columns as column_settings
from ringspark.estimators.training.settings import consistency as consistency_settings
from ringspark.estimators.training.settings import (
    exchange,
    large_batches,
    local_training,
    memory,
    observation,
    optimization,
    places,
    python_objects,
    recovery,
    tuning,
    workers,
)
from ringspark.estimators.training.settings import parallelism as parallelism_settings
from ringspark.pipelines.kinds import Kind, kind_from_json


class _TrainingParams(_ModelParams, HasLabelCol, HasWeightCol, HasValidationIndicatorCol, HasSeed):
    """The Params of a training."""

    setModel = setter(python_objects.MODEL)
    loss, getLoss, setLoss = declared(python_objects.LOSS)
    optimizer, getOptimizer, setOptimizer = declared(python_objects.OPTIMIZER)
    parameterGroups, getParameterGroups, setParameterGroups = declared(python_objects.PARAMETER_GROUPS)
    lrSchedule, getLrSchedule, setLrSchedule = declared(python_objects.LR_SCHEDULE)
    metrics, getMetrics, setMetrics = declared(python_objects.METRICS)
    transformBatch, getTransformBatch, setTransformBatch = declared(python_objects.TRANSFORM_BATCH)
    callbacks, getCallbacks, setCallbacks = declared(python_objects.CALLBACKS)

    learningRate, getLearningRate, setLearningRate = declared(optimization.LEARNING_RATE)
    warmupSteps, getWarmupSteps, setWarmupSteps = declared(optimization.WARMUP_STEPS)
    weightDecay, getWeightDecay, setWeightDecay = declared(optimization.WEIGHT_DECAY)
    maxGradNorm, getMaxGradNorm, setMaxGradNorm = declared(optimization.MAX_GRAD_NORM)
    epochs, getEpochs, setEpochs = declared(optimization.EPOCHS)
    batchSize, getBatchSize, setBatchSize = declared(optimization.BATCH_SIZE)
    batchSizeSchedule, getBatchSizeSchedule, setBatchSizeSchedule = declared(
        large_batches.BATCH_SIZE_SCHEDULE
    )
    scaleLearningRate, getScaleLearningRate, setScaleLearningRate = declared(
        large_batches.SCALE_LEARNING_RATE
    )
    gradientAccumulation, getGradientAccumulation, setGradientAccumulation = declared(
        optimization.GRADIENT_ACCUMULATION
    )
    noiseScale, getNoiseScale, setNoiseScale = declared(large_batches.NOISE_SCALE)
    seed, setSeed = param_of(optimization.SEED), setter(optimization.SEED)
    shuffle, getShuffle, setShuffle = declared(optimization.SHUFFLE)
    monitor, getMonitor, setMonitor = declared(optimization.MONITOR)
    patience, getPatience, setPatience = declared(optimization.PATIENCE)
    minDelta, getMinDelta, setMinDelta = declared(optimization.MIN_DELTA)
    keep, getKeep, setKeep = declared(optimization.KEEP)
    validationFraction, getValidationFraction, setValidationFraction = declared(
        optimization.VALIDATION_FRACTION
    )

    freeze, getFreeze, setFreeze = declared(tuning.FREEZE)
    lora, getLora, setLora = declared(tuning.LORA)
    pretrained, getPretrained, setPretrained = declared(tuning.PRETRAINED)
    emaDecay, getEmaDecay, setEmaDecay = declared(tuning.EMA_DECAY)

    columns, setColumns = param_of(column_settings.COLUMNS), setter(column_settings.COLUMNS)
    labelCol, setLabelCol = param_of(column_settings.LABEL_COL), setter(column_settings.LABEL_COL)
    weightCol, setWeightCol = param_of(column_settings.WEIGHT_COL), setter(column_settings.WEIGHT_COL)
    validationIndicatorCol = param_of(column_settings.VALIDATION_INDICATOR_COL)
    setValidationIndicatorCol = setter(column_settings.VALIDATION_INDICATOR_COL)

    numWorkers, getNumWorkers, setNumWorkers = declared(workers.NUM_WORKERS)
    useGpu, getUseGpu, setUseGpu = declared(workers.USE_GPU)
    collective, getCollective, setCollective = declared(workers.COLLECTIVE)
    compile, getCompile, setCompile = declared(workers.COMPILE)
    parallelism, getParallelism, setParallelism = declared(parallelism_settings.PARALLELISM)
    showProgress, getShowProgress, setShowProgress = declared(observation.SHOW_PROGRESS)
    tracking, getTracking, setTracking = declared(observation.TRACKING)
    logEverySteps, getLogEverySteps, setLogEverySteps = declared(observation.LOG_EVERY_STEPS)

    consistency, getConsistency, setConsistency = declared(consistency_settings.CONSISTENCY)
    precision, getPrecision, setPrecision = declared(memory.PRECISION)
    gradientCheckpointing, getGradientCheckpointing, setGradientCheckpointing = declared(
        memory.GRADIENT_CHECKPOINTING
    )
    activationOffload, getActivationOffload, setActivationOffload = declared(memory.ACTIVATION_OFFLOAD)
    activationCompression, getActivationCompression, setActivationCompression = declared(
        memory.ACTIVATION_COMPRESSION
    )
    sharding, getSharding, setSharding = declared(memory.SHARDING)
    gradientCompression, getGradientCompression, setGradientCompression = declared(
        exchange.GRADIENT_COMPRESSION
    )
    localSteps, getLocalSteps, setLocalSteps = declared(local_training.LOCAL_STEPS)
    memoryBudget, getMemoryBudget, setMemoryBudget = declared(memory.MEMORY_BUDGET)

    storageUri, getStorageUri, setStorageUri = declared(places.STORAGE_URI)
    reader, getReader, setReader = declared(places.READER)
    cache, getCache, setCache = declared(places.CACHE)

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

    def getColumns(self) -> dict[str, Kind]:
        """Gets `columns`: the kinds that were chosen, by name."""
        given = value_of(self, column_settings.COLUMNS) or {}
        return {name: kind_from_json(kind) for name, kind in given.items()}


class _MultiLabelParams(Params):
    """The Params of a network with several outputs: one label for each."""

    labelCols, getLabelCols, setLabelCols = declared(column_settings.LABEL_COLS)
    lossWeights, getLossWeights, setLossWeights = declared(python_objects.LOSS_WEIGHTS)
