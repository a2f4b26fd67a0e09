"""The setting `privacy`: differentially private training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ringspark.estimators.techniques import Technique
from ringspark.pipelines import open_reader


class DifferentialPrivacy(Technique):
    # The modules are imported in the hooks: the checks import Spark, and the ledger imports opacus.

    def check_estimator(self, estimator: Any, *, is_table: bool, is_on_shards: bool = False) -> None:
        from ringspark.extras.privacy.check import check_private_estimator

        check_private_estimator(estimator, is_table=is_table)

    def check_many(self, estimator: Any, caller: str) -> None:
        from ringspark.extras.privacy.check import refuse_many

        refuse_many(estimator, caller)

    def check_columns(self, objects: Any, kinds: Mapping[str, Any]) -> None:
        from ringspark.extras.privacy.check import check_private_fit

        check_private_fit(objects, kinds)

    def complete_config(self, config: Any, objects: Any, given: Mapping[str, Any]) -> Any:
        model = given["initialModel"]
        spent = model.summary.privacy if getattr(model, "hasSummary", False) else None
        return config if spent is None else replace(config, charged_before=spent.charged)

    def check(self, training: Any) -> None:
        from ringspark.extras.privacy.check import check_private_training

        check_private_training(
            training.config,
            training.copies,
            training.manifest,
            training.heads,
            training.module,
            training.num_steps,
        )

    def open_reader(self, config: Any, manifest: Any, shared: Mapping[str, Any]) -> Any:
        from ringspark.extras.privacy.poisson_reader import PoissonReader

        files = manifest.select("train")
        return PoissonReader(
            open_reader(files, batch_size=config.batch_size, shuffle=False, **shared), config
        )

    def make_passes(self, recipe: Any, sync: Any, mesh: Any, steps: Any, position: Callable[[], int]) -> Any:
        from ringspark.extras.privacy.passes import PrivatePasses

        return PrivatePasses(recipe, sync, mesh, steps, position)

    def count_privacy(self, passes: Any) -> Any:
        return passes.privacy_spent()
