"""Settings of the optimization: optimizer, rates, epochs, batches and the best epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

from ringspark.estimators.lazy_imports import LazyRegistry
from ringspark.estimators.names import check_name
from ringspark.estimators.options.base import above_0, above_0_and_finite, at_least, not_negative, one_of
from ringspark.estimators.options.privacy import Privacy
from ringspark.estimators.options.scaling import ScaleLearningRate
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.training.callbacks import Callback
from ringspark.estimators.training.optimizers.groups import check_groups
from ringspark.estimators.training.optimizers.registry import OPTIMIZERS
from ringspark.estimators.training.optimizers.schedules import SCHEDULES
from ringspark.estimators.training.settings.choices import Keep
from ringspark.estimators.training.settings.declaration import Setting

# Training steps by name: factories of callables. Such a callable may have `make_optimizers(module)`, which is
# used if `optimizer` is no function, and `check(config, module)`, which raises ValueError on the driver.
TRAINING_STEPS: LazyRegistry[Callable[[], Any]] = LazyRegistry(
    {"lightning": "ringspark.extras.training_steps.lightning_step:LightningStep"}
)


def _name_or_callable(setting: str, known: Iterable[str]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, str):
            check_name(setting, value, known)
            return value
        if callable(value):
            return value
        raise TypeError(f"{setting} must be a name or a callable, got {type(value).__name__}")

    return convert


def _callbacks(value: Any) -> list[Callback]:
    callbacks = list(value) if isinstance(value, list | tuple) else [value]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            given = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise TypeError(
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


OPTIMIZER = Setting[Any](
    name="optimizer",
    field="optimizer",
    words="a name, or a callable parameters -> torch.optim.Optimizer; with trainingStep, module -> dict",
    default="adamw",
    convert=_name_or_callable("optimizer", OPTIMIZERS),
    without_effect=(
        lambda given: given["trainingStep"] == "lightning",
        "trainingStep 'lightning' takes the optimizers of configure_optimizers",
    ),
)
TRAINING_STEP = Setting[Any](
    name="trainingStep",
    field="training_step",
    words="a callable (step) -> None that computes the losses and steps the optimizers, or 'lightning'",
    convert=_name_or_callable("trainingStep", TRAINING_STEPS),
)
PARAMETER_GROUPS = Setting[list[dict[str, Any]]](
    name="parameterGroups",
    field="parameter_groups",
    words="rates of some parameters: [{'params': patterns, 'learningRate': ..., 'weightDecay': ...}]",
    default=[],
    convert=lambda value: check_groups([value] if isinstance(value, dict) else value),
)
LR_SCHEDULE = Setting[Any](
    name="lrSchedule",
    field="lr_schedule",
    words="a name, a callable (step, num_steps) -> factor, or a callable optimizer -> torch LRScheduler",
    default="constant",
    convert=_name_or_callable("lrSchedule", SCHEDULES),
)
CALLBACKS = Setting[list[Callback]](
    name="callbacks", words="instances of Callback, called on every worker", default=[], convert=_callbacks
)
LEARNING_RATE = Setting(
    name="learningRate",
    field="learning_rate",
    words="learning rate; never scaled by numWorkers",
    default=1e-3,
    recorded_on_resume=True,
    accepts=above_0_and_finite(),
    without_effect=(
        lambda given: not isinstance(given["optimizer"], str),
        "the optimizer's factory sets the rate",
    ),
)
WARMUP_STEPS = Setting(
    name="warmupSteps",
    field="warmup_steps",
    words="optimizer steps in which the rate rises linearly, before the schedule",
    default=0,
    accepts=not_negative(),
)
WEIGHT_DECAY = Setting(
    name="weightDecay",
    field="weight_decay",
    words="weight decay of the optimizer",
    default=0.0,
    accepts=not_negative(),
    without_effect=(
        lambda given: not isinstance(given["optimizer"], str),
        "the optimizer's factory sets the weight decay",
    ),
)
MAX_GRAD_NORM = Setting[float | None](
    name="maxGradNorm",
    field="max_grad_norm",
    words="bound of the gradient's 2-norm; unset: no clipping",
    kind="float",
    accepts=above_0("leave it unset for no clipping"),
)
EPOCHS = Setting(
    name="epochs",
    field="epochs",
    words="passes over the training rows",
    default=1,
    accepts=at_least(1),
    recorded_on_resume=True,
)
BATCH_SIZE = Setting(
    name="batchSize",
    field="batch_size",
    words="rows per optimizer step over all workers together",
    default=1024,
    accepts=at_least(1),
)
GRADIENT_ACCUMULATION = Setting(
    name="gradientAccumulation",
    field="gradient_accumulation",
    words="micro-batches per optimizer step, and per batch of validation",
    default=1,
    accepts=at_least(1, "micro-batch per step"),
    recorded_on_resume=True,
)
SEED = Setting(
    name="seed",
    field="seed",
    words="seed of the initial weights, of dropout, of the order of rows and of the rows held out",
    default=0,
)
SHUFFLE = Setting(
    name="shuffle", field="shuffle", words="whether each epoch has its own order of rows", default=True
)
MONITOR = Setting[str | None](
    name="monitor",
    field="monitor",
    words="loss or metric that decides which epoch is best; unset: the validation or training loss",
    kind="str",
    without_effect=(
        lambda given: given["keep"] == "last" and given["patience"] is None,
        "neither patience nor keep='best' asks for the best epoch",
    ),
)
PATIENCE = Setting[int | None](
    name="patience",
    field="patience",
    words="epochs without a better `monitor` before training stops; unset: all epochs",
    kind="int",
    accepts=at_least(1, "epoch", "leave it unset for no early stopping"),
    without_effect=(
        lambda given: (given["patience"] or 0) >= given["epochs"],
        "epochs is not above patience",
    ),
)
MIN_DELTA = Setting(
    name="minDelta",
    field="min_delta",
    words="smallest change of `monitor` that counts as an improvement",
    default=0.0,
    accepts=not_negative(),
    without_effect=(lambda given: given["patience"] is None, "patience is not set"),
)
TIME_BUDGET_SECONDS = Setting[float | None](
    name="timeBudgetSeconds",
    field="time_budget_seconds",
    words="seconds of training after which no further epoch begins; unset: all epochs",
    kind="float",
    accepts=above_0("leave it unset for no limit"),
    may_differ_on_resume=True,
)
KEEP = Setting[Keep](
    name="keep",
    field="keep",
    words="the model that fit returns: of the 'last' epoch or of the 'best'",
    default="last",
    accepts=one_of(get_args(Keep)),
)
SCALE_LEARNING_RATE = Setting[ScaleLearningRate | None](
    name="scaleLearningRate",
    field="scale_learning_rate",
    words="how rates follow the batch size: a ScaleLearningRate; unset: they do not",
    options=ScaleLearningRate,
    without_effect=(_is_of_one_size, "batchSize is its base_batch_size in every epoch"),
)
BATCH_SIZE_SCHEDULE = Setting[list[list[int]]](
    name="batchSizeSchedule",
    field="batch_size_schedule",
    words="batch sizes of later epochs, each by its first epoch (from 2), such as {4: 512, 7: 1024}",
    default=[],
    convert=_schedule,
    without_effect=(
        lambda given: bool(given["batchSizeSchedule"]) and given["batchSizeSchedule"][0][0] > given["epochs"],
        "it begins after the last epoch",
    ),
)
NOISE_SCALE = Setting(
    name="noiseScale",
    field="noise_scale",
    words="whether the history has the gradient noise scale of each epoch, for `advise_batch_size`",
    default=False,
    may_differ_on_resume=True,
    without_effect=(
        _hides_gradients,
        "it compares the gradients of two batch sizes, which takes two workers with sync=AllReduce(), or one "
        "with gradientAccumulation",
    ),
)
PRIVACY = Setting[Privacy | None](
    name="privacy",
    field="privacy",
    words="differential privacy of the training rows, by DP-SGD: a Privacy; unset: none",
    options=Privacy,
)
