"""The value by which a search compares trials: `monitor`, or an evaluator's metric on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame

from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.objective.own_metrics import find_metric, is_higher_better
from ringspark.pipelines import ShardManifest


@dataclass(frozen=True, kw_only=True)
class Objective:
    monitor: str
    monitor_is_larger_better: bool
    evaluator: Any
    held_out: DataFrame | None

    @classmethod
    def of(
        cls,
        fit: CheckedFit,
        manifest: ShardManifest,
        monitor: str | None,
        evaluator: Any,
        held_out: DataFrame | None,
    ) -> Objective:
        """Returns a search's objective. Raises ValueError if the training history would lack `monitor`."""
        # A pretrained checkpoint has no effect here; each trial resolves its folder.
        config = replace(fit.config, shards_uri=manifest.uri, keep="best", pretrained=None)
        if monitor is not None:
            config = replace(config, monitor=monitor)
        config = check_training(config, fit.objects, manifest).config
        metric = find_metric(config.monitor.split("_", 1)[1], config.metrics)
        return cls(
            monitor=config.monitor,
            monitor_is_larger_better=bool(metric and is_higher_better(metric, config.own_metrics)),
            evaluator=evaluator,
            held_out=held_out,
        )

    @property
    def is_larger_better(self) -> bool:
        if self.evaluator is None:
            return self.monitor_is_larger_better
        return bool(self.evaluator.isLargerBetter())

    @property
    def text(self) -> str:
        """Description of the objective; equal objectives have equal text."""
        if self.evaluator is None:
            return self.monitor
        metric = self.evaluator.getMetricName() if hasattr(self.evaluator, "getMetricName") else "metric"
        # Params that the user has set, because metricLabel or labelCol, for example, change the metric.
        given = getattr(self.evaluator, "_paramMap", {}).items()
        settings = sorted(
            f"{param.name}={value!r}"
            for param, value in given
            # The text of any other object may differ between drivers.
            if param.name != "metricName" and isinstance(value, bool | int | float | str | list | None)
        )
        suffix = f" with {', '.join(settings)}" if settings else ""
        return f"{metric} of {type(self.evaluator).__name__}{suffix}, pruned by {self.monitor}"

    def of_epoch(self, record: EpochRecord) -> float:
        return self.turn(record.value(self.monitor))

    def turn(self, value: float) -> float:
        """Negates a value of `monitor` if larger is better for only one of `monitor` and the objective.

        A second call with the result returns `value`.
        """
        return value if self.is_larger_better == self.monitor_is_larger_better else -value

    def of_trial(self, model: Any) -> float:
        if self.evaluator is not None:
            return float(self.evaluator.evaluate(model.transform(self.held_out)))
        epochs: Sequence[EpochRecord] = model.summary.epochs
        kept = [record for record in epochs if record.epoch == model.summary.model_epoch]
        return kept[0].value(self.monitor) if kept else math.nan
