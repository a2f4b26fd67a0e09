"""What a technique of `ringspark.extras` may do in a fit, and the registry of techniques.

At each point of a fit, the core calls the hooks of the techniques that the settings ask for, in the order of
`TECHNIQUES`. A technique is a subclass of `Technique` that overrides the hooks that it needs, usually in
`extras/<folder>/technique.py`.

`techniques_in(estimator)` finds techniques by `Registered.param`. It serves the hooks that get the estimator,
and `prepare`, `wrap_network`, `complete_config`, `check_columns`, `settle` and `complete_model`.
`techniques_of(config)` finds techniques by `Registered.field`, and serves all other hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ringspark.estimators.lazy_imports import LazyRegistry, load_object
from ringspark.estimators.options.mesh import AUTO

if TYPE_CHECKING:
    import torch
    from torch import nn


class Technique:
    """Hooks of a technique, in the order of a fit. The hooks of this class do nothing.

    A hook raises ValueError, with the remedy, if a setting or the data do not fit. `config` is a
    `TrainConfig`, `objects` are `UserObjects`.
    """

    # ---- On the driver, before the shards are written.

    def complete_estimator(self, estimator: Any) -> Any:
        """Returns the estimator, perhaps a copy with more settings."""
        return estimator

    def check_estimator(self, estimator: Any, *, is_table: bool, is_on_shards: bool = False) -> None:
        """Checks a fit's settings.

        Args:
            is_table: Whether the fit completes a network for a table.
            is_on_shards: Whether the rows are shards that exist already.
        """

    def check_many(self, estimator: Any, caller: str) -> None:
        """Checks whether `caller`, such as a search, may fit the same rows several times."""

    def prepare(self, fit: Any) -> Any:
        """Returns the `PreparedFit`, perhaps with more columns."""
        return fit

    def choose_kinds(self, estimator: Any, kinds: dict[str, Any], fields: Any) -> dict[str, Any]:
        """Returns the column types, by name, of the columns in the `FieldIndex` `fields`."""
        return kinds

    def check_columns(self, objects: Any, kinds: Mapping[str, Any]) -> None:
        """Checks the column types, by name."""

    def output_columns(self, estimator: Any) -> list[str]:
        """Returns the names of columns that the model adds to the outputs."""
        return []

    def wrap_network(self, model: Any, given: Mapping[str, Any], task: str) -> Any:
        """Returns the network to train, a `ModelSpec` or a module; `given` are the settings by name."""
        return model

    def complete_config(self, config: Any, objects: Any, given: Mapping[str, Any]) -> Any:
        """Checks the settings `given`, by name, of which the config was made; returns the config."""
        return config

    def check_network(self, config: Any, objects: Any, network: nn.Module) -> None:
        """Checks the network, on the meta device or whole; does not change it."""

    # ---- On the driver, once the rows are known.

    def check_rows(self, estimator: Any, config: Any, manifest: Any) -> None:
        """Checks the shards' columns and classes, before the network runs."""

    def check_optimizer(self, config: Any, objects: Any, network: nn.Module) -> None:
        """Checks the optimizer of `objects`, or of the config, on the whole network."""

    def check(self, training: Any) -> None:
        """Checks a `Trial` after all checks of the core."""

    def settle(self, training: Any, driver: Any) -> Any:
        """Chooses settings that the user left to ringspark; returns the `CheckedTraining`.

        `driver` is a `checked_fit.Driver`: the estimator, the run's folder and the workers' memory.
        """
        return training

    # ---- On every rank.

    def open_reader(self, config: Any, manifest: Any, shared: Mapping[str, Any]) -> Any:
        """Returns the `ShardReader` of the training rows; None for the usual one.

        `shared` are the arguments of `open_reader` that all splits share.
        """

    def shard(self, config: Any, network: nn.Module, mesh: Any, sample: Any, device: torch.device) -> Any:
        """Leaves this rank's shard in `network`; returns its `Stages`, or None if it has all layers."""

    def make_optimizer(self, config: Any, objects: Any, network: nn.Module) -> Any:
        """Returns the network's optimizer, or None for the usual one. The driver calls it too."""

    def make_step(self, config: Any, objects: Any, sync: Any, scaler: Any, mesh: Any, device: Any) -> Any:
        """Returns an `OwnStep` that replaces the trainer's step, or None."""

    def make_passes(self, recipe: Any, sync: Any, mesh: Any, steps: Any, position: Callable[[], int]) -> Any:
        """Returns the `Passes` of a step, or None for the usual ones; `position` counts the steps taken."""

    def around_forward(self, config: Any, network: nn.Module, device: Any) -> AbstractContextManager[Any]:
        """Returns a context for one forward pass."""
        return nullcontext()

    def around_losses(self, config: Any, network: nn.Module, device: Any) -> AbstractContextManager[Any]:
        """Returns a context in which the losses of one batch are computed."""
        return nullcontext()

    def mix_losses(
        self,
        config: Any,
        losses: torch.Tensor,
        output: torch.Tensor,
        soft_labels: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the losses of training rows, (batch, num_losses), from the losses of their hard labels.

        Args:
            output: The network's first output.
            soft_labels: Column `soft_label_column` of the rows.
            weights: Weight of each row in the losses' divisor, (batch, num_losses); None if all are 1.
        """
        return losses

    def make_timeline(self, config: Any, mesh: Any, device: Any) -> Any:
        """Returns the `Timeline` of this rank, or None."""

    def make_recorder(self, config: Any, objects: Any, manifest: Any, device: Any) -> Any:
        """Returns a recorder of checkpoints on rank 0, or None; see `Recovery.record`."""

    def count_privacy(self, passes: Any) -> Any:
        """Returns the `PrivacySpent` of a training's `Passes` on rank 0, or None."""

    # ---- On the driver, after the training.

    def complete_model(self, model: Any, fit: Any) -> None:
        """Adds results to the trained model; `fit` is the `PreparedFit`."""

    def finish(self, run_uri: str) -> None:
        """Completes the files of a finished run."""


def is_given(value: Any) -> bool:
    return value not in (None, False, "none")


@dataclass(frozen=True, kw_only=True)
class Registered:
    """One technique of the registry.

    Attributes:
        path: Import path of its class.
        field: Attribute of `TrainConfig` that tells whether a training uses the technique; "" if none does.
        param: Setting of the estimator that tells whether a fit uses the technique; "" if none does.
        when: Whether a value of the attribute or setting means that the technique is used.
        is_optional: Whether to leave the technique out if `ringspark.extras` is not installed.
    """

    path: str
    field: str = ""
    param: str = ""
    when: Callable[[Any], bool] = is_given
    is_optional: bool = False

    def is_used_by(self, config: Any) -> bool:
        return bool(self.field) and self.when(getattr(config, self.field))

    def is_set_in(self, estimator: Any) -> bool:
        if not self.param or not estimator.hasParam(self.param):
            return False
        param = estimator.getParam(self.param)
        return estimator.isDefined(param) and self.when(estimator.getOrDefault(param))

    def load(self) -> list[Technique]:
        try:
            return [load_object(self.path)()]
        except ModuleNotFoundError as error:
            if self.is_optional and (error.name or "").startswith("ringspark.extras"):
                return []
            raise


def _extra(path: str, **more: Any) -> Registered:
    return Registered(path=f"ringspark.extras.{path}", **more)


# In the order in which their hooks are called.
TECHNIQUES: dict[str, Registered] = {
    "initial_model": Registered(path="ringspark.estimators.initial_model:InitialModel", param="initialModel"),
    "offset": _extra("offset.technique:Offset", param="offsetCol", when=bool),
    "own_code": _extra("own_code.technique:OwnCode", field="num_workers", when=bool, is_optional=True),
    "training_steps": _extra(
        "training_steps.technique:TrainingStep", field="training_step", param="trainingStep"
    ),
    "model_parallel": _extra("model_parallel.technique:ModelParallelism", field="cuts_network"),
    "distillation": _extra("distillation.technique:Distillation", field="soft_label_column", param="teacher"),
    "quantiles": _extra("quantiles.technique:Quantiles", param="quantiles"),
    "intervals": _extra("quantiles.technique:Intervals", param="intervals"),
    "monotone": _extra("tables.monotone:Monotone", param="monotone", when=bool),
    "network_losses": _extra("network_losses.technique:NetworkLosses", field="differentiates_twice"),
    "privacy": _extra("privacy.technique:DifferentialPrivacy", field="privacy", param="privacy"),
    "activations": _extra("activations.technique:SavedActivations", field="changes_saved_tensors"),
    "inner_columns": _extra("inner_columns:InnerColumns", param="innerCols", when=bool),
    "contributions": _extra("tables.contributions:ContributionsColumn", param="contributionsCol"),
    "timeline": _extra("timeline.technique:StepTimeline", field="timeline_every_steps"),
    "certificate": _extra("certificate.technique:CertifiedRun", field="certify", param="certify"),
    "automatic_mesh": _extra(
        "planning.technique:AutomaticMesh", param="parallelism", when=lambda value: value == AUTO
    ),
    "memory_budget": _extra("planning.technique:MemoryBudget", param="memoryBudget"),
}


def techniques_of(config: Any) -> list[Technique]:
    """Returns the techniques that a `TrainConfig` uses."""
    return [each for entry in TECHNIQUES.values() if entry.is_used_by(config) for each in entry.load()]


def techniques_in(estimator: Any) -> list[Technique]:
    """Returns the techniques that an estimator's settings ask for."""
    return [each for entry in TECHNIQUES.values() if entry.is_set_in(estimator) for each in entry.load()]


T = TypeVar("T")


def first_made(made: Iterable[T | None]) -> T | None:
    """Returns the first object that a technique makes; None if the usual one is to be used."""
    return next((each for each in made if each is not None), None)


_IN_PLACE = "ringspark.extras.external_tables.in_place"

# Functions and classes behind methods of models and summaries.
FUNCTIONS: LazyRegistry[Any] = LazyRegistry(
    {
        "certificate_of_run": "ringspark.extras.certificate:certify",
        "held_out_report": "ringspark.extras.report.held_out.held_out_report:HeldOutReport",
        "compare_on_rows": "ringspark.extras.precision_difference:compare_on_rows",
        "compare_on_shards": "ringspark.extras.precision_difference:compare_on_shards",
        "compare_inputs": "ringspark.extras.tables.drift:compare_inputs",
        "contributions": "ringspark.extras.tables.contributions:contribution_results",
        "complete_table": "ringspark.extras.tables.recipe:complete_table",
        "export_model": "ringspark.extras.export.export:export_model",
        "fit_on_delta": f"{_IN_PLACE}.fits:fit_on_delta",
        "fit_on_parquet": f"{_IN_PLACE}.fits:fit_on_parquet",
        "fit_on_table": f"{_IN_PLACE}.fits:fit_on_table",
        "find_scan": f"{_IN_PLACE}.file_scan:find_scan",
        "find_table": f"{_IN_PLACE}.catalog:find_table",
        "keep_source": f"{_IN_PLACE}.fits:keep_source",
        "noise_meter": "ringspark.extras.tuning.noise_scale:NoiseMeter",
        "offload_to_disk": "ringspark.extras.disk_offload:offload_to_disk",
        "add_intervals": "ringspark.extras.quantiles.outputs:add_intervals",
        "interval_fields": "ringspark.extras.quantiles.outputs:interval_fields",
        "quantile_outputs": "ringspark.extras.quantiles.outputs:quantile_outputs",
        "plan_least": "ringspark.extras.planning.memory.plan:plan_least",
        "make_samples": "ringspark.extras.export.samples:make_samples",
        "record_module": "ringspark.extras.export.samples:record_module",
        "loss_figure": "ringspark.extras.report:loss_figure",
        "remove_run_of": "ringspark.extras.runs.listing:remove_run_of",
        "save_logged": "ringspark.extras.serving.served_model:save_logged",
        "prepare_table": "ringspark.extras.tables.table_fit:prepare_table",
        "summary_report": "ringspark.extras.report:report_summary",
        "time_shares": "ringspark.extras.timeline.trace:time_shares",
        "write_trace": "ringspark.extras.timeline.trace:write_trace",
        "measure_inner": "ringspark.extras.inner_columns:measure",
        "inner_results": "ringspark.extras.inner_columns:InnerResults",
    }
)
