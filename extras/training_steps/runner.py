"""Runs the setting `trainingStep` on one rank, in training and on held-out rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel.base import GradientSync, keep_buffers
from ringspark.estimators.parallel.data.gradient_all_reduce import synchronize
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.arguments import read_layout
from ringspark.estimators.training.build import build_configured_optimizer
from ringspark.estimators.training.check.probe import PROBE_ROWS
from ringspark.estimators.training.check.training import Trial
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.sums import MicroBatchOutput
from ringspark.estimators.training.precision import LossScaler, autocast
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.training_steps.engine import Engine, TrialEngine
from ringspark.extras.training_steps.gathering import StepRows
from ringspark.extras.training_steps.named_optimizers import optimizers_by_name
from ringspark.extras.training_steps.step import LOSS, Step
from ringspark.models.generators import Tensors
from ringspark.models.outputs import as_outputs
from ringspark.models.reports import collect_reports
from ringspark.pipelines.epoch_plan import EpochPlan, plan_epoch

# Keep the random numbers of steps apart from each other and from other uses of the seed.
_STEP_FACTOR, _SEED_OFFSET, _HELD_OUT = 7_368_787, 0x73746570, 0x68656C64
_STATE = "logged/"


class StepRunner:
    """Implements `estimators.training.passes.OwnStep`."""

    def __init__(
        self,
        config: TrainConfig,
        objects: UserObjects,
        sync: GradientSync,
        scaler: LossScaler,
        mesh: RankMesh,
        device: torch.device,
    ) -> None:
        self._config, self._function, self._device = config, objects.training_step, device
        self._network, self._data, self._scaler = sync.network, mesh.data, scaler
        self._optimizers = optimizers_by_name(sync.optimizer)
        syncs = {
            name: synchronize(sync.network, one, mesh.gradients, prefix=f"gradients.{number}")
            for number, (name, one) in enumerate(self._optimizers.items())
        }
        self._engine = Engine(syncs, scaler, config.max_grad_norm, device)
        self._logged: dict[str, torch.Tensor] = {}  # name -> sum of values and of weights, (2,)
        self._held_out: dict[str, torch.Tensor] = {}
        self._latest: Batch | None = None  # the placeholder row of later steps without rows

    def train(
        self, batch: Batch, plan: EpochPlan, step: int, number: int, epoch: int
    ) -> MicroBatchOutput | None:
        logged: dict[str, torch.Tensor] = {}
        self._engine.begin()
        skipped_before = self._scaler.skipped_steps
        made = self._make_step(batch, plan, step, number + _SEED_OFFSET, epoch, logged, self._engine)
        with self._running(made):
            self._function(made)
        if self._engine.skipped:
            # A step counts once, however many of its optimizers were skipped.
            self._scaler.skipped_steps = skipped_before + 1
            return None
        return self._finish(made, logged, self._logged)

    def evaluate(
        self, batch: Batch, plan: EpochPlan, step: int, epoch: int, *, keeps_outputs: bool
    ) -> MicroBatchOutput:
        logged: dict[str, torch.Tensor] = {}
        made = self._make_step(batch, plan, step, step + _HELD_OUT, epoch, logged, None)
        # The function may differentiate, for a gradient penalty.
        with torch.enable_grad(), self._running(made):
            self._function(made)
        pairs = []
        if keeps_outputs and batch.num_rows:
            with torch.no_grad(), autocast(self._config.precision, self._device):
                outputs = as_outputs(self._network(*batch.inputs))
            pairs = [(output.float(), label) for output, label in zip(outputs, batch.labels, strict=True)]
        return self._finish(made, logged, self._held_out)._replace(pairs=pairs)

    def try_on(self, batch: Batch, plan: EpochPlan) -> None:
        """Calls the function as in training, but takes no optimizer steps."""
        self._engine = TrialEngine(self._engine.syncs, self._scaler, None, self._device)
        self.train(batch, plan, 0, 0, 1)

    def take(self, split: str, data: Collective) -> dict[str, float]:
        sums = self._logged if split == "train" else self._held_out
        order = self._engine.take_order() if split == "train" else ""
        mine = [order, {name: values.tolist() for name, values in sums.items()}]
        sums.clear()
        total: dict[str, torch.Tensor] = {}
        every = [json.loads(text) for text in gather_bytes(data, json.dumps(mine).encode())]
        if any(found != order for found, _ in every):
            raise ValueError(
                "trainingStep took other optimizer steps on some ranks, so gradients of different steps were "
                "added; call step.minimize equally often on every rank, and let no value of one "
                "rank's rows decide about it"
            )
        # By name, because ranks may log different names.
        for _, logged in every:
            for name, values in logged.items():
                total[name] = total.get(name, torch.zeros(2, dtype=torch.float64)) + torch.tensor(
                    values, dtype=torch.float64
                )
        return {f"{split}_{name}": float(total[name][0] / total[name][1]) for name in sorted(total)}

    def state(self) -> Tensors:
        return {_STATE + name: values.cpu().clone() for name, values in self._logged.items()}

    def load(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self._logged.clear()
        for state in states:
            for key in state:
                if key.startswith(_STATE):
                    _add(self._logged, key.removeprefix(_STATE), state[key].to(self._device))

    def _make_step(
        self,
        batch: Batch,
        plan: EpochPlan,
        step: int,
        stream: int,
        epoch: int,
        logged: dict[str, torch.Tensor],
        engine: Engine | None,
    ) -> Step:
        rows = StepRows(plan, step, self._data, self._device)
        divisor: torch.Tensor | float = float(rows.total)
        counted = divisor
        if batch.weight is not None:
            total = self._data.all_reduce(batch.weight.sum().view(1))[0]
            # If all rows of the batch have weight 0, every loss is zero and must not become NaN.
            divisor = torch.where(total > 0, total, torch.ones_like(total))
            counted = total + 1e-30  # if no row of an epoch has a weight, no mean is NaN
        given = batch if batch.num_rows else self._make_placeholder(batch)
        if batch.num_rows and self._data.size > 1 and not batch.layout:
            self._latest = _first_row(batch)
        size = self._data.size

        def log(name: str, value: torch.Tensor, weight: torch.Tensor | float) -> None:
            pair = torch.stack(
                [value.double() * weight, torch.as_tensor(counted).double().to(value.device) / size]
            )
            # Several losses of a step add up; several values of another name are their mean.
            if name == LOSS and name in logged:
                pair[1] = 0
            _add(logged, name, pair)

        return Step(
            module=self._network,
            batch=given,
            optimizers=self._optimizers,
            rows=rows,
            num_rows=batch.num_rows,
            divisor=divisor,
            seed=(self._config.seed + stream * _STEP_FACTOR) % 2**63,
            epoch=epoch,
            engine=engine,
            log=log,
        )

    def _make_placeholder(self, batch: Batch) -> Batch:
        """Returns one row for a rank without rows; `mean` and `gather` leave it out."""
        if self._latest is not None:
            return self._latest
        # Rows of varying length: a row without values.
        layout = batch.layout or (None,) * len(batch.inputs)
        inputs = [
            _make_row(given, number) if layout[number] in (None, number) else given
            for number, given in enumerate(batch.inputs)
        ]
        return Batch(
            inputs=tuple(inputs),
            labels=tuple(_make_row(label, -1 - number) for number, label in enumerate(batch.labels)),
            weight=None if batch.weight is None else _make_row(batch.weight),
            layout=batch.layout,
        )

    @contextmanager
    def _running(self, step: Step) -> Iterator[None]:
        with autocast(self._config.precision, self._device), collect_reports() as step.reports:
            if step.num_own:
                yield
            else:
                with keep_buffers(self._network):  # the placeholder must not change running statistics
                    yield
        if step.reports.losses:
            raise ValueError(
                f"layers of {type(self._network).__name__} add losses by add_loss, and only step.minimize of "
                "a single optimizer adds them to the loss; call it after the forward pass, or remove add_loss"
            )

    def _finish(
        self, step: Step, logged: dict[str, torch.Tensor], sums: dict[str, torch.Tensor]
    ) -> MicroBatchOutput:
        if LOSS not in logged:
            raise ValueError(
                "trainingStep called neither step.minimize nor step.record_loss; call one of them"
            )
        num_losses = len(self._config.label_columns)
        losses = torch.zeros(num_losses, dtype=torch.float64, device=self._device)
        weights = losses.clone() + 1e-30  # of the other heads, so that no mean of theirs is NaN
        losses[0], weights[0] = logged.pop(LOSS)
        for name, values in logged.items():
            _add(sums, name, values)
        counts = step.reports.counts if step.num_own else {}
        return MicroBatchOutput(losses, weights, [], counts)


def try_step(training: Trial) -> None:
    """Calls `trainingStep` once on sample rows, without optimizer steps. Raises ValueError if it fails.

    Runs on the driver, on a module that is not trained.
    """
    config, objects, module = training.config, training.copies, training.module
    batch = Batch(
        inputs=training.inputs,
        labels=training.labels,
        weight=None if config.weight_column is None else torch.ones(PROBE_ROWS),
        layout=read_layout(training.manifest, config.input_columns),
    )
    device, mesh = torch.device("cpu"), RankMesh.of(LocalCollective())
    sync = GradientSync(module, build_configured_optimizer(config, objects, module))
    runner = StepRunner(config, objects, sync, LossScaler("fp32", device), mesh, device)
    plan = plan_epoch([PROBE_ROWS], num_shards=1, batch_size=PROBE_ROWS, epoch=0, seed=0, shuffle=False)
    try:
        runner.try_on(batch, plan)
        if "validation" in training.splits:
            runner.evaluate(batch, plan, 0, 1, keeps_outputs=False)
    except Exception as error:
        given = ", ".join(str(tuple(values.shape)) for values in (*batch.inputs, *batch.labels))
        raise ValueError(
            f"trainingStep cannot take inputs and labels of shapes {given}: {type(error).__name__}: {error}; "
            "it is called as trainingStep(step), here with a few rows of zeros"
        ) from error


def _add(sums: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    sums[name] = values if name not in sums else sums[name] + values


def _make_row(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    row = torch.zeros(1, *values.shape[1:], dtype=values.dtype)
    if row.is_floating_point():
        # Norms and roots have no derivatives at 0, and 0 times such a derivative is not 0.
        row.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(seed))
    return row.to(values.device)


def _first_row(batch: Batch) -> Batch:
    inputs, labels = (tuple(t[:1].clone() for t in tensors) for tensors in (batch.inputs, batch.labels))
    weight: Any = None if batch.weight is None else batch.weight[:1].clone()
    return Batch(inputs=inputs, labels=labels, weight=weight, layout=batch.layout)
