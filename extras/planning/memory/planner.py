"""Plans the memory of one network and one batch under several settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringspark.estimators.memory.shares import shard_group_size, shares
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.extras.planning.memory.measured_ranks import MeasuredRanks
from ringspark.extras.planning.memory.report import DEFAULTS, MemoryPlan, changed_settings
from ringspark.extras.planning.memory.search import find_settings


class Planner:
    """Makes memory plans; runs each step once, however many plans need it."""

    def __init__(
        self,
        config: TrainConfig,
        objects: UserObjects,
        inputs: Sequence[BatchColumn],
        labels: Sequence[BatchColumn],
    ) -> None:
        self._config, self._rows = config, labels[0].shape[0]
        self._measured = MeasuredRanks(config, objects, inputs, labels)
        self.network = self._measured.empty

    def plan(self, budget: int | None = None, budget_name: str = "the budget") -> MemoryPlan:
        """Returns the config's plan; if it exceeds the budget, the plan suggests settings that fit."""
        plan = self._plan_of(self._config, budget)
        if budget is None:
            return plan
        if plan.fits:
            return replace(plan, verdict=f"fits the budget of {show_bytes(budget)}")
        fitting, least = find_settings(self._config, self._rows, self._peak_of, budget)
        suggest = tuple(self._plan_of(other, budget) for other in fitting)
        verdict = (
            f"training needs {show_bytes(plan.peak)} per worker, {budget_name} is {show_bytes(budget)}"
            f"{self._remedy(plan, suggest, least)}"
        )
        return replace(plan, suggest=suggest, verdict=verdict)

    def _remedy(self, plan: MemoryPlan, suggest: tuple[MemoryPlan, ...], least: TrainConfig | None) -> str:
        if suggest:
            others = [
                f"{changed_settings(other.settings, plan.settings)} needs {show_bytes(other.peak)}"
                for other in suggest
            ]
            return f"; {', or '.join(others)}"
        if least is None:
            return "; no other setting suits this network"
        smallest = self._plan_of(least, None)
        changed = changed_settings(smallest.settings, plan.settings)
        return f", and no settings fit: {changed} still needs {show_bytes(smallest.peak)}"

    def _peak_of(self, config: TrainConfig) -> int | None:
        try:
            return self._plan_of(config, None).peak
        # Settings that do not suit the network (no kernel in 16 bits) are not suggested; the plan of the
        # config has already raised the network's own errors.
        except Exception:
            return None

    def _plan_of(self, config: TrainConfig, budget: int | None) -> MemoryPlan:
        if config.axes["expert"] > 1 and config.sync.sharding != "none":
            raise ValueError(
                f"the memory of a mesh over 'expert' with sharding={config.sync.sharding!r} cannot be "
                "planned; plan it with sharding='none', which needs more memory"
            )
        num_micro = min(config.gradient_accumulation, self._rows)
        fullest = self._measured.measure_step(config, num_micro).find_fullest(config, num_micro)
        peak = fullest.peak
        share = shares(config.sync.sharding, shard_group_size(config))
        most: dict[str, Any] = {p: int(n * share.get(p, 1.0)) for p, n in fullest.rank.parts.items()}
        return MemoryPlan(
            settings=settings_of(config),
            rows=self._rows,
            peak=peak.total,
            at_peak=peak.parts,
            activations=peak.most_activations,
            batch=peak.parts["batch"],
            communication=peak.parts["communication"],
            checkpoint=fullest.copied,
            budget=budget,
            **most,
        )


def settings_of(config: TrainConfig) -> dict[str, object]:
    """Returns the values of the Params that determine memory, by name."""
    names = [name for name in ("optimizer", *DEFAULTS, "collective", "numWorkers") if name in SETTINGS]
    values = {name: getattr(config, SETTINGS[name].field) for name in names}
    return values | {"sharding": config.sync.sharding}
