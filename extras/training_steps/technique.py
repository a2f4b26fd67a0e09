"""The setting `trainingStep`: a user's own step in place of the trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ringspark.estimators.options.mesh import AUTO
from ringspark.estimators.techniques import Technique
from ringspark.extras.training_steps.named_optimizers import join_optimizers
from ringspark.extras.training_steps.runner import StepRunner, try_step


class TrainingStep(Technique):
    def complete_config(self, config: Any, objects: Any, given: Mapping[str, Any]) -> Any:
        if given["parallelism"] == AUTO or given["memoryBudget"] is not None:
            raise ValueError(
                f"parallelism 'auto' and memoryBudget measure a step, which trainingStep replaces, got "
                f"parallelism={given['parallelism']!r} and memoryBudget={given['memoryBudget']}; leave both "
                "unset"
            )
        if config.parameter_groups and objects.optimizer is not None:
            raise ValueError(
                f"parameterGroups ({list(config.parameter_groups)}) and an optimizer function both choose "
                "rates, and with trainingStep the function gets the module; set the rates in the function"
            )
        return config

    def check_network(self, config: Any, objects: Any, network: nn.Module) -> None:
        if (check := getattr(objects.training_step, "check", None)) is not None:
            check(config, network)

    def check(self, training: Any) -> None:
        try_step(training)

    def make_optimizer(self, config: Any, objects: Any, network: nn.Module) -> torch.optim.Optimizer | None:
        make = objects.optimizer or getattr(objects.training_step, "make_optimizers", None)
        return None if make is None else join_optimizers(make(network), network)

    def make_step(
        self, config: Any, objects: Any, sync: Any, scaler: Any, mesh: Any, device: Any
    ) -> StepRunner:
        return StepRunner(config, objects, sync, scaler, mesh, device)
