"""Measures each rank's memory, work and messages in a sharded network, on fake tensors.

Every stage runs alone; its input values and gradients are fake tensors of the right shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.precision import autocast
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.step import compute_losses, forward, scale_loss
from ringspark.extras.model_parallel.fake_collective import Message
from ringspark.extras.model_parallel.pipeline.wire import Forms, forms_of, mark_gradients
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.extras.planning.memory.cut_network import CutNetwork
from ringspark.extras.planning.memory.meter import SENT, Peak
from ringspark.extras.planning.memory.step import FakeStep, on_fake_tensors
from ringspark.extras.planning.work import Work
from ringspark.models.chain import as_values, links_of, run_links


@dataclass(frozen=True, kw_only=True)
class PassBytes:
    """Forward or backward pass of one stage on one micro-batch.

    Attributes:
        peaks: Peak memory for each value of `sharding` and for `LEAVING`, without memory that other
            micro-batches hold.
        kept: Bytes by which memory has grown after the pass; negative for a backward pass.
        messages: Communication inside the network, by axis.
    """

    peaks: Mapping[str, Peak]
    kept: int
    work: Work
    messages: Mapping[str, tuple[Message, ...]]


Passes = dict[tuple[int, bool], PassBytes]
"""Maps (stage, whether it is the forward pass) to the pass."""


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Bytes and work of one rank in one training step.

    Attributes:
        module: The rank's part of the network on `meta`.
        parts: Bytes of parameters, gradients and optimizer state, under their names in `plan_memory`.
        first: Passes of a step's first micro-batch, in which the gradients are allocated.
        passes: Passes of any later micro-batch, in which gradients are added up; `first` if there is none.
        update: Peak of the optimizer's step for each value of `sharding`.
        batch: Bytes of the rows of one micro-batch.
        step_rows: Bytes of the rows of a step, if its micro-batches are unequal; else None.
        arriving: Bytes that each stage receives from another rank in the forward pass of a micro-batch.
        returning: Bytes of gradients that each stage receives from another rank in the backward pass of a
            micro-batch.
    """

    module: nn.Module
    parts: Mapping[str, int]
    first: Passes
    passes: Passes
    update: Mapping[str, Peak]
    update_work: Work
    batch: int
    arriving: Mapping[int, int]
    returning: Mapping[int, int]
    step_rows: int | None = None


def measure_ranks(
    config: TrainConfig,
    objects: UserObjects,
    network: CutNetwork,
    inputs: Sequence[BatchColumn],
    labels: Sequence[BatchColumn],
    known: Sequence[RankBytes] | None = None,
) -> list[RankBytes]:
    """Measures one micro-batch and one update on each rank of a replica, in steady state.

    Args:
        config: The settings, except `batch_size`: the micro-batch has the rows of `inputs`.
        known: Result of an earlier call for this network; its updates are not measured again.

    Raises:
        Exception: Any error of the network, the loss or the optimizer on fake tensors.
    """
    forms = _forms(config, objects, network, inputs) if network.is_pipeline else {}
    found = []
    for rank, module in enumerate(network.parts):
        with on_fake_tensors(config, objects, module) as step:
            own = _Rank(config, network, rank, step, forms)
            found.append(own.measure(inputs, labels, known[rank] if known else None))
    return found


@dataclass(frozen=True)
class _Rank:
    config: TrainConfig
    network: CutNetwork
    rank: int
    step: FakeStep
    forms: Mapping[int, Forms]

    @property
    def last(self) -> int:
        return len(self.network.owners) - 1

    def measure(
        self, inputs: Sequence[BatchColumn], labels: Sequence[BatchColumn], known: RankBytes | None
    ) -> RankBytes:
        step = self.step
        stages = [stage for stage, owner in enumerate(self.network.owners) if owner == self.rank]
        device = step.recipe.device
        batch = Batch(
            inputs=tuple(c.empty(device) for c in inputs),
            labels=tuple(c.empty(device) for c in labels),
            weight=None,
        )
        if step.transform is not None:
            batch = step.transform(batch, 0)
        rows = [*batch.inputs, *batch.labels]
        if device.type == "cuda":
            # A GPU also holds the next batch, see `feed.move_batches`.
            rows += [c.empty(device) for c in (*inputs, *labels)]
        step.meter.assign(rows, "batch")
        step.module.train()
        # From the second on, micro-batches start with existing gradients and are all alike.
        rounds: list[Passes] = [{} for _ in range(min(2, self.config.gradient_accumulation))]
        for passes in rounds:
            for stage in stages:
                passes |= self._stage(stage, batch)
        measured: dict[str, Any] = {
            "first": rounds[0],
            "passes": rounds[-1],
            "batch": num_bytes(rows),
            "arriving": {stage: self._bytes_before(stage) for stage in stages},
            "returning": {stage: self._bytes_before(stage + 1, has_gradient=True) for stage in stages},
        }
        if known is not None:
            # The update holds the batch's rows too.
            update = {name: p.with_parts(batch=num_bytes(rows)) for name, p in known.update.items()}
            return replace(known, update=update, **measured)
        step.count.take()
        update = step.update()
        work = step.count.take()
        # Two updates ran: the first one created the state.
        half = Work(launches=work.launches // 2, flops=work.flops // 2, num_bytes=work.num_bytes // 2)
        live = step.meter.live
        parts = {
            "parameters": live["parameters"],
            "gradients": live["gradients"] + live[SENT],
            "optimizer_state": live["optimizer_state"],
        }
        return RankBytes(
            module=self.network.parts[self.rank], parts=parts, update=update, update_work=half, **measured
        )

    def _bytes_before(self, stage: int, *, has_gradient: bool = False) -> int:
        """Returns the bytes that `stage` receives from another rank in a forward pass.

        With `has_gradient`, counts only the values that need gradients.
        """
        owners = self.network.owners
        if not 0 < stage < len(owners) or owners[stage - 1] == owners[stage]:
            return 0
        forms = [form for form in self.forms[stage] if form and (form.requires_grad or not has_gradient)]
        return sum(form.dtype.itemsize * torch.Size(form.shape).numel() for form in forms)

    def _stage(self, stage: int, batch: Batch) -> Passes:
        before = self._begin()
        results, kept, values = self._forward(stage, batch)
        found: Passes = {(stage, True): self._end(before)}
        before = self._begin()
        if results:
            given = [torch.empty_like(r) for r in results] if stage < self.last else None
            with self.step.recipe.criterion.differentiable():
                torch.autograd.backward(results, given)
            del given
        del results, values
        found[stage, False] = self._end(before)
        del kept
        return found

    def _forward(self, stage: int, batch: Batch) -> tuple[list[torch.Tensor], Any, Any]:
        """Runs a stage; returns tensors to differentiate, outputs for metrics, and tensors to keep alive."""
        step, module = self.step, self.step.module
        recipe, keeps = step.recipe, bool(self.config.metrics)
        if not self.network.is_pipeline:
            losses, seen = forward(recipe, module, module, batch, keeps_outputs=keeps)
            return [scale_loss(recipe, step.sync, losses, float(batch.num_rows))], seen, None
        values: Any = batch.inputs
        if stage > 0:
            forms, device = self.forms[stage], recipe.device
            empty = (None if f is None else torch.empty(f.shape, dtype=f.dtype, device=device) for f in forms)
            values = mark_gradients(tuple(empty), forms)
        with autocast(self.config.precision, recipe.device):
            outputs = module(*values, stage=stage)
        if stage == self.last:
            losses, seen = compute_losses(recipe, module, outputs, batch, keeps_outputs=keeps)
            return [scale_loss(recipe, step.sync, losses, float(batch.num_rows))], seen, values
        given = outputs if isinstance(outputs, tuple) else (outputs,)
        return [v for v in given if v is not None and v.requires_grad], None, (values, given)

    def _begin(self) -> int:
        self.step.meter.restart()
        self.step.count.take()
        for fake in self.network.fakes.values():
            fake.messages.clear()
        return self.step.meter.live["activations"]

    def _end(self, before: int) -> PassBytes:
        meter = self.step.meter
        return PassBytes(
            peaks=meter.peaks,
            kept=meter.live["activations"] - before,
            work=self.step.count.take(),
            messages={axis: tuple(found.messages) for axis, found in self.network.fakes.items()},
        )


def _forms(
    config: TrainConfig, objects: UserObjects, network: CutNetwork, inputs: Sequence[BatchColumn]
) -> dict[int, Forms]:
    """Returns the shapes and dtypes of the values that each stage except the first receives."""
    forms: dict[int, Forms] = {}
    plain = replace(config, gradient_checkpointing="none")
    with on_fake_tensors(plain, objects, network.whole) as step:
        step.module.train()
        links = links_of(step.module)
        values: Any = tuple(c.empty(step.recipe.device) for c in inputs)
        for stage, (begin, end) in enumerate(pairwise(network.bounds[:-1]), 1):
            with autocast(config.precision, step.recipe.device):
                values = as_values(run_links(links[begin:end], values), links[end].name)
            forms[stage] = forms_of(values)
            # Each stage has its own graph.
            values = mark_gradients(tuple(v if v is None else v.detach() for v in values), forms[stage])
    return forms
