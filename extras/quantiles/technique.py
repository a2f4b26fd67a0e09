"""The settings `quantiles` and `intervals`."""

from __future__ import annotations

from typing import Any

from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.techniques import Technique
from ringspark.extras.quantiles.conformal import calibrate, check_group, check_rows

LOSS = "pinball_per_member"


class Quantiles(Technique):
    """Quantile regression: Koenker and Bassett 1978, "Regression Quantiles"."""

    def check_estimator(self, estimator: Any, *, is_table: bool, is_on_shards: bool = False) -> None:
        _check_table("quantiles", is_table)
        if (loss := estimator.getLoss()) not in ("auto", LOSS):
            raise ValueError(f"quantiles are learned by loss={LOSS!r}, got {loss!r}; leave loss unset")
        if estimator.getTeacher() is not None:
            raise ValueError(
                "quantiles do not work with teacher, which has no quantiles; leave one of them unset"
            )

    def output_columns(self, estimator: Any) -> list[str]:
        return [name for name in [estimator.getQuantilesCol()] if name]


class Intervals(Technique):
    """Prediction intervals, see `conformal`."""

    def check_estimator(self, estimator: Any, *, is_table: bool, is_on_shards: bool = False) -> None:
        _check_table("intervals", is_table)

    def choose_kinds(self, estimator: Any, kinds: dict[str, Any], fields: Any) -> dict[str, Any]:
        if name := value_of(estimator, "intervalGroupCol"):
            check_group(fields.find(name, "intervalGroupCol"))
        return kinds

    def output_columns(self, estimator: Any) -> list[str]:
        return [name for name in [estimator.getIntervalCol()] if name]

    def check_rows(self, estimator: Any, config: Any, manifest: Any) -> None:
        check_rows(estimator.getIntervals(), manifest.select("validation").num_rows)

    def complete_model(self, model: Any, fit: Any) -> None:
        corrections = calibrate(model, fit.dataset, fit.estimator.getValidationIndicatorCol())
        model._set(intervalCorrections=corrections)


def _check_table(setting: str, is_table: bool) -> None:
    if not is_table:
        raise ValueError(
            f"{setting} needs a network for tables, which fit completes; leave model unset, set it to "
            f"'tabpack' or 'tabm', or leave {setting} unset"
        )
