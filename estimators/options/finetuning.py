"""Options of fine-tuning: adapters, and the weights from which a training starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ringspark.estimators.options.base import Options, above_0, at_least, from_0_below_1, option
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

    rank: int = option(at_least(1))
    targets: tuple[str, ...]
    alpha: float | None = option(above_0(), None)
    dropout: float = option(from_0_below_1(), 0.0)
    train: tuple[str, ...] = ()

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
    ignore: tuple[str, ...] = ()
    strict: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        storage.refuse_secrets(self.uri)
