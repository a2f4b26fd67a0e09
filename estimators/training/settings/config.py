"""`TrainConfig`, the frozen value that travels as JSON from the driver to every rank.

Its constructor checks the settings' ranges, the rules of `rules.py`, and what values need and take away.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ringspark.estimators.options.declare import Options
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.training.settings.capabilities import conflicts
from ringspark.estimators.training.settings.rules import COMBINATIONS
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.estimators.training.settings.values import ConfigValues
from ringspark.models.adapters import adapt_network
from ringspark.pipelines.typed_json import JsonText

_OF_RANKS = [setting for setting in SETTINGS.values() if not setting.on_driver]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ConfigValues, JsonText):
    """Everything that decides a training, except the user's own Python objects."""

    def __post_init__(self) -> None:
        for setting in _OF_RANKS:
            value = getattr(self, setting.field)
            if value is not setting.default:
                object.__setattr__(self, setting.field, setting.check(value))
        self._check_rules()

    @classmethod
    def of_checked(cls, **values: Any) -> TrainConfig:
        """Makes a config of values that their Params have checked; checks only the rules between settings."""
        made = cls.__new__(cls)
        defaults = {f.name: f.default for f in fields(cls)}
        assert values.keys() <= defaults.keys(), values.keys() - defaults.keys()
        vars(made).update(defaults | values)
        made._check_rules()
        return made

    def with_values(self, **values: Any) -> TrainConfig:
        """Returns the config with other values, which are right alone; checks the rules between settings."""
        return self.of_checked(**vars(self) | values)

    def _check_rules(self) -> None:
        self.parallelism.sizes(self.num_workers)
        broken = (rule.message for rule in COMBINATIONS if rule.is_broken(self))
        message = next(broken, None) or next(conflicts(self), None)
        if message is not None:
            words = {"readers": self._readers, "replica": self.workers_per_replica}
            raise ValueError(message.format(**self._values(), **words))

    def without_sharding(self) -> TrainConfig:
        """Returns the config without sharded state; the number of replicas stays the same."""
        mesh = self.parallelism
        if mesh.shard > 1:
            mesh = replace(mesh, data=self.axes["data"] * mesh.shard, shard=1)
        return replace(
            self, sync=AllReduce() if self.sync.sharding != "none" else self.sync, parallelism=mesh
        )

    def to_json(self) -> str:
        return json.dumps(self._values(), default=_plain, indent=1, sort_keys=True)

    def _values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _plain(value: Any) -> Any:
    return value.to_values() if isinstance(value, Options) else asdict(value)


def segment_policy(policy: str | tuple[str, ...]) -> str | int | tuple[str, ...]:
    """Converts the setting gradientCheckpointing to the form that `apply_activation_checkpoint` takes."""
    return int(policy) if isinstance(policy, str) and policy.isdecimal() else policy


@dataclass(frozen=True, kw_only=True)
class UserObjects:
    """The user's own module and callables, which have no JSON form and travel in Spark's closure.

    Attributes:
        module: Used if `TrainConfig.model` is None; training starts from its present weights.
        losses: One entry per label: `loss(output, label)` -> one value per row, an instance of an `nn`
            loss, or None if the loss has a name; empty if all losses have names.
        metrics: torchmetrics objects, and functions (outputs, labels), by their names in the history.
        transform_batch: Changes training rows, see `batch_transforms`.
        transform_in_prediction: Prepares the inputs of validation and of prediction.
        optimizer: `optimizer(parameters) -> torch.optim.Optimizer`; with `training_step`, it gets the module
            and may return a dict of optimizers by name.
        training_step: `training_step(step)`, see `OwnStep`.
        lr_schedule: `lr_schedule(step, num_steps) -> factor` on the learning rate, or
            `lr_schedule(optimizer) -> torch.optim.lr_scheduler.LRScheduler`.
        callbacks: See `callbacks.Callback`.
    """

    module: Any = None
    losses: tuple[Any, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    transform_batch: Any = None
    transform_in_prediction: Any = None
    optimizer: Any = None
    training_step: Any = None
    lr_schedule: Any = None
    callbacks: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "module", adapt_network(self.module))

    def check_step(self, config: TrainConfig) -> None:
        """Raises ValueError if only the config, or only these objects, have a user's own step."""
        if (self.training_step is None) == config.has_own_step:
            raise ValueError(
                f"the config's training_step is {config.training_step!r}, but UserObjects has "
                f"training_step={self.training_step!r}; set both, 'own' for a callable"
            )

    def loss(self, config: TrainConfig, index: int) -> Any:
        """Returns the loss of a label: the object if there is one, else its name."""
        given = self.losses[index] if self.losses else None
        return config.losses[index] if given is None else given
