"""The passes of a private step: clipped gradients of single rows, and noise once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from ringspark.estimators.options.privacy import PrivacySpent
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.batch_sizes import Steps
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.sums import MicroBatchOutput
from ringspark.estimators.training.passes import Divisor, Inputs, WholePasses
from ringspark.estimators.training.step import Recipe
from ringspark.extras.privacy.ledger import Ledger
from ringspark.extras.privacy.poisson_reader import plan_poisson
from ringspark.extras.privacy.row_gradients import RowGradients
from ringspark.extras.privacy.secret_noise import normal_noise, secret_dropout, secret_generator


class PrivatePasses(WholePasses):
    """Gives each parameter this rank's share of the noisy mean gradient; `GradientSync` sums the shares.

    Rank 0 alone adds the noise, because noise of every rank would add up. The divisor is the expected number
    of rows, q * rows = batchSize: the real number depends on who was sampled.
    """

    def __init__(
        self, recipe: Recipe, sync: GradientSync, mesh: RankMesh, steps: Steps, position: Callable[[], int]
    ) -> None:
        """Reads the run's ledger on rank 0; `position` returns the number of steps taken."""
        super().__init__(recipe, sync, lambda _: nullcontext())
        config = recipe.config
        assert config.privacy is not None
        self._privacy, self._position, self._num_steps = config.privacy, position, steps.total
        self._plan = plan_poisson(steps.num_rows, config.batch_size)
        most_rows = -(-config.most_rows // config.gradient_accumulation)
        self._rows = RowGradients(recipe, sync.network, config.privacy.max_grad_norm, most_rows)
        self._ledger: Ledger | None = None
        if mesh.writes:
            rate = self._plan.sample_rate
            self._ledger = Ledger(config.run_uri, config.privacy, rate, config.charged_before)
        self._has_begun = False

    def train(
        self, micro_batches: Sequence[Batch], divisor: Divisor, *, inputs: Inputs, keeps_outputs: bool
    ) -> list[MicroBatchOutput]:
        """Sets the gradients of one step, also without rows. Returns nothing: losses of rows are secret."""
        if self._ledger is not None:
            if not self._has_begun:
                taken = self._position()
                self._ledger.begin(self._num_steps - taken, taken)
            self._ledger.charge_step()
        self._has_begun = True
        sums = self._rows.zeros()
        with self._recipe.timeline.span("backward"), secret_dropout(self._recipe.device):
            for batch in micro_batches:
                self._rows.add(batch, sums)
        if self._ledger is not None:
            deviation = self._ledger.noise_multiplier * self._privacy.max_grad_norm
            generator = secret_generator()
            for total in sums.values():
                noise = normal_noise(total.shape, deviation, generator).to(total.device)
                total.copy_(total.double() + noise)
        expected = self._plan.sample_rate * self._plan.num_rows
        for name, parameter in self._rows.parameters.items():
            parameter.grad = sums[name] / expected
        return []

    def settle(self) -> None:
        """Raises FloatingPointError if the weights are not finite; there is no loss that could show it."""
        if not all(bool(p.isfinite().all()) for p in self._rows.parameters.values()):
            raise FloatingPointError(
                "the weights of a private training are not finite; lower learningRate, or privacy's "
                "max_grad_norm"
            )

    def share(self, values: dict[str, float]) -> dict[str, float]:
        """Returns the history's entries without the entries of training rows."""
        return {name: value for name, value in values.items() if not name.startswith("train_")}

    def privacy_spent(self) -> PrivacySpent | None:
        """Returns the privacy loss so far; None except on rank 0."""
        return None if self._ledger is None else self._ledger.close()
