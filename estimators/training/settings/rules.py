"""Rules about combinations of settings, which docs/settings.md prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ringspark.estimators.options.sync import (
    AllReduce,
    Asynchronous,
    DiLoCo,
    Hogwild,
    LocalSGD,
    LocalTraining,
)
from ringspark.estimators.training.optimizers.registry import ELEMENTWISE, OPTIMIZERS
from ringspark.estimators.training.settings.values import ConfigValues

_OF_WHOLE_PARAMETERS = frozenset(OPTIMIZERS) - ELEMENTWISE
_DELAYED = ("pipedream", "2bw")


class Combination(NamedTuple):
    """A rule about several settings."""

    settings: str  # in a user's words
    is_broken: Callable[[ConfigValues], bool]
    message: str  # with fields of the config in braces, and `readers` and `replica`: see `TrainConfig`


def _is_local(c: ConfigValues) -> bool:
    return isinstance(c.sync, LocalTraining)


def _is_asynchronous(c: ConfigValues) -> bool:
    return isinstance(c.sync, Asynchronous) and c.num_workers > 1


def _is_zero3(c: ConfigValues) -> bool:
    return c.sync.sharding == "parameters" and c.num_workers > 1


def _packs_activations(c: ConfigValues) -> bool:
    return (c.activation_offload, c.activation_compression) != ("none", "none")


def _divides_passes(c: ConfigValues) -> bool:
    axes = ("pipeline", "expert", "sequence")
    return c.parallelism.sequence_parallel or any(c.parallelism.size(axis) > 1 for axis in axes)


def _private(other: str, is_broken: Callable[[ConfigValues], bool], why: str) -> Combination:
    """Returns the rule that a private training refuses another setting."""
    message = f"privacy clips the gradient of each row and adds noise once per step, but {why}"
    return Combination(f"privacy with {other}", lambda c: c.privacy is not None and is_broken(c), message)


COMBINATIONS: tuple[Combination, ...] = (
    Combination(
        "trainingStep with sync other than AllReduce(), or with parallelism beyond 'data'",
        lambda c: (
            c.training_step is not None
            and (c.sync != AllReduce() or c.cuts_network or c.parallelism.shard > 1)
        ),
        "trainingStep needs whole, uncompressed gradients on every worker, got sync={sync} and "
        "parallelism={parallelism}; set sync=AllReduce(), and give all workers to 'data'",
    ),
    Combination(
        "trainingStep with gradientAccumulation, compile, activationOffload, activationCompression or "
        "noiseScale",
        lambda c: (
            c.training_step is not None
            and (c.gradient_accumulation > 1 or bool(c.compile) or _packs_activations(c) or c.noise_scale)
        ),
        "trainingStep runs its own forward and backward passes, which gradientAccumulation "
        "({gradient_accumulation}), compile ({compile}), activationOffload ('{activation_offload}'), "
        "activationCompression ('{activation_compression}') and noiseScale ({noise_scale}) do not reach; "
        "leave all of them unset",
    ),
    Combination(
        "trainingStep with onNonFinite other than 'stop'",
        lambda c: c.training_step is not None and c.on_non_finite != "stop",
        "onNonFinite '{on_non_finite}' undoes a whole step, but trainingStep may have taken the step of one "
        "optimizer when the loss of the next is not finite; set onNonFinite='stop'",
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
        "onNonFinite='rollback' without checkpoints",
        lambda c: c.on_non_finite == "rollback" and not c.writes_checkpoints,
        "onNonFinite 'rollback' resumes from the last checkpoint, but no checkpoints are written; set "
        "checkpointEverySteps, checkpointEveryEpochs or checkpointEverySeconds",
    ),
    Combination(
        "certify with onNonFinite='rollback'",
        lambda c: c.certify and c.on_non_finite == "rollback",
        "certify proves steps that can be repeated, but onNonFinite 'rollback' trains some steps again with "
        "other rates; set onNonFinite='skip'",
    ),
    Combination(
        "certify with asynchronous training or CpSGD",
        lambda c: c.certify and (_is_asynchronous(c) or c.sync.strategy == "cpsgd"),
        "certify proves steps that can be repeated, but the steps of {sync!r} depend on time or noise; set "
        "sync=AllReduce()",
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
        lambda c: _is_zero3(c) and c.collective != "torch",
        "sync=Zero(stage=3) gathers each block's parameters by torch.distributed, which collective "
        "'{collective}' does not have; set collective='torch', or sync=Zero(stage=2)",
    ),
    Combination(
        "sync=Zero(stage=3) with an optimizer that needs whole parameters",
        lambda c: _is_zero3(c) and c.optimizer in _OF_WHOLE_PARAMETERS,
        "sync=Zero(stage=3) leaves each worker a shard of every parameter, but optimizer '{optimizer}' needs "
        "whole parameters; set optimizer='adamw', or sync=Zero(stage=2)",
    ),
    Combination(
        "sync=Zero(stage=3) with activationOffload or activationCompression",
        lambda c: _is_zero3(c) and _packs_activations(c),
        "sync=Zero(stage=3) gathers weights again for the backward pass, but activationOffload "
        "('{activation_offload}') or activationCompression ('{activation_compression}') would pack them as "
        "activations; set both to 'none', or sync=Zero(stage=2)",
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
        "compile with sync=Zero(stage=3)",
        lambda c: bool(c.compile) and _is_zero3(c),
        "compile fuses operations over the whole network, but sync=Zero(stage=3) gathers weights between "
        "blocks; set sync=Zero(stage=2), or compile=False",
    ),
    Combination(
        "compile with activationOffload or activationCompression",
        lambda c: bool(c.compile) and _packs_activations(c),
        "compile decides itself which activations are kept, but activationOffload "
        "('{activation_offload}') or activationCompression ('{activation_compression}') pack the activations "
        "of single operations; set both to 'none', or compile=False",
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
        "sync=LocalSGD, DiLoCo or ElasticAveraging with precision='fp16'",
        lambda c: _is_local(c) and c.precision == "fp16",
        "precision 'fp16' needs all workers to agree in every step whether gradients overflowed, but "
        "sync={sync} does not synchronize in every step; set precision='bf16', or sync=AllReduce()",
    ),
    Combination(
        "sync=LocalSGD, DiLoCo or ElasticAveraging with onNonFinite other than 'stop'",
        lambda c: _is_local(c) and c.on_non_finite != "stop",
        "onNonFinite '{on_non_finite}' needs all workers to agree whether to take each step, but "
        "sync={sync} does not synchronize in every step; set onNonFinite='stop', or sync=AllReduce()",
    ),
    Combination(
        "sync=LocalSGD, DiLoCo or ElasticAveraging with emaDecay",
        lambda c: _is_local(c) and c.ema_decay is not None,
        "emaDecay ({ema_decay}) averages the weights after every step, but with sync={sync} each worker has "
        "other weights; leave emaDecay unset, or set sync=AllReduce()",
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
        "sync=ParameterServer or Hogwild with precision='fp16'",
        lambda c: _is_asynchronous(c) and c.precision == "fp16",
        "precision 'fp16' skips a step on all workers if one overflows, but with sync={sync} workers do "
        "not step together; set precision='bf16', or sync=AllReduce()",
    ),
    Combination(
        "sync=ParameterServer or Hogwild with onNonFinite",
        lambda c: _is_asynchronous(c) and c.on_non_finite != "stop",
        "onNonFinite '{on_non_finite}' cancels a step on all workers, but with sync={sync} workers do "
        "not step together; set onNonFinite='stop', or sync=AllReduce()",
    ),
    Combination(
        "sync=ParameterServer or Hogwild with emaDecay, except staleness=0",
        lambda c: not c.is_in_step and c.ema_decay is not None,
        "emaDecay averages the weights after each step, but with sync={sync} every worker sees other "
        "weights; leave emaDecay unset, or set sync=AllReduce()",
    ),
    Combination(
        "sync=ParameterServer with an optimizer that needs whole parameters",
        lambda c: (
            _is_asynchronous(c) and not isinstance(c.sync, Hogwild) and c.optimizer in _OF_WHOLE_PARAMETERS
        ),
        "sync={sync} gives each server a shard of every parameter, but optimizer '{optimizer}' needs whole "
        "parameters; set optimizer='adamw', or sync=AllReduce()",
    ),
    Combination(
        "sync=Hogwild() with useGpu",
        lambda c: _is_asynchronous(c) and isinstance(c.sync, Hogwild) and c.use_gpu,
        "sync=Hogwild() trains in the memory of the host, but useGpu puts the weights on GPUs; set "
        "useGpu=False, or sync=ParameterServer()",
    ),
    Combination(
        "sync=Hogwild() with gradientCheckpointing",
        lambda c: _is_asynchronous(c) and isinstance(c.sync, Hogwild) and c.gradient_checkpointing != "none",
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
        "parallelism's sequence_parallel with sync=Zero(stage=3)",
        lambda c: c.parallelism.sequence_parallel and c.sync.sharding == "parameters",
        "parallelism's sequence_parallel sums gradients of whole parameters at the end of a step, but "
        "sync=Zero(stage=3) leaves each worker a shard of them; set sync=Zero(stage=1), or "
        "sequence_parallel=False",
    ),
    Combination(
        "parallelism over 'expert' with a compression",
        lambda c: c.parallelism.expert > 1 and c.sync.compressed is not None,
        "sync={sync} compresses gradients of parameters that all workers have, but "
        "parallelism={parallelism} gives workers different experts; set sync=AllReduce(), or leave "
        "'expert' out of parallelism",
    ),
    Combination(
        "parallelism that shards the network with CpSGD",
        lambda c: c.cuts_network and c.sync.strategy == "cpsgd",
        "sync={sync} bounds the norm of a worker's whole gradient, but parallelism={parallelism} gives a "
        "worker a part of it; leave all axes except 'data' out of parallelism",
    ),
    Combination(
        "parallelism that shards the network with a compression between='hosts'",
        lambda c: c.cuts_network and c.sync.compressed is not None and c.sync.compressed.between == "hosts",
        "a compression between='hosts' first all-reduces the gradients on each host, but "
        "parallelism={parallelism} gives these workers different shards; set between='workers'",
    ),
    Combination(
        "parallelism that shards the network with sync=LocalSGD, DiLoCo or ElasticAveraging",
        lambda c: c.cuts_network and _is_local(c),
        "parallelism={parallelism} synchronizes workers inside every step, but with sync={sync} they step on "
        "their own; set sync=AllReduce(), or give all workers to 'data'",
    ),
    Combination(
        "parallelism that shards the network with sync=ParameterServer or Hogwild",
        lambda c: c.cuts_network and _is_asynchronous(c),
        "parallelism={parallelism} synchronizes workers inside every step, but with sync={sync} they step on "
        "their own; set sync=AllReduce(), or give all workers to 'data'",
    ),
    Combination(
        "parallelism over 'tensor' or 'expert' with an optimizer that needs whole parameters",
        lambda c: max(c.parallelism.tensor, c.parallelism.expert) > 1 and c.optimizer in _OF_WHOLE_PARAMETERS,
        "parallelism={parallelism} gives a worker only shards of parameters, but optimizer '{optimizer}' "
        "needs whole parameters; set optimizer='adamw', or give the workers to 'pipeline' or 'sequence'",
    ),
    Combination(
        "parallelism that shards the network with adam1bit",
        lambda c: c.cuts_network and c.optimizer == "adam1bit",
        "optimizer 'adam1bit' sums whole gradients in one bit, but parallelism={parallelism} gives a "
        "worker only shards; set optimizer='adamw', or give all workers to 'data'",
    ),
    Combination(
        "parallelism that shards the network with noiseScale",
        lambda c: c.cuts_network and c.noise_scale,
        "noiseScale compares whole gradients, but parallelism={parallelism} gives a worker only shards; "
        "leave noiseScale unset, or give all workers to 'data'",
    ),
    Combination(
        "parallelism over 'pipeline', 'expert' or 'sequence', or with sequence_parallel, with compile",
        lambda c: bool(c.compile) and _divides_passes(c),
        "compile needs whole rows and all layers on each worker, but with parallelism={parallelism} a "
        "worker has parts of rows, some of the layers, or other workers' rows; set compile=False, or give "
        "all workers to 'data' and 'tensor'",
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
        "Pipeline's schedule without a flush with onNonFinite='rollback'",
        lambda c: c.parallelism.pipeline.schedule in _DELAYED and c.on_non_finite == "rollback",
        "onNonFinite 'rollback' resumes from a checkpoint, but with Pipeline's schedule "
        "'{parallelism.pipeline.schedule}' rows of earlier steps are still in the pipeline; set "
        "onNonFinite='skip', or schedule='1f1b'",
    ),
    Combination(
        "Pipeline's schedule without a flush with precision='fp16' or sync=Zero",
        lambda c: (
            c.parallelism.pipeline.schedule in _DELAYED
            and (c.precision == "fp16" or c.sync.sharding != "none")
        ),
        "Pipeline's schedule '{parallelism.pipeline.schedule}' gives a step gradients of an earlier step, "
        "or none, but precision 'fp16' and sync=Zero need the step's own gradients, got precision="
        "'{precision}' and sync={sync}; set precision='bf16' and sync=AllReduce(), or schedule='1f1b'",
    ),
    Combination(
        "minWorkers < the workers of one replica",
        lambda c: c.min_workers is not None and c.min_workers < c.workers_per_replica,
        "minWorkers ({min_workers}) is less than the {replica} workers of one replica with "
        "parallelism={parallelism}; set minWorkers to {replica} or more, or leave it unset",
    ),
    Combination(
        "parallelism over 'pipeline' with activationOffload or activationCompression",
        lambda c: c.parallelism.pipeline.stages > 1 and _packs_activations(c),
        "activationOffload ('{activation_offload}') and activationCompression ('{activation_compression}') "
        "pack the activations of one forward pass at a time, but with parallelism={parallelism} several "
        "passes run at once; set both to 'none', or use 'tensor', 'sequence' or 'expert'",
    ),
    Combination(
        "a loss that takes the module, with compile, or activationCompression='int8' or 'fp8'",
        lambda c: c.differentiates_twice and (bool(c.compile) or c.activation_compression in ("int8", "fp8")),
        "a loss that takes the module may differentiate twice, but compiled code has first derivatives only, "
        "and activationCompression 'int8' and 'fp8' round values of the second derivative; set compile=False "
        "and activationCompression='bits'",
    ),
    Combination(
        "a loss that takes the module, with sync=Zero(stage=3)",
        lambda c: c.differentiates_twice and _is_zero3(c),
        "a loss that takes the module may differentiate twice, but sync=Zero(stage=3) frees weights after "
        "the first derivative; set sync=Zero(stage=2)",
    ),
    Combination(
        "a loss that takes the module, with 'pipeline', 'sequence', 'expert' or sequence_parallel",
        lambda c: c.differentiates_twice and _divides_passes(c),
        "a loss that takes the module needs all layers and whole rows on each worker, but with "
        "parallelism={parallelism} a worker has only a shard of them; give all workers to 'data', 'shard' "
        "and 'tensor'",
    ),
    _private(
        "compile",
        lambda c: bool(c.compile),
        "compile ('{compile}') compiles gradients of whole batches; set compile=False",
    ),
    _private(
        "parallelism over other axes than 'data'",
        lambda c: c.workers_per_replica > 1 or c.cuts_network,
        "parallelism={parallelism} gives a worker only a shard of the network; give all workers to 'data'",
    ),
    _private(
        "another sync than AllReduce()",
        lambda c: c.sync != AllReduce(),
        "sync={sync} sends other values than the sum of whole gradients; set sync=AllReduce()",
    ),
    _private(
        "trainingStep",
        lambda c: c.training_step is not None,
        "trainingStep computes gradients of whole batches; leave trainingStep unset",
    ),
    _private(
        "a loss that takes the module",
        lambda c: c.differentiates_twice,
        "a loss that takes the module may see several rows; set a loss of outputs and labels",
    ),
    _private(
        "teacher",
        lambda c: c.teacher_column is not None,
        "the outputs of teacher may reveal the rows that it was trained on; leave teacher unset",
    ),
    _private(
        "certify",
        lambda c: c.certify,
        "certify needs steps that others can repeat, and the samples and noise of a private step are secret; "
        "leave certify unset",
    ),
    _private(
        "batchSizeSchedule",
        lambda c: bool(c.batch_size_schedule),
        "batchSizeSchedule ({batch_size_schedule}) changes the share of the rows that a step samples; leave "
        "it unset",
    ),
    _private(
        "noiseScale", lambda c: c.noise_scale, "noiseScale publishes norms without noise; leave it unset"
    ),
    _private(
        "precision='fp16'",
        lambda c: c.precision == "fp16",
        "precision 'fp16' skips steps whose gradients overflow, which depends on rows; set precision='bf16'",
    ),
    _private(
        "onNonFinite other than 'stop'",
        lambda c: c.on_non_finite != "stop",
        "onNonFinite '{on_non_finite}' drops whole steps because of single rows, and a private step already "
        "leaves out rows without a finite gradient; leave onNonFinite unset",
    ),
    _private(
        "gradientCheckpointing, activationOffload or activationCompression",
        lambda c: c.gradient_checkpointing != "none" or _packs_activations(c),
        "gradientCheckpointing, activationOffload and activationCompression need the backward pass of a "
        "whole batch; leave them unset, and raise gradientAccumulation to save memory",
    ),
    _private(
        "cache='none'",
        lambda c: c.cache == "none",
        "each step samples rows at random, and cache='none' would read all files again in each step; set "
        "cache='disk'",
    ),
    _private(
        "keep='best' or patience by a training loss or metric",
        lambda c: c.looks_for_best and c.monitor.startswith("train_"),
        "monitor '{monitor}' needs exact values of the training rows; leave keep and patience unset, or "
        "use validationIndicatorCol for rows that need no protection",
    ),
)
