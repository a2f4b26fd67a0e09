"""The options of cpSGD; see `ringspark.extras.compressors.cpsgd`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from ringspark.estimators.options.checked import AtLeast1, Finite
from ringspark.estimators.options.compression import Compression

_OFF = {"after": 0, "least": 1024, "between": "workers", "feedback": False}


@dataclass(frozen=True, kw_only=True)
class CpSGD(Compression):
    """Random rounding to integers, with secret binomial noise that hides each worker's gradient.

    Attributes:
        levels: Levels of the rounding.
        trials: Fair coins per element and worker. The number of heads, less its mean, is the noise.
        max_norm: Bound of the 2-norm of a worker's mean gradient; a longer gradient is scaled down.
        rotate: Whether a random rotation comes before the rounding, which makes the levels finer.
    """

    strategy: ClassVar[str] = "cpsgd"

    levels: Annotated[int, Ge(2)] = 16
    trials: AtLeast1
    max_norm: Annotated[float, Gt(0), Finite]
    rotate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in _OFF.items():
            given = getattr(self, name)
            if given != value:
                raise ValueError(
                    f"CpSGD adds noise to every element, in every step and on every worker, got "
                    f"{name}={given!r}, which would send gradients without noise or subtract the noise; "
                    f"leave {name} out"
                )
