"""Settings of the optimization: optimizer, rates, epochs, batches and the best epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from annotated_types import Ge, Gt

from ringspark.estimators.lazy_imports import LazyRegistry
from ringspark.estimators.options.checked import AtLeast1, Finite, NotNegative, WrongTypeError
from ringspark.estimators.options.privacy import Privacy
from ringspark.estimators.options.scaling import ScaleLearningRate
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.training.callbacks import Callback
from ringspark.estimators.training.optimizers.groups import check_groups
from ringspark.estimators.training.optimizers.registry import OPTIMIZERS
from ringspark.estimators.training.optimizers.schedules import SCHEDULES
from ringspark.estimators.training.settings.choices import Keep
from ringspark.estimators.training.settings.setting import Section, name_or_callable, setting, split_callable

# Training steps by name: factories of callables. Such a callable may have `make_optimizers(module)`, which is
# used if `optimizer` is not a function, and `check(config, module)`, which raises ValueError on the driver.
TRAINING_STEPS: LazyRegistry[Callable[[], Any]] = LazyRegistry(
    {"lightning": "ringspark.extras.training_steps.lightning_step:LightningStep"}
)


def _callbacks(value: Any) -> list[Callback]:
    callbacks = list(value) if isinstance(value, list | tuple) else [value]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            given = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise WrongTypeError(
                f"callbacks must be instances of ringspark.estimators.Callback, got {given}; "
                "derive the class from it and pass an instance"
            )
    return callbacks


def _hides_gradients(given: Mapping[str, Any]) -> bool:
    """Whether `noiseScale` has no effect, because no step computes gradients of two batch sizes."""
    if given["numWorkers"] == 1:
        return bool(given["gradientAccumulation"] == 1)
    return bool(given["sync"] != AllReduce())


def _schedule(value: Any) -> list[list[int]]:
    """Returns pairs [epoch, batch size] in the order of their epochs."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    is_list = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    if not is_list or not all(isinstance(p, Sequence) and len(p) == 2 for p in pairs):
        raise ValueError(
            "batchSizeSchedule must map epochs to batch sizes, such as {4: 512, 7: 1024} or "
            f"[[4, 512], [7, 1024]], got {value!r}"
        )
    # JSON has no numbers as keys.
    found = [[int(e) if isinstance(e, str) and e.isdecimal() else e, size] for e, size in pairs]
    for epoch, size in found:
        if not _is_whole(epoch, 2):
            raise ValueError(
                "batchSizeSchedule's epochs must be whole numbers from 2, because batchSize sets epoch 1, "
                f"got {epoch!r}"
            )
        if not _is_whole(size, 1):
            raise ValueError(
                f"batchSizeSchedule's sizes must be whole numbers of at least 1, got {size!r} from epoch "
                f"{epoch} on"
            )
    found.sort()
    for (epoch, _), (following, _) in pairwise(found):
        if epoch == following:
            raise ValueError(
                f"batchSizeSchedule must have one size for an epoch, got two for epoch {epoch}; drop one"
            )
    return found


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_of_one_size(given: Mapping[str, Any]) -> bool:
    sizes = {given["batchSize"], *(size for _, size in given["batchSizeSchedule"])}
    scaling = given["scaleLearningRate"]
    return scaling is not None and sizes == {scaling.base_batch_size}


@dataclass(frozen=True, kw_only=True)
class Training(Section):
    GROUP = "training"

    optimizer: Any = setting(
        "adamw",
        "a name, or a callable parameters -> torch.optim.Optimizer (with trainingStep: module -> dict)",
        convert=name_or_callable("optimizer", OPTIMIZERS),
        split=split_callable("adamw"),
        without_effect=(
            lambda given: given["trainingStep"] == "lightning",
            "trainingStep 'lightning' takes the optimizers of configure_optimizers",
        ),
    )
    lr_schedule: Any = setting(
        "constant",
        "a name, a callable (step, num_steps) -> factor, or a callable optimizer -> torch LRScheduler",
        convert=name_or_callable("lrSchedule", SCHEDULES),
        split=split_callable("constant"),
    )
    parameter_groups: tuple[dict[str, Any], ...] = setting(
        (),
        "rates per group of parameters: [{'params': patterns, 'learningRate': ..., 'weightDecay': ...}]",
        convert=lambda value: check_groups([value] if isinstance(value, dict) else value),
    )
    learning_rate: Annotated[float, Gt(0), Finite] = setting(
        1e-3,
        "learning rate; never scaled by numWorkers",
        recorded_on_resume=True,
        without_effect=(
            lambda given: not isinstance(given["optimizer"], str),
            "the optimizer's factory sets the rate",
        ),
    )
    scale_learning_rate: ScaleLearningRate | None = setting(
        None,
        "how the learning rate scales with the batch size: a ScaleLearningRate; unset: it does not",
        without_effect=(_is_of_one_size, "batchSize is its base_batch_size in every epoch"),
    )
    warmup_steps: NotNegative = setting(
        0, "optimizer steps in which the rate rises linearly, before the schedule"
    )
    weight_decay: Annotated[float, Ge(0)] = setting(
        0.0,
        "weight decay of the optimizer",
        without_effect=(
            lambda given: not isinstance(given["optimizer"], str),
            "the optimizer's factory sets the weight decay",
        ),
    )
    max_grad_norm: Annotated[float, Gt(0)] | None = setting(
        None, "bound of the gradient's 2-norm; unset: no clipping", remedy="leave it unset for no clipping"
    )
    epochs: AtLeast1 = setting(1, "passes over the training rows", recorded_on_resume=True)
    batch_size: AtLeast1 = setting(1024, "rows per optimizer step over all workers together")
    batch_size_schedule: tuple[tuple[int, int], ...] = setting(
        (),
        "batch sizes of later epochs, each by its first epoch (from 2), such as {4: 512, 7: 1024}",
        convert=_schedule,
        without_effect=(
            lambda given: (
                bool(given["batchSizeSchedule"]) and given["batchSizeSchedule"][0][0] > given["epochs"]
            ),
            "it begins after the last epoch",
        ),
    )
    gradient_accumulation: AtLeast1 = setting(
        1, "micro-batches per optimizer step, and per batch of validation", recorded_on_resume=True
    )
    privacy: Privacy | None = setting(
        None, "differential privacy of the training rows, by DP-SGD: a Privacy; unset: none"
    )
    noise_scale: bool = setting(
        False,
        "whether the history has the gradient noise scale of each epoch, for `advise_batch_size`",
        may_differ_on_resume=True,
        without_effect=(
            _hides_gradients,
            "it compares the gradients of two batch sizes, which takes two workers with sync=AllReduce(), or "
            "one with gradientAccumulation",
        ),
    )
    seed: int = setting(
        0, "seed of the initial weights, of dropout, of the order of rows and of the rows held out"
    )
    shuffle: bool = setting(True, "whether rows are shuffled again before each epoch")
    patience: AtLeast1 | None = setting(
        None,
        "epochs without an improvement of `monitor` before training stops; unset: all epochs",
        remedy="leave it unset for no early stopping",
        without_effect=(
            lambda given: (given["patience"] or 0) >= given["epochs"],
            "epochs is not above patience",
        ),
    )
    min_delta: Annotated[float, Ge(0)] = setting(
        0.0,
        "smallest change of `monitor` that counts as an improvement",
        without_effect=(lambda given: given["patience"] is None, "patience is not set"),
    )
    time_budget_seconds: Annotated[float, Gt(0)] | None = setting(
        None,
        "seconds of training after which no further epoch begins; unset: all epochs",
        remedy="leave it unset for no limit",
        may_differ_on_resume=True,
    )
    keep: Keep = setting("last", "epoch of the model that fit returns: 'last' or 'best'")


@dataclass(frozen=True, kw_only=True)
class Steps(Section):
    GROUP = "training"
    ON_DRIVER = True

    monitor: str | None = setting(
        None,
        "loss or metric that decides which epoch is best; unset: the validation or training loss",
        field="monitor",
        without_effect=(
            lambda given: given["keep"] == "last" and given["patience"] is None,
            "neither patience nor keep='best' asks for the best epoch",
        ),
    )
    training_step: Any = setting(
        None,
        "a callable (step) -> None that computes the losses and steps the optimizers, or 'lightning'",
        field="training_step",
        convert=name_or_callable("trainingStep", TRAINING_STEPS),
        split=lambda value: (value, TRAINING_STEPS[value]()) if isinstance(value, str) else ("own", value),
    )
    callbacks: tuple[Any, ...] = setting(
        (), "instances of Callback, called on every worker", convert=_callbacks
    )
