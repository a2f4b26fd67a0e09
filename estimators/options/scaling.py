"""Options of learning rates that follow the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from ringspark.estimators.options.checked import AtLeast1, Finite
from ringspark.estimators.options.declare import Options


@dataclass(frozen=True, kw_only=True)
class ScaleLearningRate(Options):
    """Learning rates that follow the batch size.

    Attributes:
        base_batch_size: Batch size, in rows per step, for which `learningRate` is right.
        rule: 'linear' multiplies rates by batchSize / base_batch_size; 'sqrt', for Adam, by its square root.
        warmup_epochs: Epochs in which rates rise from learningRate to the scaled rate, before the schedule;
            may be a fraction.
    """

    base_batch_size: AtLeast1
    rule: Literal["linear", "sqrt"] = "linear"
    warmup_epochs: Annotated[float, Ge(0), Finite] = 0.0
