"""The network and the optimizer of one rank on fake tensors, made by the functions of the trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ringspark.estimators.memory.shares import SHARDED_PARTS, shard_group_size, shares
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.training.batch_transforms import BatchTransform, prepare_function, prepare_inputs
from ringspark.estimators.training.build import build_configured_optimizer
from ringspark.estimators.training.make_heads import make_heads
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.precision import LossScaler, keep_norms_fp32
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects, segment_policy
from ringspark.estimators.training.step import Recipe
from ringspark.extras.model_parallel.tensor.loss import scores_of
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.extras.planning.memory.meter import SENT, Meter, Peak
from ringspark.extras.planning.memory.sharing import backward_buckets
from ringspark.extras.planning.work import WorkCount
from ringspark.models import apply_activation_checkpoint
from ringspark.models.meta_device import copy_module
from ringspark.models.process_state import fork_generators, ignore_warnings

# Key of the peak if gradients move to the communication buffers during the backward pass.
LEAVING = "leaving"


@contextmanager
def on_fake_tensors(config: TrainConfig, objects: UserObjects, empty: nn.Module) -> Iterator[FakeStep]:
    """Enters a context in which tensors have no memory; yields the network and everything that a step needs.

    Args:
        empty: The network on the meta device.
    """
    if config.training_step is not None:
        raise ValueError(
            f"a plan measures the trainer's own step, but trainingStep is {config.training_step!r}; measure "
            "a short training instead"
        )
    device = torch.device("cuda" if config.use_gpu and torch.cuda.is_available() else "cpu")
    gpus = [device] if device.type == "cuda" else []
    sharded = {name: shares(name, shard_group_size(config)) for name in SHARDED_PARTS}
    meter, count = Meter({**sharded, LEAVING: {SENT: 0.0}}), WorkCount()
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
        count,
    ):
        yield FakeStep(config, objects, empty, device, meter, count, transform)


@contextmanager
def _quiet() -> Iterator[None]:
    # Torch logs errors on fake tensors, which the caller gets anyway.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def make_step(
    config: TrainConfig, objects: UserObjects, module: nn.Module, device: torch.device
) -> tuple[GradientSync, Recipe]:
    """Returns what a training step on one rank without peers needs."""
    optimizer = build_configured_optimizer(config, objects, module)
    recipe = Recipe(
        config=config,
        criterion=Criterion(make_heads(config, objects), device, scores_of(module)),
        scaler=LossScaler(config.precision, device),
        device=device,
    )
    return GradientSync(module, optimizer), recipe


class FakeStep:
    """The network, the optimizer and the training step of one rank, on fake tensors."""

    def __init__(
        self,
        config: TrainConfig,
        objects: UserObjects,
        empty: nn.Module,
        device: torch.device,
        meter: Meter,
        count: WorkCount,
        transform: BatchTransform | None,
    ) -> None:
        self._config, self.meter, self.count, self.transform = config, meter, count, transform
        self.module = _with_storage(empty, device)
        meter.assign([*self.module.parameters(), *self.module.buffers()], "parameters")
        if config.precision != "fp32":
            keep_norms_fp32(self.module)
        if config.gradient_checkpointing != "none":
            apply_activation_checkpoint(self.module, segment_policy(config.gradient_checkpointing))
        self._trained = [p for p in self.module.parameters() if p.requires_grad]
        # Gradients count as sent once their bucket and all earlier buckets are full.
        self._unsent = [(bucket, set(bucket)) for bucket in backward_buckets(self.module)]
        # The weight average is sharded like the parameters.
        self._average = [torch.empty_like(p) for p in self._trained if config.ema_decay is not None]
        meter.assign(self._average, "parameters")
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._own_gradient)  # type: ignore[no-untyped-call]
        self.sync, self.recipe = make_step(config, objects, self.module, device)
        # Adagrad creates its state here, other optimizers in their first step.
        state = tree_leaves(list(self.sync.optimizer.state.values()))
        meter.assign(filter(torch.is_tensor, state), "optimizer_state")

    def _own_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        self.meter.assign([parameter.grad], "gradients")
        for _, awaited in self._unsent:
            awaited.discard(parameter)
        while self._unsent and not self._unsent[0][1]:
            bucket, _ = self._unsent.pop(0)
            self.meter.assign([p.grad for p in bucket if p.grad is not None], SENT)

    def update(self) -> dict[str, Peak]:
        """Returns the peak of the second optimizer step by sharding; the first creates the state."""
        before = self.meter.snapshot()
        # Not the scaler's `step`, which reads whether the gradients are finite.
        self.recipe.scaler.unscale(self.sync.optimizer)
        self._optimizer_step()
        self.meter.assign_new(before, "optimizer_state")
        self.meter.restart()
        self._optimizer_step()
        return self.meter.peaks

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
