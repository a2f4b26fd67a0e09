"""The setting `teacher`: knowledge distillation."""

from __future__ import annotations

from typing import Any

import torch

from ringspark.estimators.techniques import Technique
from ringspark.extras.distillation.distance import distil


class Distillation(Technique):
    def check_estimator(self, estimator: Any, *, is_table: bool, is_on_shards: bool = False) -> None:
        if is_on_shards:
            raise ValueError(
                "fitOnShards cannot use teacher, because shards lack its outputs; call fit, or leave "
                "teacher unset"
            )

    def prepare(self, fit: Any) -> Any:
        from ringspark.extras.distillation.teacher import add_teacher  # imports Spark, which ranks may lack

        return add_teacher(fit)

    def check_rows(self, estimator: Any, config: Any, manifest: Any) -> None:
        from ringspark.extras.distillation.teacher import check_labels

        check_labels(config, manifest)

    def check(self, training: Any) -> None:
        from ringspark.extras.distillation.teacher import check_teacher

        check_teacher(training.config, training.copies, training.manifest, training.shapes[0])

    def mix_losses(
        self,
        config: Any,
        losses: torch.Tensor,
        output: torch.Tensor,
        soft_labels: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        return distil(config, losses, output, soft_labels, weights)
