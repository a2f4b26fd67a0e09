"""`advise_batch_size`: recommends a batch size from a training's gradient noise.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", with noise scale N. To reach the same
loss, batches of B rows need 1 + N / B times as many steps as infinitely large batches, and 1 + B / N times as
many rows as the smallest batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringspark.pipelines.notebook_table import align_table, notebook_table

# Within this factor of the critical size, the gain is smaller than the error of the estimate.
_NEAR = 2.0
_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
_HEADER = ("batchSize", "efficiency of a row", "steps", "rows")


@dataclass(frozen=True, kw_only=True)
class BatchAdvice:
    """A recommended batch size, and the reason.

    Attributes:
        batch_size: Batch size of the training.
        noise_scale: Critical batch size N in rows, averaged over the last steps of the last epoch.
        by_epoch: Noise scale after each epoch; None if the noise was too large to measure the gradient.
        suggestion: The power of two nearest to the critical batch size.
    """

    batch_size: int
    noise_scale: float
    by_epoch: tuple[float | None, ...]
    suggestion: int

    def efficiency(self, batch_size: int) -> float:
        """Returns the progress per row, relative to the progress per row with the smallest batches."""
        return 1 / (1 + batch_size / self.noise_scale)

    def steps(self, batch_size: int) -> float:
        """Returns the number of steps to the same loss, relative to the current batch size."""
        return (1 + self.noise_scale / batch_size) / (1 + self.noise_scale / self.batch_size)

    def rows(self, batch_size: int) -> float:
        """Returns the number of rows to the same loss, relative to the current batch size."""
        return self.efficiency(self.batch_size) / self.efficiency(batch_size)

    @property
    def verdict(self) -> str:
        """The recommendation in one sentence."""
        now, share = f"batchSize={self.batch_size:,}", self.batch_size / self.noise_scale
        if share > _NEAR:
            return (
                f"{now} is {share:.3g} times the critical size of {self.noise_scale:,.0f} rows, so a row "
                f"gives {self.efficiency(self.batch_size):.0%} of its possible progress; "
                f"batchSize={self.suggestion} needs {self.rows(self.suggestion):.2g} times the rows, in "
                f"{self.steps(self.suggestion):.2g} times the steps"
            )
        if share < 1 / _NEAR:
            return (
                f"{now} is {share:.2g} of the critical size of {self.noise_scale:,.0f} rows; "
                f"batchSize={self.suggestion} needs {self.steps(self.suggestion):.2g} times the steps, "
                f"{self.rows(self.suggestion):.2g} times the rows and another learning rate "
                "(scaleLearningRate); it can use more workers"
            )
        return f"{now} is near the critical size of {self.noise_scale:,.0f} rows; leave it"

    def table(self) -> str:
        return f"{align_table(_HEADER, self._rows())}\n{self.verdict}"

    __str__ = table

    def _repr_html_(self) -> str:
        title = f"Critical batch size: {self.noise_scale:,.0f} rows"
        return notebook_table(title, _HEADER, self._rows(), self.verdict)

    def _rows(self) -> list[tuple[str, ...]]:
        sizes = {max(1, round(self.batch_size * factor)) for factor in _FACTORS} | {self.suggestion}
        return [
            (
                f"{size:,}" + (" (now)" if size == self.batch_size else ""),
                f"{self.efficiency(size):.3f}",
                f"{self.steps(size):.2f} x",
                f"{self.rows(size):.2f} x",
            )
            for size in sorted(sizes)
        ]


def advise_batch_size(model: Any) -> BatchAdvice:
    """Recommends a batch size from the gradient noise in a trained model's history.

    The noise grows while the loss falls, so the advice is right for the end of the training; earlier epochs
    need fewer rows per step. The measurement assumes SGD-like steps with a well-chosen learning rate. For
    Adam, or networks with batch normalization, it may be wrong by a factor of a few.

    Args:
        model: A model that was trained with `noiseScale=True`.

    Raises:
        ValueError: The model's history has no noise scale, or no epoch in which the noise was small enough.
    """
    epochs = getattr(getattr(model, "summary", None), "epochs", ())
    found = [record for record in epochs if record.noise is not None]
    if not found:
        raise ValueError(
            "advise_batch_size needs a model that was trained with noiseScale=True on two workers or more, "
            "or with gradientAccumulation, got a history without a noise scale"
        )
    by_epoch = tuple(record.noise.scale for record in found)
    known = [scale for scale in by_epoch if scale is not None]
    if not known:
        raise ValueError(
            "advise_batch_size needs an epoch whose gradient exceeds its noise, got none; train for more "
            "steps, or with a larger batchSize"
        )
    last, suggestion = found[-1], 1
    while suggestion * 2**0.5 < known[-1]:
        suggestion *= 2
    return BatchAdvice(
        batch_size=last.batch_size or -(-last.rows // last.steps),
        noise_scale=known[-1],
        by_epoch=by_epoch,
        suggestion=suggestion,
    )
