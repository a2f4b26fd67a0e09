"""The setting `privacy`: differentially private training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from ringspark.estimators.techniques import Technique
from ringspark.pipelines import open_reader
from ringspark.pipelines.kinds import Padded, Vocabulary


class DifferentialPrivacy(Technique):
    """Refuses settings that would publish rows without noise."""

    # The modules of this folder are imported in the hooks: some import Spark, and the ledger imports opacus.

    def check_estimator(self, estimator: Any, *, is_table: bool, is_on_shards: bool = False) -> None:
        _check_installed()
        if is_table:
            raise ValueError(
                "privacy does not cover quantiles, categories and target statistics, which a network for "
                "tables takes from all rows; give model a network of your own, and encode columns by public "
                "numbers"
            )
        fraction = estimator.getValidationFraction()
        if fraction is not None:
            raise ValueError(
                f"privacy protects training rows only, and validationFraction={fraction} would take "
                "validation rows from the same people and publish their exact loss; use "
                "validationIndicatorCol for rows that need no protection, or evaluate the model on other rows"
            )

    def check_many(self, estimator: Any, caller: str) -> None:
        raise ValueError(
            f"privacy covers one training, but {caller} publishes results of many on the same rows; fit each "
            "setting on its own, and add up the epsilons of the models"
        )

    def check_columns(self, objects: Any, kinds: Mapping[str, Any]) -> None:
        _check_objects(objects)
        for name, kind in kinds.items():
            if isinstance(kind, Vocabulary) and kind.words is None:
                raise ValueError(
                    f"privacy does not cover the words of column {name!r}, which a Vocabulary would take "
                    f"from all rows; set columns={{{name!r}: Vocabulary(words=[...])}} of public words, or "
                    "HashBuckets"
                )
            if isinstance(kind, Padded) and kind.length is None:
                raise ValueError(
                    f"privacy does not cover the longest array of column {name!r}, which Padded() would take "
                    "from all rows; set Padded(length=...)"
                )

    def complete_config(self, config: Any, objects: Any, given: Mapping[str, Any]) -> Any:
        model = given["initialModel"]
        spent = model.summary.privacy if getattr(model, "hasSummary", False) else None
        return config if spent is None else replace(config, charged_before=spent.charged)

    def check(self, training: Any) -> None:
        _check_installed()
        _check_objects(training.copies)
        from ringspark.extras.privacy.check import check_private_training

        check_private_training(training)

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


def _check_installed() -> None:
    if find_spec("opacus") is None:
        raise ValueError("privacy needs opacus; pip install 'ringspark[privacy]'")


def _check_objects(objects: Any) -> None:
    if objects.transform_batch is not None:
        raise ValueError(
            "privacy computes each row alone, but transformBatch can mix the rows of a batch; transform the "
            "rows before fit, or inside the network"
        )
