"""Options of fine-tuning: adapters, and the weights from which a training starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from ringspark.estimators.options.checked import AtLeast1, Finite, Names
from ringspark.estimators.options.declare import Options
from ringspark.pipelines import storage


@dataclass(frozen=True, kw_only=True)
class LoRA(Options):
    """Low-rank adapters: trained instead of the network's weights, and merged into the weights at the end.

    Attributes:
        rank: Rank of the adapters' matrices.
        targets: Patterns over names of linear layers that get an adapter, such as `("*.query", "*.value")`.
        alpha: The adapter's output is multiplied by alpha / rank; None for the rank.
        dropout: Probability with which the adapter drops an input in training.
        train: Patterns over names of parameters that are trained too, such as `("head.*",)`.
    """

    rank: AtLeast1
    targets: Names
    alpha: Annotated[float, Gt(0), Finite] | None = None
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    train: Names = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise ValueError("LoRA's targets must be a pattern or a list of patterns ('*.query'), got ()")
        if self.alpha is None:
            object.__setattr__(self, "alpha", float(self.rank))


@dataclass(frozen=True, kw_only=True)
class Pretrained(Options):
    """Weights from which the training starts.

    Attributes:
        uri: URI of a safetensors file, or of a folder with model.safetensors.
        ignore: Patterns over names of tensors that are not loaded.
        strict: Whether file and network must have the same names, except ignored ones.
    """

    SHORTHAND: ClassVar[str] = "uri"

    uri: str
    ignore: Names = ()
    strict: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        storage.refuse_secrets(self.uri)
