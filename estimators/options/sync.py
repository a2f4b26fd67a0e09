"""How workers agree on their weights: the setting `sync`, and the settings that it replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from ringspark.estimators.options.base import (
    Options,
    above_0,
    above_0_to_1,
    at_least,
    from_0_below_1,
    from_0_to_1,
    not_negative,
    option,
)
from ringspark.estimators.options.compression import Compression, Uncompressed

# What a stage of ZeRO shards, by the number of the stage.
SHARDINGS = ("none", "optimizer", "gradients", "parameters")


@dataclass(frozen=True, kw_only=True)
class Sync(Options):
    """How workers agree on their weights."""

    # Key of `parallel.STRATEGIES`.
    strategy: ClassVar[str] = "data_parallel"

    @property
    def sharding(self) -> str:
        """The part of the training's state that is sharded, one of `SHARDINGS`."""
        return "none"

    @property
    def compressed(self) -> Compression | None:
        """The compression of gradients; None for none."""
        return None

    @property
    def in_step(self) -> bool:
        """Whether workers take each step together."""
        return True


@dataclass(frozen=True, kw_only=True)
class AllReduce(Sync):
    """Workers all-reduce gradients in every step: data parallelism.

    Attributes:
        compression: Compression of the gradients, such as PowerSGD(rank=2); None for none.
    """

    compression: Compression | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.compression, Uncompressed) and self.compression.between == "workers":
            object.__setattr__(self, "compression", None)

    @property
    def strategy(self) -> str:  # type: ignore[override]
        """Name of the training strategy, a key of `parallel.STRATEGIES`."""
        return "data_parallel" if self.compression is None else self.compression.strategy

    @property
    def compressed(self) -> Compression | None:
        return self.compression


@dataclass(frozen=True, kw_only=True)
class Zero(Sync):
    """Workers shard the state of the training: the stages of ZeRO.

    Attributes:
        stage: 1 shards the optimizer's state, 2 the gradients too, 3 the parameters too.
    """

    stage: Literal[1, 2, 3]

    @property
    def strategy(self) -> str:  # type: ignore[override]
        """Name of the training strategy, a key of `parallel.STRATEGIES`."""
        return f"zero{self.stage}"

    @property
    def sharding(self) -> str:
        return SHARDINGS[self.stage]


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Sync):
    """Workers step on their own and synchronize their weights every few steps.

    Attributes:
        steps: Steps between two synchronizations.
        after: Steps with all-reduced gradients at the start of the training.
    """

    steps: Any
    after: int = option(not_negative(), 0)


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalTraining):
    """Workers step on their own and average their weights every few steps.

    Attributes:
        steps: Steps between two averages, 'epoch' for one per epoch, or 'training' for one at the end.
        after: Steps with all-reduced gradients at the start of the training.
        optimizer_state: What happens to the optimizer's state when weights are averaged: 'keep', 'average' or
            'reset'.
    """

    steps: int | Literal["epoch", "training"] = option(
        at_least(2, remedy="AllReduce() synchronizes every step")
    )
    optimizer_state: Literal["keep", "average", "reset"] = "keep"
    strategy: ClassVar[str] = "local_average"


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalTraining):
    """Workers step on their own; an outer optimizer steps by the mean of their changes.

    Attributes:
        steps: Steps between two synchronizations, or 'epoch' for one per epoch.
        after: Steps with all-reduced gradients at the start of the training.
        outer_rate: Learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer.
        send: Number format of the changes that are sent.
        fragments: Parts of the network that are synchronized in turn; must divide `steps`.
        delay: Steps between sending a fragment and receiving it.
        alpha: Share of a worker's own weights that it keeps when it receives a fragment.
    """

    steps: int | Literal["epoch"] = option(at_least(1))
    outer_rate: float = option(above_0(), 0.7)
    outer_momentum: float = option(from_0_below_1(), 0.9)
    send: Literal["fp32", "fp16", "int8"] = "fp32"
    fragments: int = option(at_least(1), 1)
    delay: int = option(not_negative(), 0)
    alpha: float = option(from_0_to_1(), 0.0)
    strategy: ClassVar[str] = "diloco"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.steps, int):
            if self.fragments > 1 or self.delay:
                raise ValueError(
                    f"DiLoCo's fragments ({self.fragments}) and delay ({self.delay}) need a number of steps, "
                    f"got steps={self.steps!r}; set steps to a number"
                )
        elif self.steps % self.fragments:
            raise ValueError(
                f"DiLoCo's fragments must divide its steps, got {self.fragments} for {self.steps} steps"
            )
        elif self.delay >= self.steps // self.fragments:
            raise ValueError(
                f"DiLoCo's delay must be below the {self.steps // self.fragments} steps between two "
                f"synchronizations, got {self.delay}"
            )


@dataclass(frozen=True, kw_only=True)
class ElasticAveraging(LocalTraining):
    """Workers step on their own; their weights and a center's weights move towards each other.

    Attributes:
        steps: Steps between two synchronizations, or 'epoch' for one per epoch.
        after: Steps with all-reduced gradients at the start of the training.
        alpha: How far a worker moves towards the center; None for 0.9 / numWorkers.
    """

    steps: int | Literal["epoch"] = option(at_least(1))
    alpha: float | None = option(above_0_to_1(), None)
    strategy: ClassVar[str] = "elastic"


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Sync):
    """Workers that do not wait for each other in every step."""

    @property
    def in_step(self) -> bool:
        return False

    @property
    def bound(self) -> int | None:
        """Largest number of steps that a worker may be ahead of the slowest; None for no bound."""
        return None

    @property
    def corrects(self) -> bool:
        """Whether a late gradient is applied with a smaller rate."""
        return False


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Asynchronous):
    """Workers push gradients to a parameter server and pull weights from it.

    Attributes:
        staleness: Largest number of steps that a worker may be ahead of the slowest; None for no bound.
        correction: 'staleness' applies a late gradient with a smaller learning rate; 'none' does not.
    """

    staleness: int | None = option(not_negative(), None)
    correction: Literal["none", "staleness"] = "none"
    strategy: ClassVar[str] = "parameter_server"

    @property
    def in_step(self) -> bool:
        return self.staleness == 0

    @property
    def bound(self) -> int | None:
        return self.staleness

    @property
    def corrects(self) -> bool:
        return self.correction == "staleness"


@dataclass(frozen=True, kw_only=True)
class Hogwild(Asynchronous):
    """Workers of one host write into the same weights, without a lock."""

    strategy: ClassVar[str] = "hogwild"


class EarlierSetting(NamedTuple):
    """A setting that `sync` replaced.

    Attributes:
        field: Name of the setting in configs of earlier versions.
        variant: Class of `Sync` that replaced the setting.
        words: Description of the setting.
        read: (`Sync` of class `variant`) -> value of the setting.
        write: (value of the setting) -> `Sync`; the default gives `AllReduce()`.
        default: Value of the setting if `sync` is of another class.
    """

    field: str
    variant: type[Sync]
    words: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Sync]
    default: Any


# Names of the earlier setting `localSteps` -> of the variants of `LocalTraining`.
_LOCAL_NAMES = {"average": "localsgd", "elastic": "elasticaveraging"}
_CAMEL = {"optimizer_state": "optimizerState", "outer_rate": "outerRate", "outer_momentum": "outerMomentum"}


def _write_sharding(value: Any) -> Sync:
    if value not in SHARDINGS:
        raise ValueError(f"sharding must be one of {', '.join(map(repr, SHARDINGS))}, got {value!r}")
    stage: Any = SHARDINGS.index(value)
    return Zero(stage=stage) if stage else AllReduce()


def _write_local_steps(value: Any) -> Sync:
    if not isinstance(value, int | str | Mapping):
        raise ValueError(
            "localSteps' steps must be a whole number, 'epoch' or 'training', or a dict of options, "
            f"got {value!r}"
        )
    given = dict(value) if isinstance(value, Mapping) else {"steps": value}
    name = given.pop("name", "average")
    if name == "average" and type(given.get("steps")) is int and given["steps"] == 1:
        return AllReduce()
    return LocalTraining.of({"name": _LOCAL_NAMES.get(str(name), name), **given}, "localSteps")


def _read_local_steps(sync: LocalTraining) -> dict[str, Any]:
    values = sync.to_values()
    earlier = {present: name for name, present in _LOCAL_NAMES.items()}
    values["name"] = earlier.get(values["name"], values["name"])
    return {_CAMEL.get(name, name): value for name, value in values.items()}


def _write_consistency(value: Any) -> Sync:
    given = {"name": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise TypeError(f"consistency must be 'bsp', 'ssp', 'asp', 'hogwild' or a dict, got {value!r}")
    given = dict(given)
    name = given.pop("name", None)
    if name == "bsp" and not given:
        return AllReduce()
    if name not in ("ssp", "asp", "hogwild"):
        raise ValueError(f"consistency must be one of bsp, ssp, asp, hogwild, got {name!r}")
    if name == "hogwild":
        return Hogwild.of(given)
    if (name == "ssp") != (given.get("staleness") is not None):
        raise ValueError(
            f"consistency 'ssp' needs a staleness, and 'asp' takes none, got {value!r}; set "
            "sync=ParameterServer(staleness=...)"
        )
    return ParameterServer.of(given)


def _read_consistency(sync: Sync) -> dict[str, Any]:
    if not isinstance(sync, ParameterServer):
        return {"name": "hogwild"}
    if sync.staleness is None:
        return {"name": "asp", "correction": sync.correction}
    return {"name": "ssp", "staleness": sync.staleness, "correction": sync.correction}


EARLIER: dict[str, EarlierSetting] = {
    "sharding": EarlierSetting(
        field="sharding",
        variant=Zero,
        words="earlier form of sync=Zero(stage=1), 2 or 3: 'optimizer', 'gradients' or 'parameters'",
        read=lambda sync: sync.sharding,
        write=_write_sharding,
        default="none",
    ),
    "gradientCompression": EarlierSetting(
        field="gradient_compression",
        variant=AllReduce,
        words="earlier form of sync=AllReduce(compression=...): a name, or a dict with the name and options",
        read=lambda sync: sync.compression.to_values() if sync.compression else {"name": "none"},
        write=lambda value: AllReduce(compression=Compression.of(value, "gradientCompression")),
        default={"name": "none"},
    ),
    "localSteps": EarlierSetting(
        field="local_steps",
        variant=LocalTraining,
        words="earlier form of sync=LocalSGD(steps=...), DiLoCo(...) or ElasticAveraging(...)",
        read=_read_local_steps,
        write=_write_local_steps,
        default=1,
    ),
    "consistency": EarlierSetting(
        field="consistency",
        variant=Asynchronous,
        words="earlier form of sync=ParameterServer(staleness=...) or Hogwild(): 'bsp', 'ssp', 'asp' or "
        "'hogwild'",
        read=_read_consistency,
        write=_write_consistency,
        default={"name": "bsp"},
    ),
}


def read_earlier(sync: Sync) -> dict[str, Any]:
    """Returns the values of the earlier settings that mean the same as `sync`."""
    return {n: e.read(sync) if isinstance(sync, e.variant) else e.default for n, e in EARLIER.items()}


def write_earlier(sync: Sync, values: Mapping[str, Any]) -> Sync:
    """Returns `sync` as the earlier settings in `values` change it.

    A setting at its default resets `sync` to AllReduce() only if `sync` is of the setting's `variant`.
    """
    found = {name: EARLIER[name].write(value) for name, value in values.items()}
    for name, made in found.items():
        if made == AllReduce() and isinstance(sync, EARLIER[name].variant):
            sync = AllReduce()
    asked = {name: made for name, made in found.items() if made != AllReduce()}
    if len(asked) > 1:
        given = " and ".join(f"{name}={values[name]!r}" for name in asked)
        raise ValueError(f"{given} each choose how workers synchronize; set only one, or use sync instead")
    for name, made in asked.items():
        if sync != AllReduce() and not isinstance(sync, EARLIER[name].variant):
            raise ValueError(
                f"{name}={values[name]!r} would replace sync={sync!r}; set only one, or set sync=None first"
            )
        sync = made
    return sync


def upgrade(values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Converts settings that an earlier version stored, in a config or in the record of a run.

    The settings that `sync` replaced are removed, and `sync` is set to the value that means the same.
    `names` maps each earlier setting to its key in `values`.
    """
    names = names or {name: earlier.field for name, earlier in EARLIER.items()}
    found = {name: values[stored] for name, stored in names.items() if stored in values}
    if not found:
        return dict(values)
    rest = {name: value for name, value in values.items() if name not in names.values()}
    rest["sync"] = write_earlier(AllReduce(), found).to_values()
    return rest
