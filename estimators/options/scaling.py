"""Options of learning rates that follow the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ringspark.estimators.options.base import Options, at_least, not_negative, option


@dataclass(frozen=True, kw_only=True)
class ScaleLearningRate(Options):
    """Learning rates that follow the batch size.

    Attributes:
        base_batch_size: Batch size, in rows per step, for which `learningRate` is right.
        rule: 'linear' multiplies rates by batchSize / base_batch_size; 'sqrt', for Adam, by its square root.
        warmup_epochs: Epochs in which rates rise from learningRate to the scaled rate, before the schedule;
            may be a fraction.
    """

    base_batch_size: int = option(at_least(1))
    rule: Literal["linear", "sqrt"] = "linear"
    warmup_epochs: float = option(not_negative(), 0.0)
