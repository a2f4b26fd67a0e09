"""Checks of the optimizer, its schedule, and the way in which workers synchronize."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace

import torch

from ringspark.estimators.options.sync import AllReduce, ParameterServer
from ringspark.estimators.parallel import STRATEGIES
from ringspark.estimators.parallel.data.sparse_rows import sparse_parameters
from ringspark.estimators.parallel.sharded.parameter_shards import (
    ELEMENTWISE,
    check_optimizer,
    is_elementwise,
)
from ringspark.estimators.techniques import techniques_of
from ringspark.estimators.training.batch_sizes import Steps
from ringspark.estimators.training.build import build_configured_optimizer
from ringspark.estimators.training.check.training import Trial
from ringspark.estimators.training.checkpoint.reading import check_optimizer as check_optimizer_of
from ringspark.estimators.training.checkpoint.reading import read_record
from ringspark.estimators.training.optimizers.rate_scaling import RateScaling
from ringspark.estimators.training.optimizers.registry import defer_compiler_import
from ringspark.estimators.training.optimizers.schedules import LearningRates, make_rates
from ringspark.estimators.training.settings.config import TrainConfig

_log = logging.getLogger(__name__)

# `check_average` warns if the initial weights keep a larger share than this in the final average.
MAX_INITIAL_SHARE = 0.5

# Steps of a user's schedule that the driver tries; more would take seconds.
REPLAYED_STEPS = 50_000


def check_optimization(training: Trial) -> Trial:
    """Makes optimizer and schedule once, to raise their errors here; counts the steps."""
    config, objects = training.config, training.copies
    defer_compiler_import()
    optimizer = build_configured_optimizer(config, objects, training.whole)
    if (state := config.initial_training_state) is not None:
        check_optimizer_of(state, read_record(state), optimizer, "or set initialState='weights'")
    for technique in techniques_of(config):
        technique.check_optimizer(config, objects, training.whole)
    if config.num_workers > 1:
        _check_synchronization(config, optimizer)
    steps = Steps(config.batch_sizes, training.manifest.select("train").num_rows)
    scaling = RateScaling.of(config.scale_learning_rate, steps)
    schedule = objects.lr_schedule or config.lr_schedule
    rates = make_rates(schedule, optimizer, steps.total, config.warmup_steps, scaling)
    if objects.lr_schedule is not None:
        _replay(rates, steps.total)
    if scaling is not None:
        _log.info("%s", scaling)
    return replace(training, num_steps=steps.total)


def _replay(rates: LearningRates, num_steps: int) -> None:
    """Raises ValueError if a user's schedule fails in one of the first steps that the driver can replay."""
    for step in range(min(num_steps, REPLAYED_STEPS)):
        try:
            rates.set(step)
        except Exception as error:  # user code may raise anything
            raise ValueError(
                f"lrSchedule fails in step {step + 1} of {num_steps} ({type(error).__name__}: {error}); make "
                "it last for all steps of the training"
            ) from error


def _check_synchronization(config: TrainConfig, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(config.sync, ParameterServer) or config.sync.sharding == "parameters":
        check_optimizer(optimizer, config.sync)
    mesh = config.parallelism
    if max(mesh.tensor, mesh.expert) > 1 and not is_elementwise(optimizer):
        name = type(optimizer).__name__
        raise ValueError(
            f"parallelism={mesh} gives a worker only shards of parameters, but optimizer {name} needs "
            f"whole parameters; take one of {', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}, "
            "or set is_elementwise = True in its class if the update of a weight depends only on the "
            "gradient and state of that weight"
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and not isinstance(config.sync, AllReduce):
        raise ValueError(
            f"optimizer SparseAdam takes only sparse gradients, and sync={config.sync!r} makes them dense; "
            "set sync=AllReduce(), or optimizer='adam'"
        )


def check_sparse(training: Trial) -> Trial:
    """Warns if embeddings ask for sparse gradients that the strategy makes dense."""
    config, module = training.config, training.whole
    makes_dense = config.num_workers > 1 and not STRATEGIES[config.sync.strategy].takes_sparse
    if makes_dense and (tables := sparse_parameters(module)):
        warnings.warn(
            f"model {type(module).__name__} has sparse=True in the embedding of {next(iter(tables))!r}, but "
            f"sync={config.sync!r} makes its gradients dense, which take the memory and traffic of the whole "
            "table; leave sparse=True out, or set sync=AllReduce()",
            UserWarning,
            stacklevel=5,
        )
    return training


def check_average(training: Trial) -> Trial:
    """Warns if the average of the weights forgets the initial weights too slowly."""
    decay, num_steps = training.config.ema_decay, training.num_steps
    assert decay is not None
    is_new = training.config.initial_training_state is None
    if is_new and decay**num_steps > MAX_INITIAL_SHARE:
        warnings.warn(
            f"emaDecay {decay} leaves {decay**num_steps:.0%} of the initial weights in the average after all "
            f"{num_steps} steps; lower emaDecay to {0.01 ** (1 / num_steps):.2g} for 1 %",
            UserWarning,
            stacklevel=5,
        )
    return training
