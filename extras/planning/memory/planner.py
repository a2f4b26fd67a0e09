"""Plans the memory of one network and one batch under several settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.memory.shares import checkpoint_writers, shard_group_size, shares
from ringspark.estimators.training.build import build_empty
from ringspark.estimators.training.checkpoint.shards import deal_parameters
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.extras.planning.memory.report import DEFAULTS, MemoryPlan, changed_settings
from ringspark.extras.planning.memory.search import find_settings
from ringspark.extras.planning.memory.sharing import communication_bytes, count_checkpoint
from ringspark.extras.planning.memory.step import StepBytes, UpdateBytes, measure_step

PLAN_CUT = "ringspark.extras.planning.meshes.cut_plan:plan_cut"


class Planner:
    """Makes memory plans; runs each step once, however many plans need it."""

    def __init__(
        self,
        config: TrainConfig,
        objects: UserObjects,
        inputs: Sequence[BatchColumn],
        labels: Sequence[BatchColumn],
    ) -> None:
        self._config, self._objects = config, objects
        self._inputs, self._labels = inputs, labels
        self._rows = labels[0].shape[0]
        self.network = build_empty(config, objects)
        self._steps: dict[str, StepBytes] = {}
        self._update: UpdateBytes | None = None

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
        if config.cuts_network:
            # the plan of the rank that needs most
            found = load_object(PLAN_CUT)(config, self._objects, self.network, self._inputs, self._labels)
            peak, parts = found.peak, found.rank.parts
            own = {part: peak.parts[part] for part in ("activations", "batch", "communication")}
        else:
            step = self._step(config)
            own = {"communication": communication_bytes(config, self.network)}
            peak, parts = step.peaks[config.sync.sharding].with_parts(**own), step.parts
        copied = parts["parameters"] + parts["optimizer_state"]
        if (writers := checkpoint_writers(config)) > 1:
            sizes = dict(self.network.named_parameters(remove_duplicate=False))
            loads = [0] * writers
            for name, part in deal_parameters(self.network, writers).items():
                loads[part] += sizes[name].nbytes
            copied = copied * max(loads) // sum(loads)
        kept = count_checkpoint(config, copied)
        share = shares(config.sync.sharding, shard_group_size(config))
        most: dict[str, Any] = {part: int(n * share.get(part, 1.0)) for part, n in parts.items()}
        return MemoryPlan(
            settings=settings_of(config),
            rows=self._rows,
            peak=peak.total + kept,
            at_peak={**peak.parts, "checkpoint": kept},
            checkpoint=copied,
            budget=budget,
            **most | own,
        )

    def _step(self, config: TrainConfig) -> StepBytes:
        # One run measures every type of sharding.
        key = f"{config.without_sharding().to_json()} {shard_group_size(config)}"
        if key not in self._steps:
            step = measure_step(config, self._objects, self.network, self._inputs, self._labels, self._update)
            self._steps[key], self._update = step, step.update
        return self._steps[key]


def settings_of(config: TrainConfig) -> dict[str, object]:
    """Returns the values of the Params that determine memory, by name."""
    names = [name for name in ("optimizer", *DEFAULTS, "collective", "numWorkers") if name in SETTINGS]
    values = {name: getattr(config, SETTINGS[name].field) for name in names}
    return values | {"sharding": config.sync.sharding}
