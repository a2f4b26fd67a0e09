"""Capabilities that values of settings need or take away.

A training is refused if one value needs a capability that another value takes away. A technique states here
what it needs and takes away, and names no other technique. Other rules are in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from ringspark.estimators.options.sync import AllReduce, Asynchronous, Hogwild, LocalTraining
from ringspark.estimators.training.optimizers.registry import ELEMENTWISE, OPTIMIZERS
from ringspark.estimators.training.settings.values import ConfigValues

# Each constant completes "A needs ...".
PLAIN_ALL_REDUCE = "a plain all-reduce of the gradients"
STEPS_TOGETHER = "all workers to synchronize in every step"
SAME_WEIGHTS = "the same weights on every worker after each step"
WHOLE_NETWORK = "the whole network and whole rows on every worker"
WHOLE_PARAMETERS = "whole parameters on every worker"
UNSHARDED_BY_SYNC = "parameters that sync does not shard"
WHOLE_PASSES = "all layers and whole rows in one pass on each worker"
OWN_GRADIENTS = "the gradients of each step's own rows"
ONE_PASS = "one forward pass at a time"
BATCH_GRADIENT = "one gradient for a whole batch"
EXACT_VALUES = "values of the training rows without noise"
ROW_DECISIONS = "to skip a step because of single rows"
TRAINERS_STEP = "the trainer's own forward and backward pass"
FIRST_DERIVATIVES = "a loss with first derivatives only"
EAGER_CODE = "eager execution"
REPEATABLE_STEPS = "steps that can be repeated"
PLAIN_ACTIVATIONS = "activations that stay in memory unchanged"

_OF_WHOLE_PARAMETERS = frozenset(OPTIMIZERS) - ELEMENTWISE
_DELAYED = ("pipedream", "2bw")
_PLAIN_SYNC = AllReduce()


# Text of a value in a message; fields of the config stand in braces. Default: the name of the setting.
_TEXTS = {
    "sync": "sync={sync}",
    "parallelism": "parallelism={parallelism}",
    "optimizer": "optimizer '{optimizer}'",
    "precision": "precision '{precision}'",
    "onNonFinite": "onNonFinite '{on_non_finite}'",
    "emaDecay": "emaDecay ({ema_decay})",
    "monitor": "monitor '{monitor}'",
    "compile": "compile ({compile})",
    "gradientAccumulation": "gradientAccumulation ({gradient_accumulation})",
    "gradientCheckpointing": "gradientCheckpointing ('{gradient_checkpointing}')",
    "activationOffload": "activationOffload ('{activation_offload}')",
    "activationCompression": "activationCompression ('{activation_compression}')",
    "loss": "a loss that takes the module",
}
# How a user avoids a value. Default: "leave <setting> unset".
_REMEDIES = {
    "sync": "set sync=AllReduce()",
    "parallelism": "give all workers to 'data'",
    "optimizer": "set optimizer='adamw'",
    "precision": "set precision='bf16'",
    "onNonFinite": "set onNonFinite='stop'",
    "monitor": "set monitor to a value of rows in validationIndicatorCol, which need no protection",
    "loss": "set a loss of outputs and labels",
}


@dataclass(frozen=True)
class SettingValue:
    """Values of a setting.

    Attributes:
        setting: Name of the setting; two values of one setting never exclude each other.
        is_set: Whether a config has such a value.
        needs: Capabilities that the value needs.
        takes: Capabilities that the value takes away; the words complete "but A ...".
        remedy: How a user avoids the value.
        text: The value in a message, with fields of the config in braces.
        shown: The values in the docs, if `text` does not say which.
    """

    setting: str
    is_set: Callable[[ConfigValues], bool]
    needs: tuple[str, ...] = ()
    takes: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""
    text: str = ""
    shown: str = ""

    def __post_init__(self) -> None:
        remedy = _REMEDIES.get(self.setting, f"leave {self.setting} unset")
        object.__setattr__(self, "remedy", self.remedy or remedy)
        object.__setattr__(self, "text", self.text or _TEXTS.get(self.setting, self.setting))


def conflicts(config: ConfigValues) -> Iterator[str]:
    """Yields a message, with fields of the config in braces, for each two values that exclude each other."""
    found = [value for value in VALUES if value.is_set(config)]
    for one, other in product(found, found):
        if one.setting != other.setting:
            yield from (sentence(one, other, needed) for needed in one.needs if needed in other.takes)


def sentence(needing: SettingValue, taking: SettingValue, needed: str) -> str:
    reason = f"{needing.text} needs {needed}, but {taking.text} {taking.takes[needed]}"
    return f"{reason}; {taking.remedy}, or {needing.remedy}"


def is_asynchronous(c: ConfigValues) -> bool:
    return isinstance(c.sync, Asynchronous) and c.num_workers > 1


def is_zero3(c: ConfigValues) -> bool:
    return c.sync.sharding == "parameters" and c.num_workers > 1


def _sums_on_hosts(c: ConfigValues) -> bool:
    return c.sync.compressed is not None and c.sync.compressed.between == "hosts"


def _divides_passes(c: ConfigValues) -> bool:
    axes = ("pipeline", "expert", "sequence")
    return c.parallelism.sequence_parallel or any(c.parallelism.size(axis) > 1 for axis in axes)


VALUES: tuple[SettingValue, ...] = (
    SettingValue(
        "sync",
        lambda c: c.sync != _PLAIN_SYNC,
        takes={PLAIN_ALL_REDUCE: "synchronizes workers in another way"},
        shown="sync other than AllReduce()",
    ),
    SettingValue(
        "sync",
        lambda c: isinstance(c.sync, LocalTraining) or is_asynchronous(c),
        takes={STEPS_TOGETHER: "lets each worker step on its own"},
        shown="sync=LocalSGD, DiLoCo, ElasticAveraging, ParameterServer or Hogwild",
    ),
    SettingValue(
        "sync",
        lambda c: isinstance(c.sync, LocalTraining) or not c.is_in_step,
        takes={SAME_WEIGHTS: "lets each worker's weights differ"},
        shown="sync=LocalSGD, DiLoCo, ElasticAveraging, Hogwild, or ParameterServer with staleness",
    ),
    SettingValue(
        "sync",
        lambda c: is_asynchronous(c) and not isinstance(c.sync, Hogwild),
        takes={WHOLE_PARAMETERS: "gives each server a shard of every parameter"},
        shown="sync=ParameterServer",
    ),
    SettingValue(
        "sync",
        is_asynchronous,
        takes={REPEATABLE_STEPS: "makes steps depend on the timing of workers"},
        shown="sync=ParameterServer or Hogwild",
    ),
    SettingValue(
        "sync",
        lambda c: c.sync.strategy == "cpsgd",
        takes={REPEATABLE_STEPS: "adds secret noise"},
        shown="sync with CpSGD",
    ),
    SettingValue(
        "sync",
        lambda c: c.sync.strategy == "cpsgd" or _sums_on_hosts(c),
        needs=(WHOLE_NETWORK,),
        shown="sync with CpSGD or a compression between='hosts'",
    ),
    SettingValue("sync", lambda c: c.sync.sharding != "none", needs=(OWN_GRADIENTS,), shown="sync=Zero(...)"),
    SettingValue(
        "sync",
        is_zero3,
        needs=(FIRST_DERIVATIVES, EAGER_CODE, PLAIN_ACTIVATIONS),
        takes={
            WHOLE_PARAMETERS: "leaves each worker a shard of every parameter",
            UNSHARDED_BY_SYNC: "leaves each worker a shard of every parameter",
        },
        remedy="set sync=Zero(stage=1)",
        shown="sync=Zero(stage=3)",
    ),
    SettingValue(
        "parallelism",
        lambda c: c.cuts_network,
        needs=(STEPS_TOGETHER,),
        takes={WHOLE_NETWORK: "gives each worker only a shard of the network or of each row"},
        shown="parallelism over 'pipeline', 'expert', 'sequence' or 'tensor'",
    ),
    SettingValue(
        "parallelism",
        lambda c: max(c.parallelism.tensor, c.parallelism.expert) > 1,
        takes={WHOLE_PARAMETERS: "gives each worker only shards of them"},
        remedy="give the workers to 'pipeline' or 'sequence'",
        shown="parallelism over 'tensor' or 'expert'",
    ),
    SettingValue(
        "parallelism",
        _divides_passes,
        takes={WHOLE_PASSES: "splits rows or layers over workers, or mixes the rows of several workers"},
        remedy="give all workers to 'data', 'shard' and 'tensor', with sequence_parallel=False",
        shown="parallelism over 'pipeline', 'expert' or 'sequence', or with sequence_parallel",
    ),
    SettingValue(
        "parallelism",
        lambda c: c.parallelism.pipeline.stages > 1,
        takes={ONE_PASS: "runs several at once"},
        remedy="give the workers to other axes than 'pipeline'",
        shown="parallelism over 'pipeline'",
    ),
    SettingValue(
        "parallelism",
        lambda c: c.parallelism.sequence_parallel,
        needs=(UNSHARDED_BY_SYNC,),
        remedy="set sequence_parallel=False",
        text="parallelism's sequence_parallel",
    ),
    SettingValue(
        "parallelism",
        lambda c: c.parallelism.pipeline.schedule in _DELAYED,
        takes={OWN_GRADIENTS: "gives a step gradients of an earlier step, or none"},
        remedy="set schedule='1f1b'",
        text="Pipeline's schedule '{parallelism.pipeline.schedule}'",
        shown="Pipeline's schedule 'pipedream' or '2bw'",
    ),
    SettingValue(
        "optimizer",
        lambda c: c.optimizer in _OF_WHOLE_PARAMETERS,
        needs=(WHOLE_PARAMETERS,),
        shown=f"optimizer={' or '.join(map(repr, sorted(_OF_WHOLE_PARAMETERS)))}",
    ),
    SettingValue(
        "optimizer", lambda c: c.optimizer == "adam1bit", needs=(WHOLE_NETWORK,), shown="optimizer='adam1bit'"
    ),
    SettingValue(
        "precision",
        lambda c: c.precision == "fp16",
        needs=(STEPS_TOGETHER, OWN_GRADIENTS, ROW_DECISIONS),
        shown="precision='fp16'",
    ),
    SettingValue(
        "onNonFinite",
        lambda c: c.on_non_finite != "stop",
        needs=(STEPS_TOGETHER, TRAINERS_STEP, ROW_DECISIONS),
        shown="onNonFinite='skip' or 'rollback'",
    ),
    SettingValue(
        "onNonFinite",
        lambda c: c.on_non_finite == "rollback",
        needs=(OWN_GRADIENTS,),
        takes={REPEATABLE_STEPS: "trains some steps again with other learning rates"},
        remedy="set onNonFinite='skip'",
        shown="onNonFinite='rollback'",
    ),
    SettingValue("emaDecay", lambda c: c.ema_decay is not None, needs=(SAME_WEIGHTS,)),
    SettingValue("noiseScale", lambda c: c.noise_scale, needs=(WHOLE_NETWORK, TRAINERS_STEP, EXACT_VALUES)),
    SettingValue(
        "monitor",
        lambda c: c.looks_for_best and c.monitor.startswith("train_"),
        needs=(EXACT_VALUES,),
        shown="monitor of the training rows",
    ),
    SettingValue(
        "compile",
        lambda c: bool(c.compile),
        needs=(WHOLE_PASSES, BATCH_GRADIENT, TRAINERS_STEP, FIRST_DERIVATIVES, PLAIN_ACTIVATIONS),
        takes={EAGER_CODE: "fuses operations"},
    ),
    SettingValue("gradientAccumulation", lambda c: c.gradient_accumulation > 1, needs=(TRAINERS_STEP,)),
    SettingValue(
        "gradientCheckpointing", lambda c: c.gradient_checkpointing != "none", needs=(BATCH_GRADIENT,)
    ),
    SettingValue(
        "activationOffload",
        lambda c: c.activation_offload != "none",
        needs=(ONE_PASS, BATCH_GRADIENT, TRAINERS_STEP),
        takes={PLAIN_ACTIVATIONS: "moves them"},
    ),
    SettingValue(
        "activationCompression",
        lambda c: c.activation_compression != "none",
        needs=(ONE_PASS, BATCH_GRADIENT, TRAINERS_STEP),
        takes={PLAIN_ACTIVATIONS: "compresses them"},
    ),
    SettingValue(
        "activationCompression",
        lambda c: c.activation_compression in ("int8", "fp8"),
        needs=(FIRST_DERIVATIVES,),
        remedy="set activationCompression='bits'",
        shown="activationCompression='int8' or 'fp8'",
    ),
    SettingValue(
        "loss",
        lambda c: c.differentiates_twice,
        needs=(WHOLE_PASSES, BATCH_GRADIENT),
        takes={FIRST_DERIVATIVES: "may differentiate twice"},
    ),
    SettingValue(
        "trainingStep",
        lambda c: c.training_step is not None,
        needs=(PLAIN_ALL_REDUCE, WHOLE_NETWORK, BATCH_GRADIENT),
        takes={TRAINERS_STEP: "runs its own"},
    ),
    SettingValue("certify", lambda c: c.certify, needs=(REPEATABLE_STEPS,)),
    SettingValue(
        "privacy",
        lambda c: c.privacy is not None,
        needs=(PLAIN_ALL_REDUCE, WHOLE_NETWORK),
        takes={
            BATCH_GRADIENT: "clips the gradient of each row",
            EXACT_VALUES: "adds noise to them",
            ROW_DECISIONS: "must not show whether a row is there",
            REPEATABLE_STEPS: "keeps its samples and its noise secret",
        },
    ),
)
