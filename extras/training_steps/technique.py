"""The setting `trainingStep`: a user's own step in place of the trainer's."""

from __future__ import annotations

from typing import Any

from ringspark.estimators.techniques import Technique
from ringspark.extras.training_steps.runner import StepRunner, try_step


class TrainingStep(Technique):
    def check(self, training: Any) -> None:
        try_step(training.config, training.copies, training.module, training.manifest)

    def make_step(
        self, config: Any, objects: Any, sync: Any, scaler: Any, mesh: Any, device: Any
    ) -> StepRunner:
        return StepRunner(config, objects, sync, scaler, mesh, device)
