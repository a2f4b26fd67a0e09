"""Rules about several settings that `capabilities` cannot state, such as a comparison of two numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ringspark.estimators.options.sync import DiLoCo, Hogwild, LocalSGD
from ringspark.estimators.training.settings.capabilities import is_asynchronous, is_zero3
from ringspark.estimators.training.settings.values import ConfigValues


class Combination(NamedTuple):
    """A rule about several settings."""

    settings: str  # in a user's words
    is_broken: Callable[[ConfigValues], bool]
    message: str  # with fields of the config in braces, and `readers` and `replica`: see `TrainConfig`


def _private(other: str, is_broken: Callable[[ConfigValues], bool], why: str) -> Combination:
    """Returns the rule that a private training refuses another setting."""
    message = f"privacy clips the gradient of each row and adds noise once per step, but {why}"
    return Combination(f"privacy with {other}", lambda c: c.privacy is not None and is_broken(c), message)


COMBINATIONS: tuple[Combination, ...] = (
    Combination(
        "a column twice in labelCols",
        lambda c: len(set(c.label_columns)) < len(c.label_columns),
        "labelCols must not name a column twice, got {label_columns}; copy the column under another name",
    ),
    Combination(
        "trainingStep='lightning' with weightCol",
        lambda c: c.training_step == "lightning" and c.weight_column is not None,
        "weightCol ('{weight_column}') weights each row, but trainingStep 'lightning' gets only a mean over "
        "rows from the module's training_step; leave weightCol unset, or set trainingStep to a callable",
    ),
    Combination(
        "batchSize < numWorkers",
        lambda c: c.batch_size < c.num_copies,
        "batchSize counts rows over all workers and must be at least {readers}, got {batch_size}; raise "
        "batchSize or lower numWorkers",
    ),
    Combination(
        "gradientAccumulation * numWorkers > batchSize",
        lambda c: c.gradient_accumulation * c.num_copies > c.batch_size,
        "gradientAccumulation ({gradient_accumulation}) times {readers} must not exceed batchSize "
        "({batch_size}): a micro-batch would have no rows; lower gradientAccumulation or raise batchSize",
    ),
    Combination(
        "a size of batchSizeSchedule < numWorkers",
        lambda c: c.batch_sizes.smallest < c.num_copies,
        "batchSizeSchedule counts rows over all workers, and each of its sizes must be at least {readers}, "
        "got {batch_size_schedule}; raise the size or lower numWorkers",
    ),
    Combination(
        "gradientAccumulation * numWorkers > a size of batchSizeSchedule",
        lambda c: c.gradient_accumulation * c.num_copies > c.batch_sizes.smallest,
        "gradientAccumulation ({gradient_accumulation}) times {readers} must not exceed a size of "
        "batchSizeSchedule ({batch_size_schedule}): a micro-batch would have no rows; lower "
        "gradientAccumulation or raise the size",
    ),
    Combination(
        "scaleLearningRate's warmup_epochs with warmupSteps",
        lambda c: bool(c.warmup_steps and c.scale_learning_rate and c.scale_learning_rate.warmup_epochs),
        "scaleLearningRate's warmup_epochs ({scale_learning_rate.warmup_epochs}) and warmupSteps "
        "({warmup_steps}) both raise the rate at the start, one from learningRate, the other from 0; set "
        "warmupSteps=0, or leave warmup_epochs out",
    ),
    Combination(
        "scaleLearningRate's warmup_epochs >= epochs",
        lambda c: c.scale_learning_rate is not None and c.scale_learning_rate.warmup_epochs >= c.epochs,
        "scaleLearningRate's warmup_epochs must be below epochs ({epochs}), got "
        "{scale_learning_rate.warmup_epochs}; lower it, or train for more epochs",
    ),
    Combination(
        "minWorkers > numWorkers",
        lambda c: c.min_workers is not None and c.min_workers > c.num_workers,
        "minWorkers ({min_workers}) must not exceed numWorkers ({num_workers}); lower minWorkers",
    ),
    Combination(
        "maxWorkers < numWorkers",
        lambda c: c.max_workers is not None and c.max_workers < c.num_workers,
        "maxWorkers ({max_workers}) must be numWorkers ({num_workers}) or more; raise maxWorkers",
    ),
    Combination(
        "maxWorkers without checkpoints by time, or with workers that step on their own",
        lambda c: c.max_workers is not None and c.max_workers > c.num_workers and not c.can_grow,
        "maxWorkers ({max_workers}) lets new workers start from a checkpoint, which needs checkpoints by "
        "time and a sync whose workers step together; leave checkpointEverySeconds unset and set "
        "sync=AllReduce(), or leave maxWorkers unset",
    ),
    Combination(
        "onNonFinite='rollback' without checkpoints",
        lambda c: c.on_non_finite == "rollback" and not c.writes_checkpoints,
        "onNonFinite 'rollback' resumes from the last checkpoint, but no checkpoints are written; set "
        "checkpointEverySeconds or another checkpoint interval",
    ),
    Combination(
        "loss, labelCols of different lengths",
        lambda c: len(c.losses) != len(c.label_columns),
        "loss must be one for all labels or a list with one for each of {label_columns}, got {losses}",
    ),
    Combination(
        "lossWeights, labelCols of different lengths",
        lambda c: len(c.loss_weights) != len(c.label_columns),
        "lossWeights must have one weight for each of {label_columns}, got {loss_weights}",
    ),
    Combination(
        "activationOffload='host' without useGpu",
        lambda c: c.activation_offload == "host" and not c.use_gpu,
        "activationOffload 'host' moves activations from the GPU to the host's memory, but without useGpu "
        "they are there already; set useGpu=True, or activationOffload='disk'",
    ),
    Combination(
        "sync=Zero(stage=3) with another collective than 'torch'",
        lambda c: is_zero3(c) and c.collective != "torch",
        "sync=Zero(stage=3) gathers each block's parameters by torch.distributed, which collective "
        "'{collective}' does not have; set collective='torch', or sync=Zero(stage=2)",
    ),
    Combination(
        "optimizer='adam1bit' with a compression that begins at once",
        lambda c: (
            c.optimizer == "adam1bit"
            and c.sync.compressed is not None
            and c.sync.compressed.NAME != "none"
            and not c.sync.compressed.after
        ),
        "optimizer 'adam1bit' uses the second moments of the uncompressed steps, but sync={sync} compresses "
        "from the first step; set the compression's 'after' to about a tenth of the steps",
    ),
    Combination(
        "compile='reduce-overhead' or 'max-autotune' with useGpu and gradientAccumulation or "
        "gradientCheckpointing",
        lambda c: (
            c.compile in ("reduce-overhead", "max-autotune")
            and c.use_gpu
            and (c.gradient_accumulation > 1 or c.gradient_checkpointing != "none")
        ),
        "compile '{compile}' records CUDA graphs, in which each pass overwrites the previous one, but "
        "gradientAccumulation ({gradient_accumulation}) or gradientCheckpointing "
        "('{gradient_checkpointing}') runs several passes before their results are used; set "
        "compile='max-autotune-no-cudagraphs' or True",
    ),
    Combination(
        "LocalSGD's optimizer_state='average' with optimizer='adam8bit' or 'adamw8bit'",
        lambda c: (
            isinstance(c.sync, LocalSGD)
            and c.sync.optimizer_state == "average"
            and c.optimizer in ("adam8bit", "adamw8bit")
        ),
        "LocalSGD's optimizer_state 'average' averages floating-point numbers, but optimizer '{optimizer}' "
        "keeps codes; set optimizer_state='keep', or optimizer='adamw'",
    ),
    Combination(
        "DiLoCo's send='int8' with numWorkers > 127",
        lambda c: isinstance(c.sync, DiLoCo) and c.sync.send == "int8" and c.num_workers > 127,
        "DiLoCo's send 'int8' has 127 / numWorkers levels per worker, and numWorkers={num_workers} leaves "
        "less than one; set send='fp16'",
    ),
    Combination(
        "collective='local' with numWorkers > 1",
        lambda c: c.collective == "local" and c.num_workers > 1,
        "collective 'local' serves one worker, got numWorkers={num_workers}; "
        "set collective='horovod' or 'torch'",
    ),
    Combination(
        "sync=Hogwild() with useGpu",
        lambda c: is_asynchronous(c) and isinstance(c.sync, Hogwild) and c.use_gpu,
        "sync=Hogwild() trains in the memory of the host, but useGpu puts the weights on GPUs; set "
        "useGpu=False, or sync=ParameterServer()",
    ),
    Combination(
        "sync=Hogwild() with gradientCheckpointing",
        lambda c: is_asynchronous(c) and isinstance(c.sync, Hogwild) and c.gradient_checkpointing != "none",
        "gradientCheckpointing ('{gradient_checkpointing}') computes activations again in the backward pass, "
        "but with sync=Hogwild() other workers have changed the weights by then; set "
        "gradientCheckpointing='none', or sync=ParameterServer()",
    ),
    Combination(
        "parallelism with another collective than 'torch'",
        lambda c: (c.cuts_network or c.parallelism.shard > 1) and c.collective != "torch",
        "parallelism={parallelism} needs collectives over some of the workers, which collective "
        "'{collective}' does not have; set collective='torch', or give all workers to 'data'",
    ),
    Combination(
        "parallelism over 'shard' without sync=Zero",
        lambda c: c.parallelism.shard > 1 and c.sync.sharding == "none",
        "parallelism's 'shard' sets the workers over which sync=Zero(...) shards, but sync={sync} does not "
        "shard; set sync=Zero(stage=3), 2 or 1, or use 'data' in place of 'shard'",
    ),
    Combination(
        "parallelism over 'pipeline' or 'expert' with sync=Zero(stage=3)",
        lambda c: (
            any(c.parallelism.size(axis) > 1 for axis in ("pipeline", "expert"))
            and c.sync.sharding == "parameters"
        ),
        "sync=Zero(stage=3) needs all workers that have shards of a block to run it in the same pass, but "
        "with parallelism={parallelism} they run other stages, or experts for other workers' rows; set "
        "sync=Zero(stage=1)",
    ),
    Combination(
        "parallelism over 'pipeline' or with sequence_parallel, with sync=Zero(stage=2)",
        lambda c: (
            (c.parallelism.pipeline.stages > 1 or c.parallelism.sequence_parallel)
            and c.sync.sharding == "gradients"
        ),
        "sync=Zero(stage=2) shards gradients during the backward pass, but with parallelism={parallelism} "
        "workers still add to them after it; set sync=Zero(stage=1), which trains the same",
    ),
    Combination(
        "parallelism over 'expert' with a compression",
        lambda c: c.parallelism.expert > 1 and c.sync.compressed is not None,
        "sync={sync} compresses gradients of parameters that all workers have, but "
        "parallelism={parallelism} gives workers different experts; set sync=AllReduce(), or leave "
        "'expert' out of parallelism",
    ),
    Combination(
        "Pipeline's sequence_chunks without a pipeline",
        lambda c: c.parallelism.pipeline.sequence_chunks > 1 and c.parallelism.pipeline.stages == 1,
        "Pipeline's sequence_chunks ({parallelism.pipeline.sequence_chunks}) passes chunks of rows between "
        "the stages of a pipeline; set stages, or leave sequence_chunks out",
    ),
    Combination(
        "Pipeline's sequence_chunks with 'tensor', 'expert' or 'sequence'",
        lambda c: (
            c.parallelism.pipeline.sequence_chunks > 1
            and any(c.parallelism.size(axis) > 1 for axis in ("tensor", "expert", "sequence"))
        ),
        "Pipeline's sequence_chunks works only with the axes 'data', 'shard' and 'pipeline', because other "
        "axes run collectives in every chunk of a row, got parallelism={parallelism}; leave the other axes "
        "or sequence_chunks out",
    ),
    Combination(
        "Pipeline's sequence_chunks with a schedule that splits backward passes",
        lambda c: (
            c.parallelism.pipeline.sequence_chunks > 1
            and c.parallelism.pipeline.schedule in ("zero_bubble", "zbv")
        ),
        "Pipeline's sequence_chunks needs whole backward passes, but schedule "
        "'{parallelism.pipeline.schedule}' splits them; set schedule='1f1b', or leave sequence_chunks out",
    ),
    Combination(
        "minWorkers < the workers of one replica",
        lambda c: c.min_workers is not None and c.min_workers < c.workers_per_replica,
        "minWorkers ({min_workers}) is less than the {replica} workers of one replica with "
        "parallelism={parallelism}; set minWorkers to {replica} or more, or leave it unset",
    ),
    _private(
        "teacher",
        lambda c: c.soft_label_column is not None,
        "the outputs of teacher may reveal the rows that it was trained on; leave teacher unset",
    ),
    _private(
        "batchSizeSchedule",
        lambda c: bool(c.batch_size_schedule),
        "batchSizeSchedule ({batch_size_schedule}) changes the share of the rows that a step samples; leave "
        "it unset",
    ),
    _private(
        "cache='none'",
        lambda c: c.cache == "none",
        "each step samples rows at random, and cache='none' would read all files again in each step; set "
        "cache='disk'",
    ),
)
