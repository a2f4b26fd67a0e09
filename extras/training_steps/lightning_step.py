"""`trainingStep="lightning"`: trains a LightningModule by its own `training_step` and `configure_optimizers`.

The module's loss is the mean over the rows of its rank. It is weighted by the rank's share of all rows, so
the gradients add up to the gradient of the mean over all rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.training_steps.step import Step

_PREFIX = {True: re.compile(r"^train(ing)?[_/]"), False: re.compile(r"^val(id|idation)?[_/]")}
# Methods of a LightningModule that a Trainer calls in training, and the adapter does not.
_NOT_CALLED = re.compile(
    r"on_(after|before|fit|train)_\w+|on_validation_(batch_|epoch_)?(start|end)|setup|backward|"
    r"configure_(callbacks|gradient_clipping|model)|optimizer_(step|zero_grad)|lr_scheduler_step|"
    r"transfer_batch_to_device"
)


class LightningStep:
    def __call__(self, step: Step) -> None:
        module: Any = step.module
        with _attached(module, step) as trainer:
            batch = (*step.inputs, *step.labels)
            if not step.is_training:
                if type(module).validation_step is _find_base(module).validation_step:
                    raise ValueError(
                        f"{type(module).__name__} has no validation_step, which computes the loss of "
                        "held-out rows; add one, or hold out no rows"
                    )
                loss = _loss_of(module.validation_step(batch, step.number), "validation_step")
                step.record_loss(_share(step, loss))
            elif module.automatic_optimization:
                loss = _loss_of(module.training_step(batch, step.number), "training_step")
                (optimizer,) = trainer.optimizers
                optimizer.zero_grad()
                trainer.backward(loss)
                optimizer.step()
                step.record_loss(_share(step, loss))
            else:
                trainer.run_manual(module, batch)

    def make_optimizers(self, module: nn.Module) -> Any:
        """Returns the optimizers of `configure_optimizers`, by their numbers if there are several."""
        made: Any = module.configure_optimizers()  # type: ignore[operator]
        entries = list(made) if isinstance(made, list | tuple) else [made]
        if len(entries) == 2 and all(isinstance(entry, list | tuple) for entry in entries):
            optimizers, schedules = entries
            entries = [{"optimizer": optimizer} for optimizer in optimizers]
            if schedules:
                entries[0]["lr_scheduler"] = schedules
        found = []
        for entry in entries:
            is_dict = isinstance(entry, dict)
            if is_dict and entry.get("lr_scheduler"):
                raise ValueError(
                    f"configure_optimizers of {type(module).__name__} returns a learning-rate schedule; "
                    "leave it out, and set lrSchedule"
                )
            found.append(entry.get("optimizer") if is_dict else entry)
        if len(found) == 1:
            return found[0]
        return {str(number): optimizer for number, optimizer in enumerate(found)}

    def check(self, config: TrainConfig, module: nn.Module) -> None:
        """Raises ValueError for a module that would train differently than with Lightning's Trainer."""
        name = type(module).__name__
        base = _find_base(module)
        if base is None:
            raise ValueError(
                f"trainingStep 'lightning' needs a LightningModule, got {name}; set it to a callable"
            )
        hooks = filter(_NOT_CALLED.fullmatch, dir(base))
        if own := [hook for hook in hooks if getattr(type(module), hook) is not getattr(base, hook)]:
            raise ValueError(
                f"{name} has {own[0]}, which trainingStep 'lightning' does not call; move it into "
                "training_step or a Callback of ringspark"
            )
        if type(module).training_step is base.training_step:  # type: ignore[attr-defined]
            raise ValueError(f"{name} has no training_step; add one, or leave trainingStep unset")
        made = self.make_optimizers(module)
        if module.automatic_optimization and isinstance(made, dict):
            raise ValueError(
                f"configure_optimizers of {name} returns {len(made)} optimizers, which need manual "
                "optimization; set automatic_optimization = False, and step them in training_step"
            )


def _find_base(module: nn.Module) -> Any:
    """Returns the class LightningModule among the classes of the module, or None."""
    for kind in type(module).__mro__:
        if kind.__name__ == "LightningModule" and kind.__module__.startswith(
            ("lightning.", "pytorch_lightning.")
        ):
            return kind
    return None


@contextmanager
def _attached(module: Any, step: Step) -> Iterator[_Trainer]:
    """Attaches a replacement of Lightning's Trainer to the module, for one step."""
    trainer = _Trainer(step)
    before = module._trainer
    module.trainer = trainer
    module.__dict__["log"] = trainer.log
    module.__dict__["all_gather"] = _refuse_gather
    try:
        yield trainer
    finally:
        module._trainer = before
        del module.__dict__["log"], module.__dict__["all_gather"]


class _Trainer:
    """Replaces Lightning's Trainer, its strategy and its precision plugin within a training step."""

    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Any = None
    logger: Any = None
    loggers: tuple[Any, ...] = ()
    lr_scheduler_configs: tuple[Any, ...] = ()
    progress_bar_callback: Any = None

    def __init__(self, step: Step) -> None:
        self._step = step
        self._engine: Any = step.engine  # only training steps use it
        self.optimizers = [_Optimizer(step, name) for name in step.optimizers]
        self._lightning_optimizers = self.optimizers
        self.current_epoch = step.epoch - 1
        self.training, self.validating = step.is_training, not step.is_training
        self.strategy = self.precision_plugin = self
        self.is_global_zero = False
        self._loss: torch.Tensor | None = None

    @property
    def global_step(self) -> int:
        raise ValueError(
            "trainer.global_step counts the steps of all optimizers in Lightning, and trainingStep "
            "'lightning' has no such count; use batch_idx and current_epoch"
        )

    def run_manual(self, module: Any, batch: tuple[torch.Tensor, ...]) -> None:
        module.training_step(batch, self._step.number)
        if self._loss is None or not self._engine.num_steps:
            raise ValueError(
                f"training_step of {type(module).__name__} must call manual_backward and step an optimizer "
                "in each batch; raise batchSize instead of accumulating gradients over batches"
            )
        self._step.record_loss(self._loss)

    def backward(
        self,
        loss: torch.Tensor,
        optimizer: Any = None,
        *args: Any,
        retain_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        share = _share(self._step, loss)
        self._loss = share.detach() if self._loss is None else self._loss + share.detach()
        # A rank without rows has zero gradients; its placeholder row must not count.
        if self._step.num_own:
            self._engine.backward(share, retain_graph=retain_graph)
        if args or kwargs:
            raise ValueError(
                f"manual_backward takes a loss and retain_graph here, got {[*args, *kwargs]}; leave them out"
            )

    def clip_gradients(self, optimizer: Any, clip_val: float, algorithm: Any) -> None:
        if algorithm != "norm":
            raise ValueError(
                f"clip_gradients clips by 'norm' here, got {algorithm}; set gradient_clip_algorithm='norm'"
            )
        if clip_val:
            self._engine.clip(optimizer.name, float(clip_val))

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Adds the mean over this rank's rows to the history; Lightning's options have no effect."""
        # The history adds "train_" or "validation_".
        name = _PREFIX[self.training].sub("", name)
        if name == "loss":
            return  # the history has it
        value = torch.as_tensor(value, device=self._step.labels[0].device).float()
        self._step.log(name, _share(self._step, value))

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"a training_step cannot use trainer.{name} here; see docs/training_steps.md")


class _Optimizer(torch.optim.Optimizer):
    """One of the step's optimizers: its step also sums the gradients over the ranks."""

    def __init__(self, step: Step, name: str) -> None:
        inner = step.optimizers[name]
        # Not the constructor of the base class, which would make new groups.
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.optimizer, self.name = inner, name
        self._engine: Any = step.engine

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        self._engine.step(self.name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad(self.name)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        raise ValueError("toggle_model accumulates gradients over batches here; use toggle_optimizer")
        yield


def _share(step: Step, loss: torch.Tensor) -> torch.Tensor:
    if loss.dim() and loss.numel() != 1:
        raise ValueError(f"a LightningModule's loss must be one number, got shape {tuple(loss.shape)}")
    if not step.num_own:
        return torch.zeros((), device=loss.device)
    return loss.float().reshape(()) * step.share


def _loss_of(returned: Any, method: str) -> torch.Tensor:
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if not isinstance(loss, torch.Tensor):
        raise ValueError(f"{method} must return its loss, a tensor or a dict with 'loss', got {returned!r}")
    return loss


def _refuse_gather(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "all_gather needs equal numbers of rows per rank, which ringspark does not have; set trainingStep to "
        "a callable that uses step.gather"
    )
