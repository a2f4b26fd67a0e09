"""What values of settings need and take away, from which every refusal of two such values follows.

A training with a value that needs a capability and another value that takes it away is refused. A technique
states here what it needs and takes away, and names no other technique. Rules about numbers are in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from ringspark.estimators.options.sync import AllReduce, Asynchronous, Hogwild, LocalTraining
from ringspark.estimators.training.optimizers.registry import ELEMENTWISE, OPTIMIZERS
from ringspark.estimators.training.settings.values import ConfigValues

# Each constant completes "A needs ...".
SUMMED_GRADIENTS = "whole, uncompressed gradients that workers only sum"
STEPS_TOGETHER = "all workers to agree in every step"
SAME_WEIGHTS = "the same weights on every worker after each step"
WHOLE_NETWORK = "the whole network on every worker"
WHOLE_PARAMETERS = "whole parameters on every worker"
WHOLE_PASSES = "all layers and whole rows in one pass on each worker"
OWN_GRADIENTS = "the gradients of each step's own rows"
ONE_PASS = "one forward pass at a time"
BATCH_GRADIENT = "one gradient for a whole batch"
EXACT_VALUES = "exact values of the training rows"
TRAINERS_STEP = "the trainer's own forward and backward pass"
FIRST_DERIVATIVES = "a loss with first derivatives only"
EAGER_CODE = "code that runs operation by operation"
REPEATABLE_STEPS = "steps that can be repeated"
PLAIN_ACTIVATIONS = "activations as they were computed"

_OF_WHOLE_PARAMETERS = frozenset(OPTIMIZERS) - ELEMENTWISE
_DELAYED = ("pipedream", "2bw")


# How a message names a value, with fields of the config in braces, if not by the name of its setting.
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
# What a user does to avoid a value, if not to leave its setting unset.
_REMEDIES = {
    "sync": "set sync=AllReduce()",
    "parallelism": "give all workers to 'data'",
    "optimizer": "set optimizer='adamw'",
    "precision": "set precision='bf16'",
    "onNonFinite": "set onNonFinite='stop'",
    "monitor": "use validationIndicatorCol for rows that need no protection",
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
        remedy: What a user does to avoid the value.
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
    """Yields a sentence, with fields of the config in braces, for each two values that exclude each other."""
    found = [value for value in VALUES if value.is_set(config)]
    for one, other in product(found, found):
        if one.setting != other.setting:
            yield from (sentence(one, other, needed) for needed in one.needs if needed in other.takes)


def sentence(needing: SettingValue, taking: SettingValue, needed: str) -> str:
    reason = f"{needing.text} needs {needed}, but {taking.text} {taking.takes[needed]}"
    return f"{reason}; {taking.remedy}, or {needing.remedy}"


def _is_asynchronous(c: ConfigValues) -> bool:
    return isinstance(c.sync, Asynchronous) and c.num_workers > 1


def _is_zero3(c: ConfigValues) -> bool:
    return c.sync.sharding == "parameters" and c.num_workers > 1


def _sums_on_hosts(c: ConfigValues) -> bool:
    return c.sync.compressed is not None and c.sync.compressed.between == "hosts"


def _divides_passes(c: ConfigValues) -> bool:
    axes = ("pipeline", "expert", "sequence")
    return c.parallelism.sequence_parallel or any(c.parallelism.size(axis) > 1 for axis in axes)


VALUES: tuple[SettingValue, ...] = (
    SettingValue(
        "sync",
        lambda c: c.sync != AllReduce(),
        takes={SUMMED_GRADIENTS: "sends other values"},
        shown="sync other than AllReduce()",
    ),
    SettingValue(
        "sync",
        lambda c: isinstance(c.sync, LocalTraining) or _is_asynchronous(c),
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
        lambda c: _is_asynchronous(c) and not isinstance(c.sync, Hogwild),
        takes={WHOLE_PARAMETERS: "gives each server a shard of every parameter"},
        shown="sync=ParameterServer",
    ),
    SettingValue(
        "sync",
        lambda c: _is_asynchronous(c) or c.sync.strategy == "cpsgd",
        takes={REPEATABLE_STEPS: "makes steps depend on time or noise"},
        shown="sync=ParameterServer or Hogwild, or with CpSGD",
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
        _is_zero3,
        needs=(FIRST_DERIVATIVES, EAGER_CODE, PLAIN_ACTIVATIONS),
        takes={WHOLE_PARAMETERS: "leaves each worker a shard of every parameter"},
        remedy="set sync=Zero(stage=1)",
        shown="sync=Zero(stage=3)",
    ),
    SettingValue(
        "parallelism",
        lambda c: c.cuts_network,
        needs=(STEPS_TOGETHER,),
        takes={WHOLE_NETWORK: "gives each worker only a shard"},
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
        takes={WHOLE_PASSES: "gives a worker parts of rows, some of the layers, or other workers' rows"},
        remedy="give all workers to 'data' and 'tensor'",
        shown="parallelism over 'pipeline', 'expert' or 'sequence', or with sequence_parallel",
    ),
    SettingValue(
        "parallelism",
        lambda c: c.parallelism.pipeline.stages > 1,
        takes={ONE_PASS: "runs several at once"},
        remedy="use 'tensor', 'sequence' or 'expert'",
        shown="parallelism over 'pipeline'",
    ),
    SettingValue(
        "parallelism",
        lambda c: c.parallelism.sequence_parallel,
        needs=(WHOLE_PARAMETERS,),
        remedy="set sequence_parallel=False",
        text="parallelism's sequence_parallel",
    ),
    SettingValue(
        "parallelism",
        lambda c: c.parallelism.pipeline.schedule in _DELAYED,
        takes={OWN_GRADIENTS: "gives a step gradients of an earlier step, or none"},
        remedy="set schedule='1f1b'",
        text="Pipeline's schedule '{parallelism.pipeline.schedule}'",
    ),
    SettingValue("optimizer", lambda c: c.optimizer in _OF_WHOLE_PARAMETERS, needs=(WHOLE_PARAMETERS,)),
    SettingValue("optimizer", lambda c: c.optimizer == "adam1bit", needs=(WHOLE_NETWORK,)),
    SettingValue(
        "precision",
        lambda c: c.precision == "fp16",
        needs=(STEPS_TOGETHER, OWN_GRADIENTS, EXACT_VALUES),
    ),
    SettingValue(
        "onNonFinite",
        lambda c: c.on_non_finite != "stop",
        needs=(STEPS_TOGETHER, TRAINERS_STEP, EXACT_VALUES),
    ),
    SettingValue(
        "onNonFinite",
        lambda c: c.on_non_finite == "rollback",
        needs=(OWN_GRADIENTS,),
        takes={REPEATABLE_STEPS: "trains some steps again with other rates"},
        remedy="set onNonFinite='skip'",
    ),
    SettingValue("emaDecay", lambda c: c.ema_decay is not None, needs=(SAME_WEIGHTS,)),
    SettingValue("noiseScale", lambda c: c.noise_scale, needs=(WHOLE_NETWORK, TRAINERS_STEP, EXACT_VALUES)),
    SettingValue(
        "monitor", lambda c: c.looks_for_best and c.monitor.startswith("train_"), needs=(EXACT_VALUES,)
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
        takes={PLAIN_ACTIVATIONS: "packs them"},
    ),
    SettingValue(
        "activationCompression",
        lambda c: c.activation_compression != "none",
        needs=(ONE_PASS, BATCH_GRADIENT, TRAINERS_STEP),
        takes={PLAIN_ACTIVATIONS: "packs them"},
    ),
    SettingValue(
        "activationCompression",
        lambda c: c.activation_compression in ("int8", "fp8"),
        needs=(FIRST_DERIVATIVES,),
        remedy="set activationCompression='bits'",
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
        needs=(SUMMED_GRADIENTS, WHOLE_NETWORK, BATCH_GRADIENT),
        takes={TRAINERS_STEP: "runs its own"},
    ),
    SettingValue("certify", lambda c: c.certify, needs=(REPEATABLE_STEPS,)),
    SettingValue(
        "privacy",
        lambda c: c.privacy is not None,
        needs=(SUMMED_GRADIENTS, WHOLE_NETWORK),
        takes={
            BATCH_GRADIENT: "clips the gradient of each row",
            EXACT_VALUES: "publishes only noisy sums",
            REPEATABLE_STEPS: "keeps its samples and its noise secret",
        },
    ),
)
