"""Options of private training, and its privacy loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Lt

from ringspark.estimators.options.checked import Finite
from ringspark.estimators.options.declare import Options


@dataclass(frozen=True, kw_only=True)
class Privacy(Options):
    """Differential privacy: the weights hardly depend on any single training row (DP-SGD).

    Attributes:
        epsilon: Bound of the privacy loss over the whole training; None if `noise_multiplier` is given.
        delta: Probability with which the bound may fail.
        max_grad_norm: Largest 2-norm of a row's gradient; longer gradients are clipped.
        noise_multiplier: Standard deviation of the noise, divided by `max_grad_norm`; None derives it from
            `epsilon`.
        accountant: Method that computes epsilon: Renyi divergences ('rdp') or privacy loss random variables
            ('prv').
    """

    epsilon: Annotated[float, Gt(0), Finite] | None = None
    delta: Annotated[float, Gt(0), Lt(1)]
    max_grad_norm: Annotated[float, Gt(0), Finite]
    noise_multiplier: Annotated[float, Gt(0), Finite] | None = None
    accountant: Literal["rdp", "prv"] = "rdp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                "Privacy needs either epsilon or noise_multiplier, got "
                f"epsilon={self.epsilon!r} and noise_multiplier={self.noise_multiplier!r}; set one of them"
            )


@dataclass(frozen=True, kw_only=True)
class PrivacySpent:
    """The privacy loss of a training with the setting `privacy`, and of its `initialModel`.

    Attributes:
        epsilon: Bound of the privacy loss, for `delta`, by the method `accountant`.
        charged: Steps with equal noise: noise multiplier, share of the rows that a step samples, number.
    """

    epsilon: float
    delta: float
    accountant: str
    charged: tuple[tuple[float, float, int], ...]
