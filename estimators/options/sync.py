"""How workers synchronize: the setting `sync`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from ringspark.estimators.options.checked import AtLeast1, Finite, NotNegative
from ringspark.estimators.options.compression import Compression, Uncompressed
from ringspark.estimators.options.declare import Options, option

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
    after: NotNegative = 0


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalTraining):
    """Workers step on their own and average their weights every few steps.

    Attributes:
        steps: Steps between two averages, 'epoch' for one per epoch, or 'training' for one at the end.
        after: Steps with all-reduced gradients at the start of the training.
        optimizer_state: What happens to the optimizer's state when weights are averaged: 'keep', 'average' or
            'reset'.
    """

    steps: Annotated[int, Ge(2)] | Literal["epoch", "training"] = option(
        remedy="AllReduce() synchronizes every step"
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

    steps: AtLeast1 | Literal["epoch"]
    outer_rate: Annotated[float, Gt(0), Finite] = 0.7
    outer_momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    send: Literal["fp32", "fp16", "int8"] = "fp32"
    fragments: AtLeast1 = 1
    delay: NotNegative = 0
    alpha: Annotated[float, Ge(0), Le(1)] = 0.0
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

    steps: AtLeast1 | Literal["epoch"]
    alpha: Annotated[float, Gt(0), Le(1)] | None = None
    strategy: ClassVar[str] = "elastic"


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Sync):
    """Workers that do not wait for each other in every step."""

    @property
    def in_step(self) -> bool:
        return self.bound == 0

    @property
    def bound(self) -> int | None:
        """Largest number of steps that a worker may be ahead of the slowest; None for no bound."""
        return None


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Asynchronous):
    """Workers push gradients to a parameter server and pull weights from it.

    Attributes:
        staleness: Largest number of steps that a worker may be ahead of the slowest; None for no bound.
        correction: 'staleness' applies a late gradient with a smaller learning rate; 'none' does not.
    """

    staleness: NotNegative | None = None
    correction: Literal["none", "staleness"] = "none"
    strategy: ClassVar[str] = "parameter_server"

    @property
    def bound(self) -> int | None:
        return self.staleness


@dataclass(frozen=True, kw_only=True)
class Hogwild(Asynchronous):
    """Workers of one host write into the same weights, without a lock."""

    strategy: ClassVar[str] = "hogwild"


def shard_state(sharding: str) -> Sync:
    """Returns `Zero` with the stage of `sharding`, one of `SHARDINGS`; `AllReduce()` for 'none'."""
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding must be one of {', '.join(map(repr, SHARDINGS))}, got {sharding!r}")
    stage: Any = SHARDINGS.index(sharding)
    return Zero(stage=stage) if stage else AllReduce()
