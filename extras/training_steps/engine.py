"""Gradients and steps of several optimizers on one rank, each synchronized with the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import torch

from ringspark.estimators.collectives.base import backward_errors
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.training.precision import LossScaler


class Engine:
    """Runs backward passes and optimizer steps; every rank makes the same calls.

    An optimizer's step is `zero_grad`, `backward` (one or more), maybe `clip`, and `step`.

    Attributes:
        syncs: The synchronization of each optimizer's gradients, by the optimizer's name.
        skipped: Whether a step was skipped because of an overflow in fp16, since `begin`.
        num_steps: Number of optimizer steps since `begin`.
    """

    def __init__(
        self,
        syncs: Mapping[str, GradientSync],
        scaler: LossScaler,
        max_norm: float | None,
        device: torch.device,
    ) -> None:
        self.syncs, self._scaler, self._max_norm, self._device = dict(syncs), scaler, max_norm, device
        self._reduced: set[str] = set()
        self._stepped: set[str] = set()
        self._unscaled: str | None = None
        self._order = sha256()
        self.begin()

    def begin(self) -> None:
        self.skipped, self.num_steps = False, 0
        self._order.update(b"begin;")

    def take_order(self) -> str:
        """Returns a digest of the optimizer steps since the last call; it must be equal on all ranks."""
        found, self._order = self._order.hexdigest(), sha256()
        return found

    def zero_grad(self, name: str) -> None:
        self.syncs[name].optimizer.zero_grad()
        self._reduced.discard(name)
        self._stepped.discard(name)

    def backward(self, loss: torch.Tensor, name: str | None = None, *, retain_graph: bool = False) -> None:
        """Computes the gradients of this rank's share of a loss, and adds them to `grad`.

        With `name`, only the parameters of that optimizer get gradients.
        """
        for other in self._reduced - self._stepped if name is None else ():
            if _trained(self.syncs[other].optimizer):
                raise ValueError(
                    f"optimizer {other!r} clips its gradients before a backward pass adds to them, but they "
                    "are summed over the ranks already; clip after the last backward pass, or use "
                    "toggle_optimizer for the other optimizers"
                )
        inputs = None if name is None else _trained(self.syncs[name].optimizer)
        with torch.autocast(self._device.type, enabled=False), backward_errors():
            scaled = self._scaler.scale(loss.float())
            scaled.backward(inputs=inputs, retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def clip(self, name: str, max_norm: float) -> None:
        """All-reduces one optimizer's gradients, and scales them to a 2-norm of at most `max_norm`."""
        self._check_turn(name)
        self._reduce(name)
        self._unscaled = name
        self._scaler.unscale(self.syncs[name].optimizer)
        self.syncs[name].clip_gradients(max_norm)

    def step(self, name: str) -> None:
        """Sums one optimizer's gradients over the ranks and steps it."""
        if name in self._stepped:
            raise ValueError(
                f"optimizer {name!r} takes a second step with gradients of an earlier one; call its "
                "zero_grad() before each backward pass"
            )
        self._check_turn(name)
        with torch.autocast(self._device.type, enabled=False):
            self._reduce(name)
            if self._max_norm is not None:
                self.clip(name, self._max_norm)
            self.syncs[name].step(self._scaler)
        self._update_scale(name)
        self._unscaled = None
        self._stepped.add(name)
        self.skipped |= self._scaler.skipped
        self.num_steps += 1
        self._order.update(f"{name};".encode())

    def _check_turn(self, name: str) -> None:
        if self._unscaled not in (None, name):
            raise ValueError(
                f"optimizer {name!r} clips or steps before optimizer {self._unscaled!r}, whose gradients are "
                "clipped, has taken its step; take the steps one after the other"
            )

    def _update_scale(self, stepped: str) -> None:
        """Updates the scale of the loss in fp16, and the gradients that wait for their optimizers' steps."""
        before = self._scaler.current_scale
        self._scaler.update()
        factor = self._scaler.current_scale / before
        if factor != 1:
            for name in self.syncs.keys() - {stepped}:
                for group in self.syncs[name].optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.mul_(factor)

    def _reduce(self, name: str) -> None:
        if name not in self._reduced:
            self._reduced.add(name)
            with backward_errors():
                self.syncs[name].reduce(lambda: self._scaler.current_scale)


class TrialEngine(Engine):
    """Runs backward passes, and counts steps without taking them."""

    def clip(self, name: str, max_norm: float) -> None:
        self._reduced.add(name)

    def step(self, name: str) -> None:
        self._stepped.add(name)
        self.num_steps += 1


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
