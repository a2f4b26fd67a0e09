"""The settings `parallelism="auto"` and `memoryBudget`."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from ringspark.estimators import run_layout
from ringspark.estimators.launch.owner import write_note
from ringspark.estimators.memory.pressure import check_memory
from ringspark.estimators.techniques import Technique
from ringspark.extras.planning.memory.plan import check_budget
from ringspark.extras.planning.meshes.automatic import choose_parallelism

_log = logging.getLogger(__name__)


class AutomaticMesh(Technique):
    def settle(self, training: Any, driver: Any) -> Any:
        estimator = driver.estimator
        choice = choose_parallelism(
            training.config,
            training.objects,
            training.manifest,
            begun=driver.run.last_config(),
            budget=estimator.getMemoryBudget(),
            limits=driver.limits,
            chooses_micro=not estimator.isSet(estimator.gradientAccumulation),
            is_here=driver.is_here,
        )
        _log.info("parallelism='auto': %s", choice.explanation)
        write_note(driver.run.uri, run_layout.PARALLELISM, f"{choice.explanation}\n")
        check_memory(choice.config, training.objects, training.manifest, driver.limits)
        return replace(training, config=choice.config)


class MemoryBudget(Technique):
    def settle(self, training: Any, driver: Any) -> Any:
        budget = driver.estimator.getMemoryBudget()
        check_budget(training.config, training.objects, training.manifest, budget)
        return training
