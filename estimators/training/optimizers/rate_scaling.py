"""Scales learning rates with the batch size, after a gradual warm-up. For a batch k times the base batch:

* "linear": k times the rate (Goyal et al. 2017). For SGD with batches well below the gradient noise scale.
* "sqrt": sqrt(k) times the rate (Krizhevsky 2014, Hoffer et al. 2017). For Adam and similar optimizers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringspark.estimators.options.scaling import ScaleLearningRate
from ringspark.estimators.training.batch_sizes import Steps


@dataclass(frozen=True, kw_only=True)
class RateScaling:
    """The factor on every group's rate, by step."""

    name: str  # "linear" or "sqrt"
    base_batch_size: int  # rows per step for which the unscaled rate is right
    warmup_steps: int  # steps in which the factor rises from 1 to the rule's
    steps: Steps

    @classmethod
    def of(cls, setting: ScaleLearningRate | None, steps: Steps) -> RateScaling | None:
        if setting is None:
            return None
        return cls(
            name=setting.rule,
            base_batch_size=setting.base_batch_size,
            warmup_steps=steps.after(setting.warmup_epochs),
            steps=steps,
        )

    def of_epoch(self, epoch: int) -> float:
        multiple = self.steps.batches.size(epoch) / self.base_batch_size
        return multiple if self.name == "linear" else math.sqrt(multiple)

    def factor(self, step: int) -> float:
        """Returns the factor of a step, counted from 0 over the whole training."""
        full = self.of_epoch(self.steps.epoch_of(step))
        return full if step >= self.warmup_steps else 1 + (full - 1) * step / self.warmup_steps

    def __str__(self) -> str:
        parts = [
            f"{self.of_epoch(start):.4g} from epoch {start + 1} on (batches of {size:,})"
            for start, size in zip(self.steps.batches.starts, self.steps.batches.sizes, strict=True)
        ]
        after = f", after a rise from 1 over {self.warmup_steps:,} steps" if self.warmup_steps else ""
        rule = f"{self.name} from a batch of {self.base_batch_size:,}"
        return f"learning rates are scaled ({rule}): times {', '.join(parts)}{after}"
