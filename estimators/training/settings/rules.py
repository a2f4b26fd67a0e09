"""Rules about combinations of settings; the range of a single setting is in its declaration.

Each rule has a sentence with subject, rule, the given values and a remedy; `docs/settings.md` prints them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ringspark.estimators.training.optimizers.registry import ELEMENTWISE, OPTIMIZERS
from ringspark.estimators.training.settings.parallelism import MODEL_AXES

if TYPE_CHECKING:
    from ringspark.estimators.training.settings.config import TrainConfig

_OF_WHOLE_PARAMETERS = frozenset(OPTIMIZERS) - ELEMENTWISE


def _local(config: TrainConfig, key: str) -> object:
    """Returns an option of `localSteps`, None where it has none."""
    return config.local_steps.get(key) if isinstance(config.local_steps, dict) else None


def _warmup_epochs(config: TrainConfig) -> float:
    """Returns the epochs of the gradual warm-up; 0 for none."""
    return float(config.scale_learning_rate.get("warmupEpochs", 0.0))


class Combination(NamedTuple):
    """Settings in a user's words, the test of a config, and the error's sentence with fields in braces.

    Beside the config's fields the sentence may have `readers`: what a batch must have a row for.
    """

    settings: str
    is_broken: Callable[[TrainConfig], bool]
    message: str


def _compresses(config: TrainConfig) -> bool:
    return config.gradient_compression != {"name": "none"}


def _runs_apart(c: TrainConfig) -> bool:
    """Whether workers exchange by another way than common sums of their gradients."""
    return c.consistency["name"] != "bsp" and c.num_workers > 1


def _cuts_parameters(c: TrainConfig) -> bool:
    """Whether ranks of a mesh hold parts of parameters; the stages of a pipeline hold whole ones."""
    return any(c.parallelism.get(axis, 1) != 1 for axis in MODEL_AXES if axis != "pipeline")


def makes_dense(c: TrainConfig) -> list[tuple[str, str]]:
    """Returns the settings by which several workers exchange no rows of embeddings, each with its remedy."""
    name = c.consistency["name"]
    ways = [
        (f"sharding {c.sharding!r}", "sharding='none'", c.sharding != "none"),
        (f"localSteps {c.local_steps!r}", "localSteps=1", c.local_steps != 1),
        (f"consistency {name!r}", "consistency='bsp'", name != "bsp"),
    ]
    return [(setting, remedy) for setting, remedy, is_set in ways if is_set]


COMBINATIONS: tuple[Combination, ...] = (
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
        "scaleLearningRate's warmupEpochs with warmupSteps",
        lambda c: bool(c.warmup_steps and _warmup_epochs(c)),
        "scaleLearningRate's warmupEpochs ({scale_learning_rate[warmupEpochs]}) and warmupSteps "
        "({warmup_steps}) each raise the rate at the start, from learningRate and from 0; set warmupSteps=0, "
        "or leave warmupEpochs out",
    ),
    Combination(
        "scaleLearningRate's warmupEpochs >= epochs",
        lambda c: _warmup_epochs(c) >= c.epochs,
        "scaleLearningRate's warmupEpochs must be below epochs ({epochs}), got "
        "{scale_learning_rate[warmupEpochs]}; lower it, or train for more epochs",
    ),
    Combination(
        "minWorkers > numWorkers",
        lambda c: c.min_workers is not None and c.min_workers > c.num_workers,
        "minWorkers ({min_workers}) must not exceed numWorkers ({num_workers}); lower minWorkers",
    ),
    Combination(
        "onNonFinite='rollback' without checkpoints",
        lambda c: (
            c.on_non_finite == "rollback"
            and not (c.checkpoint_every_steps or c.checkpoint_every_epochs or c.checkpoint_every_seconds)
        ),
        "onNonFinite 'rollback' goes back to the last checkpoint, and none is asked for; set "
        "checkpointEverySteps, checkpointEveryEpochs or checkpointEverySeconds",
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
        "activationOffload 'host' moves activations from the GPU to the host's memory, and without useGpu "
        "they are there already; set useGpu=True, or activationOffload='disk'",
    ),
    Combination(
        "sharding='parameters' with another collective than 'torch'",
        lambda c: c.sharding == "parameters" and c.collective != "torch" and c.num_workers > 1,
        "sharding 'parameters' gathers each block's parameters with torch.distributed, which collective "
        "'{collective}' does not have; set collective='torch', or sharding='gradients'",
    ),
    Combination(
        "sharding='parameters' with an optimizer that looks at whole parameters",
        lambda c: c.sharding == "parameters" and c.num_workers > 1 and c.optimizer in _OF_WHOLE_PARAMETERS,
        "sharding 'parameters' leaves a part of every parameter to each rank, and optimizer '{optimizer}' "
        "looks at whole ones; set optimizer='adamw', or sharding='gradients'",
    ),
    Combination(
        "sharding='parameters' with activationOffload or activationCompression",
        lambda c: (
            c.sharding == "parameters"
            and c.num_workers > 1
            and (c.activation_offload, c.activation_compression) != ("none", "none")
        ),
        "sharding 'parameters' gathers weights anew for the backward pass, and activationOffload "
        "('{activation_offload}') or activationCompression ('{activation_compression}') would pack them as "
        "activations; set both to 'none', or sharding='gradients'",
    ),
    Combination(
        "optimizer='adam1bit' with gradientCompression that begins at once",
        lambda c: (
            c.optimizer == "adam1bit"
            and c.gradient_compression["name"] != "none"
            and not c.gradient_compression["after"]
        ),
        "optimizer 'adam1bit' keeps the second moments that it has when gradientCompression "
        "('{gradient_compression[name]}') begins, and in the first step it has none; give the compression an "
        "'after' of about a tenth of the steps",
    ),
    Combination(
        "gradientCompression with another consistency than 'bsp'",
        lambda c: _compresses(c) and _runs_apart(c),
        "gradientCompression sums gradients that all workers exchange at once, and with consistency "
        "'{consistency[name]}' none waits for the others; set consistency='bsp', or "
        "gradientCompression='none'",
    ),
    Combination(
        "localSteps with gradientCompression or another consistency than 'bsp'",
        lambda c: (
            c.local_steps != 1 and c.num_workers > 1 and (_compresses(c) or c.consistency["name"] != "bsp")
        ),
        "localSteps has workers exchange weights now and then instead of gradients, got gradientCompression "
        "'{gradient_compression[name]}' and consistency '{consistency[name]}' beside it; set localSteps=1, "
        "or leave both at 'none' and 'bsp'",
    ),
    Combination(
        "gradientCompression with sharding",
        lambda c: _compresses(c) and c.sharding != "none" and c.num_workers > 1,
        "gradientCompression sums whole gradients on every rank, and sharding '{sharding}' leaves each a "
        "part of them; set sharding='none', or gradientCompression='none'",
    ),
    Combination(
        "compile with sharding='parameters'",
        lambda c: bool(c.compile) and c.sharding == "parameters" and c.num_workers > 1,
        "compile fuses operations over the whole network, and sharding 'parameters' gathers its weights "
        "block by block in between; set sharding='gradients', or compile=False",
    ),
    Combination(
        "compile with activationOffload or activationCompression",
        lambda c: bool(c.compile) and (c.activation_offload, c.activation_compression) != ("none", "none"),
        "compile decides itself what is kept for the backward pass, and activationOffload "
        "('{activation_offload}') or activationCompression ('{activation_compression}') pack what single "
        "operations keep; set both to 'none', or compile=False",
    ),
    Combination(
        "compile='reduce-overhead' or 'max-autotune' with useGpu and gradientAccumulation or "
        "gradientCheckpointing",
        lambda c: (
            c.compile in ("reduce-overhead", "max-autotune")
            and c.use_gpu
            and (c.gradient_accumulation > 1 or c.gradient_checkpointing != "none")
        ),
        "compile '{compile}' records CUDA graphs, which write each pass over the one before, and "
        "gradientAccumulation ({gradient_accumulation}) or gradientCheckpointing "
        "('{gradient_checkpointing}') runs several before their results are used; set "
        "compile='max-autotune-no-cudagraphs' or True",
    ),
    Combination(
        "localSteps with sharding",
        lambda c: c.local_steps != 1 and c.sharding != "none",
        "localSteps lets each worker step on its own with all of the optimizer's state, of which sharding "
        "'{sharding}' leaves it a part; set sharding='none', or localSteps=1",
    ),
    Combination(
        "localSteps with precision='fp16'",
        lambda c: c.local_steps != 1 and c.precision == "fp16",
        "precision 'fp16' has all workers agree in every step whether gradients overflowed, which localSteps "
        "is there to spare; set precision='bf16', or localSteps=1",
    ),
    Combination(
        "localSteps with onNonFinite other than 'stop'",
        lambda c: c.local_steps != 1 and c.on_non_finite != "stop",
        "onNonFinite '{on_non_finite}' has all workers agree in every step whether to take it, which "
        "localSteps is there to spare; set onNonFinite='stop', or localSteps=1",
    ),
    Combination(
        "localSteps with emaDecay",
        lambda c: c.local_steps != 1 and c.ema_decay is not None,
        "emaDecay ({ema_decay}) averages the weights after every step, and with localSteps those of the "
        "workers differ; leave emaDecay unset, or set localSteps=1",
    ),
    Combination(
        "localSteps with optimizerState='average' and optimizer='adam8bit' or 'adamw8bit'",
        lambda c: _local(c, "optimizerState") == "average" and c.optimizer in ("adam8bit", "adamw8bit"),
        "localSteps' optimizerState 'average' averages floating numbers, and optimizer '{optimizer}' keeps "
        "codes; set optimizerState='keep', or optimizer='adamw'",
    ),
    Combination(
        "localSteps with send='int8' and numWorkers > 127",
        lambda c: _local(c, "send") == "int8" and c.num_workers > 127,
        "localSteps' send 'int8' leaves each worker 127 / numWorkers levels, got numWorkers={num_workers}; "
        "set send='fp16'",
    ),
    Combination(
        "collective='local' with numWorkers > 1",
        lambda c: c.collective == "local" and c.num_workers > 1,
        "collective 'local' serves one worker, got numWorkers={num_workers}; "
        "set collective='horovod' or 'torch'",
    ),
    Combination(
        "consistency with sharding",
        lambda c: _runs_apart(c) and c.sharding != "none",
        "consistency '{consistency[name]}' keeps the optimizer at the servers, each with its part, and "
        "sharding '{sharding}' would part it again; set sharding='none', or consistency='bsp'",
    ),
    Combination(
        "consistency with precision='fp16'",
        lambda c: _runs_apart(c) and c.precision == "fp16",
        "precision 'fp16' skips a step on all workers if one overflows, and with consistency "
        "'{consistency[name]}' they take none together; set precision='bf16', or consistency='bsp'",
    ),
    Combination(
        "consistency with onNonFinite",
        lambda c: _runs_apart(c) and c.on_non_finite != "stop",
        "onNonFinite '{on_non_finite}' undoes a step on all workers, and with consistency "
        "'{consistency[name]}' they take none together; set onNonFinite='stop', or consistency='bsp'",
    ),
    Combination(
        "consistency with emaDecay",
        lambda c: _runs_apart(c) and c.ema_decay is not None,
        "emaDecay averages the weights after each step, and with consistency '{consistency[name]}' every "
        "worker sees others; leave emaDecay unset, or set consistency='bsp'",
    ),
    Combination(
        "consistency with an optimizer that looks at whole parameters",
        lambda c: (
            _runs_apart(c) and c.consistency["name"] != "hogwild" and c.optimizer in _OF_WHOLE_PARAMETERS
        ),
        "consistency '{consistency[name]}' leaves a part of every parameter to each server, and optimizer "
        "'{optimizer}' looks at whole ones; set optimizer='adamw', or consistency='bsp'",
    ),
    Combination(
        "consistency='ssp' of staleness 0 with maxGradNorm",
        lambda c: _runs_apart(c) and c.is_in_step and c.max_grad_norm is not None,
        "maxGradNorm ({max_grad_norm}) bounds the norm of all workers' gradients together, of which each "
        "server has a part; leave maxGradNorm unset, or set consistency='bsp', which is the same training",
    ),
    Combination(
        "consistency='hogwild' with useGpu",
        lambda c: _runs_apart(c) and c.consistency["name"] == "hogwild" and c.use_gpu,
        "consistency 'hogwild' trains in the memory of the host, and useGpu puts the weights on GPUs; set "
        "useGpu=False, or consistency='asp'",
    ),
    Combination(
        "parallelism with another collective than 'torch'",
        lambda c: (c.cuts_network or c.parallelism.get("shard", 1) > 1) and c.collective != "torch",
        "parallelism {parallelism} exchanges inside parts of the gang, which collective '{collective}' does "
        "not have; set collective='torch', or give all workers to 'data'",
    ),
    Combination(
        "parallelism over 'shard' without sharding",
        lambda c: c.parallelism.get("shard", 1) > 1 and c.sharding == "none",
        "parallelism's 'shard' cuts over its workers what sharding names, got sharding '{sharding}'; set "
        "sharding='parameters', 'gradients' or 'optimizer', or 'data' in place of 'shard'",
    ),
    Combination(
        "parallelism over 'pipeline' or 'expert' with sharding='parameters'",
        lambda c: (
            any(c.parallelism.get(axis, 1) > 1 for axis in ("pipeline", "expert"))
            and c.sharding == "parameters"
        ),
        "sharding 'parameters' gathers a block in the same pass of all workers that have parts of it, and "
        "with parallelism {parallelism} they run other stages, or experts for other workers' rows; set "
        "sharding='gradients'",
    ),
    Combination(
        "parallelism's between='parts' with sharding='parameters'",
        lambda c: c.parallelism.get("between") == "parts" and c.sharding == "parameters",
        "parallelism's 'between' \"parts\" sums gradients of whole parameters at the end of a step, of which "
        "sharding 'parameters' leaves each worker a part; set sharding='gradients', or leave 'between' out",
    ),
    Combination(
        "parallelism that cuts the network with gradientCompression",
        lambda c: c.cuts_network and _compresses(c),
        "gradientCompression sums whole matrices, of which parallelism {parallelism} leaves a worker parts; "
        "set gradientCompression='none', or give all workers to 'data'",
    ),
    Combination(
        "parallelism that cuts the network with localSteps",
        lambda c: c.cuts_network and c.local_steps != 1,
        "parallelism {parallelism} has workers exchange inside every step, and with localSteps they step "
        "apart; set localSteps=1, or give all workers to 'data'",
    ),
    Combination(
        "parallelism that cuts the network with another consistency than 'bsp'",
        lambda c: c.cuts_network and _runs_apart(c),
        "parallelism {parallelism} has workers exchange inside every step, and with consistency "
        "'{consistency[name]}' they step apart; set consistency='bsp', or give all workers to 'data'",
    ),
    Combination(
        "parallelism that cuts the network with an optimizer that looks at whole parameters",
        lambda c: _cuts_parameters(c) and c.optimizer in _OF_WHOLE_PARAMETERS,
        "parallelism {parallelism} leaves a worker parts of parameters, and optimizer '{optimizer}' looks at "
        "whole ones; set optimizer='adamw', or give the workers to 'pipeline'",
    ),
    Combination(
        "parallelism over 'pipeline' with sharding and an optimizer that looks at whole parameters",
        lambda c: (
            c.cuts_network
            and not _cuts_parameters(c)
            and c.sharding != "none"
            and c.optimizer in _OF_WHOLE_PARAMETERS
        ),
        "sharding '{sharding}' leaves workers parts of a stage's parameters, and optimizer '{optimizer}' "
        "looks at whole ones; set sharding='none', or optimizer='adamw'",
    ),
    Combination(
        "parallelism that cuts the network with adam1bit",
        lambda c: c.cuts_network and c.optimizer == "adam1bit",
        "optimizer 'adam1bit' sums whole gradients in one bit, of which parallelism {parallelism} leaves a "
        "worker parts; set optimizer='adamw', or give all workers to 'data'",
    ),
    Combination(
        "parallelism that cuts the network with lora",
        lambda c: c.cuts_network and c.lora is not None,
        "lora adds matrices beside whole layers, which parallelism {parallelism} cuts; leave lora unset, or "
        "give all workers to 'data'",
    ),
    Combination(
        "parallelism that cuts the network with noiseScale",
        lambda c: c.cuts_network and c.noise_scale,
        "noiseScale compares whole gradients, of which parallelism {parallelism} leaves a worker parts; "
        "leave noiseScale unset, or give all workers to 'data'",
    ),
    Combination(
        "parallelism that cuts the network with compile",
        lambda c: c.cuts_network and bool(c.compile),
        "compile traces the network as one piece, and parallelism {parallelism} exchanges inside it; set "
        "compile=False, or give all workers to 'data'",
    ),
    Combination(
        "parallelism's time_chunks without 'pipeline'",
        lambda c: c.parallelism.get("time_chunks", 1) > 1 and c.parallelism.get("pipeline", 1) == 1,
        "parallelism's 'time_chunks' ({parallelism[time_chunks]}) passes parts of rows between the stages of "
        "a pipeline; give workers to 'pipeline', or leave 'time_chunks' out",
    ),
    Combination(
        "parallelism's time_chunks with 'tensor', 'expert' or 'sequence'",
        lambda c: (
            c.parallelism.get("time_chunks", 1) > 1
            and any(c.parallelism.get(axis, 1) > 1 for axis in ("tensor", "expert", "sequence"))
        ),
        "parallelism's 'time_chunks' goes with the axes 'data', 'shard' and 'pipeline', as other axes "
        "exchange in every part of a row, got parallelism {parallelism}; leave the other axes or "
        "'time_chunks' out",
    ),
    Combination(
        "parallelism's time_chunks with a schedule that splits backward passes",
        lambda c: (
            c.parallelism.get("time_chunks", 1) > 1
            and c.parallelism.get("schedule") in ("zero_bubble", "zbv")
        ),
        "parallelism's 'time_chunks' takes backward passes against time as a whole, and schedule "
        "'{parallelism[schedule]}' splits them; set schedule='1f1b', or leave 'time_chunks' out",
    ),
    Combination(
        "parallelism's schedule without a flush with onNonFinite='rollback'",
        lambda c: c.parallelism.get("schedule") in ("pipedream", "2bw") and c.on_non_finite == "rollback",
        "onNonFinite 'rollback' goes back to a checkpoint, and with parallelism's schedule "
        "'{parallelism[schedule]}' rows of the steps before are still on their way; set onNonFinite='skip', "
        "or schedule='1f1b'",
    ),
    Combination(
        "parallelism's schedule without a flush with precision='fp16' or sharding",
        lambda c: (
            c.parallelism.get("schedule") in ("pipedream", "2bw")
            and (c.precision == "fp16" or c.sharding != "none")
        ),
        "parallelism's schedule '{parallelism[schedule]}' has gradients of an earlier step, or none, where "
        "precision '{precision}' looks at each step's or sharding '{sharding}' cuts them; set "
        "precision='bf16' and sharding='none', or schedule='1f1b'",
    ),
    Combination(
        "parallelism that cuts the network, or over 'shard', with minWorkers",
        lambda c: (
            (c.cuts_network or c.parallelism.get("shard", 1) > 1)
            and c.min_workers is not None
            and c.min_workers < c.num_workers
        ),
        "parallelism {parallelism} needs all of its workers, and minWorkers ({min_workers}) asks to go on "
        "with fewer than numWorkers ({num_workers}); leave minWorkers unset",
    ),
    Combination(
        "parallelism that cuts the network with memoryBudget's offload or activation compression",
        lambda c: c.cuts_network and (c.activation_offload, c.activation_compression) != ("none", "none"),
        "activationOffload ('{activation_offload}') and activationCompression ('{activation_compression}') "
        "were not tried where parallelism {parallelism} exchanges inside the network; set both to 'none'",
    ),
)
