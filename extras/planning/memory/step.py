"""Runs one training step on fake tensors, by the functions of the trainer.

The optimizer's state exists already, as in every step except the first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.memory.shares import SHARDED_PARTS, shard_group_size, shares
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.training.batch_transforms import BatchTransform, prepare_function, prepare_inputs
from ringspark.estimators.training.build import build_configured_optimizer
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.make_heads import make_heads
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.precision import LossScaler, keep_norms_fp32
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects, segment_policy
from ringspark.estimators.training.step import Recipe, forward_backward, global_weights
from ringspark.extras.model_parallel.tensor.loss import scores_of
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.extras.planning.memory.meter import SENT, Meter, Peak, Weights
from ringspark.extras.planning.memory.sharing import (
    backward_buckets,
    reduces_during_backward,
    reduces_in_buckets,
)
from ringspark.models import apply_activation_checkpoint
from ringspark.models.meta_device import copy_module
from ringspark.models.process_state import fork_generators, ignore_warnings

# From the second on, micro-batches start with existing gradients and are all alike.
MOST_MICRO_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class UpdateBytes:
    """The memory of the optimizer's step, which settings of activations do not change."""

    state: int  # bytes of the optimizer's state, unsharded
    temporaries: int  # maximum bytes except parameters, gradients, state and batch
    peaks: dict[str, Peak]  # sharding -> the peak of one rank


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """The memory of one step."""

    parts: dict[str, int]  # part -> its maximum bytes, unsharded
    peaks: dict[str, Peak]  # sharding -> the peak of one rank
    update: UpdateBytes


def measure_step(
    config: TrainConfig,
    objects: UserObjects,
    empty: nn.Module,
    inputs: Sequence[BatchColumn],
    labels: Sequence[BatchColumn],
    update: UpdateBytes | None = None,
) -> StepBytes:
    """Counts the bytes of one step in steady state.

    Args:
        config: Config with resolved losses; its `batch_size` is ignored, the columns give the number of rows.
        empty: The network on the meta device.
        update: Result of an earlier call with the same network, optimizer and batch.
    """
    initialize_lazy_layers(empty, inputs, objects)
    with on_fake_tensors(config, objects, empty) as step:
        return step.run(inputs, labels, update)


@contextmanager
def on_fake_tensors(
    config: TrainConfig,
    objects: UserObjects,
    empty: nn.Module,
    *modes: TorchDispatchMode,
    weightings: Mapping[str, Weights] | None = None,
) -> Iterator[FakeStep]:
    """Enters a context in which tensors have no memory; yields the network and everything that a step needs.

    Args:
        modes: Further dispatch modes to enter.
        weightings: Further weightings for the `Meter`, which always has one per type of sharding.
    """
    if config.training_step is not None:
        raise ValueError(
            f"a plan measures the trainer's own step, but trainingStep is {config.training_step!r}; measure "
            "a short training instead"
        )
    device = torch.device("cuda" if config.use_gpu and torch.cuda.is_available() else "cpu")
    gpus = [device] if device.type == "cuda" else []
    sharded = {name: shares(name, shard_group_size(config)) for name in SHARDED_PARTS}
    if reduces_during_backward(config.without_sharding()):
        sharded["none"] = {SENT: 0.0}
    meter = Meter({**sharded, **(weightings or {})})
    # Copied here, because a fake mode cannot copy real buffers.
    transform: BatchTransform | None = None
    if objects.transform_batch is not None:
        transform = BatchTransform(objects.transform_batch, config.seed, 0, device)
    with (
        # The training repeats the warnings of the network and the optimizer.
        ignore_warnings(),
        fork_generators(gpus),
        torch.autograd.set_multithreading_enabled(False),
        FakeTensorMode(allow_non_fake_inputs=True),
        _quiet(),
        meter,
        ExitStack() as entered,
    ):
        for mode in modes:
            entered.enter_context(mode)
        yield FakeStep(config, objects, empty, device, meter, transform)


@contextmanager
def _quiet() -> Iterator[None]:
    # Torch logs errors on fake tensors, which the caller gets anyway.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class FakeStep:
    """The network, the optimizer and the training step of one rank, on fake tensors."""

    def __init__(
        self,
        config: TrainConfig,
        objects: UserObjects,
        empty: nn.Module,
        device: torch.device,
        meter: Meter,
        transform: BatchTransform | None,
    ) -> None:
        self._config, self._device, self.meter = config, device, meter
        self.transform = transform
        self.module = _with_storage(empty, device)
        meter.assign([*self.module.parameters(), *self.module.buffers()], "parameters")
        if config.precision != "fp32":
            keep_norms_fp32(self.module)
        if config.gradient_checkpointing != "none":
            apply_activation_checkpoint(self.module, segment_policy(config.gradient_checkpointing))
        self._trained = [p for p in self.module.parameters() if p.requires_grad]
        self._unsent: list[tuple[Sequence[nn.Parameter], set[nn.Parameter]]] = []
        # The weight average is sharded like the parameters.
        self._average = [torch.empty_like(p) for p in self._trained if config.ema_decay is not None]
        meter.assign(self._average, "parameters")
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._own_gradient)  # type: ignore[no-untyped-call]
        optimizer = build_configured_optimizer(config, objects, self.module)
        # Adagrad creates its state here, other optimizers in their first step.
        meter.assign(filter(torch.is_tensor, tree_leaves(list(optimizer.state.values()))), "optimizer_state")
        self.sync = GradientSync(self.module, optimizer)
        self.recipe = Recipe(
            config=config,
            criterion=Criterion(make_heads(config, objects), device, scores_of(self.module)),
            scaler=LossScaler(config.precision, device),
            device=device,
        )

    def send(self, buckets: Sequence[Sequence[nn.Parameter]]) -> None:
        """Counts gradients as sent once their bucket and all earlier buckets are full."""
        self._unsent = [(bucket, set(bucket)) for bucket in buckets]

    def _own_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        self.meter.assign([parameter.grad], "gradients")
        for _, awaited in self._unsent:
            awaited.discard(parameter)
        while self._unsent and not self._unsent[0][1]:
            bucket, _ = self._unsent.pop(0)
            self.meter.assign([p.grad for p in bucket if p.grad is not None], SENT)

    def run(
        self, inputs: Sequence[BatchColumn], labels: Sequence[BatchColumn], update: UpdateBytes | None
    ) -> StepBytes:
        batch = Batch(
            inputs=tuple(c.empty(self._device) for c in inputs),
            labels=tuple(c.empty(self._device) for c in labels),
            weight=None,
        )
        # A GPU also holds the next batch, see `feed.move_batches`.
        ahead = [c.empty(self._device) for c in (*inputs, *labels) if self._device.type == "cuda"]
        self.meter.assign([*batch.inputs, *batch.labels, *ahead], "batch")
        self.module.train()
        if self.transform is not None:
            batch = self.transform(batch, 0)
        if reduces_during_backward(self._config.without_sharding()):
            self.send(backward_buckets(self.module))
        self.meter.restart()
        divisor = global_weights(self.recipe, batch, batch.num_rows, LocalCollective())
        # Outputs are kept for metrics until the step is over, as in the trainer.
        outputs = [
            forward_backward(
                self.recipe, self.sync, micro_batch, divisor, keeps_outputs=bool(self._config.metrics)
            )
            for micro_batch in batch.split(self._config.gradient_accumulation)[:MOST_MICRO_BATCHES]
        ]
        del outputs
        backward = dict(self.meter.peaks)
        parts = dict(self.meter.highest)
        update = update or self.update()
        parts["optimizer_state"] = update.state
        parts["activations"] = max(parts["activations"], update.temporaries)
        peaks = {}
        in_buckets = reduces_in_buckets(self._config.without_sharding())
        for name, peak in backward.items():
            in_update = update.peaks[name]
            if in_buckets and name == "none":
                in_update = in_update.with_parts(gradients=0)
            share = shares(name, shard_group_size(self._config)).get("optimizer_state", 1.0)
            with_state = peak.with_parts(optimizer_state=int(update.state * share))
            peaks[name] = max(with_state, in_update, key=lambda found: found.total)
        return StepBytes(parts=parts, peaks=peaks, update=update)

    def update(self) -> UpdateBytes:
        """Measures the second optimizer step; the first creates the state."""
        before = self.meter.snapshot()
        # Not the scaler's `step`, which reads whether the gradients are finite.
        self.recipe.scaler.unscale(self.sync.optimizer)
        self._optimizer_step()
        self.meter.assign_new(before, "optimizer_state")
        self.meter.restart()
        self._optimizer_step()
        return UpdateBytes(
            state=self.meter.live["optimizer_state"],
            temporaries=self.meter.highest["activations"],
            peaks=dict(self.meter.peaks),
        )

    def _optimizer_step(self) -> None:
        self.meter.answers_scalars = True
        try:
            if self._config.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self._trained, self._config.max_grad_norm)
            self.sync.optimizer.step()
        finally:
            self.meter.answers_scalars = False


def initialize_lazy_layers(empty: nn.Module, inputs: Sequence[BatchColumn], objects: UserObjects) -> None:
    """Initializes lazy layers by a forward pass on the meta device."""
    if not any(map(is_lazy, (*empty.parameters(), *empty.buffers()))):
        return
    for owner in empty.modules():
        for name, parameter in owner._parameters.items():
            if isinstance(parameter, UninitializedParameter):
                owner._parameters[name] = UninitializedParameter(parameter.requires_grad, device="meta")
        for name, buffer in owner._buffers.items():
            if isinstance(buffer, UninitializedBuffer):
                owner._buffers[name] = UninitializedBuffer(device="meta")  # type: ignore[call-arg]
    empty.eval()
    with torch.no_grad():
        prepare = prepare_function(objects.transform_in_prediction, torch.device("meta"), training=False)
        empty(*prepare_inputs(prepare, tuple(c.empty("meta") for c in inputs)))
    empty.train()


def _with_storage(empty: nn.Module, device: torch.device) -> nn.Module:
    """Copies a network with fake parameters and buffers on `device`; runs under the fake mode."""
    fakes: dict[int, object] = {}
    tensors = (*empty.parameters(), *empty.buffers())
    for tensor in tensors:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, tensor.requires_grad)
        fakes[id(tensor)] = fake
    for tensor in tensors:
        attributes = {name: fakes.get(id(value), value) for name, value in vars(tensor).items()}
        vars(fakes[id(tensor)]).update(attributes)
    with _disable_current_modes():  # a copy of other tensors must not become fake
        return copy_module(empty, replaced=fakes, take=lambda real: real)
