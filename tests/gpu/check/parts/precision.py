"""Part "precision": a step in fp32, TF32, bf16 and fp16, by our autocast and loss scaler and by torch's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from check.part import Part, Setup, Value
from check.timing import compare, milliseconds, ratio
from check.workloads import (
    NAMES,
    Name,
    Step,
    Workload,
    matmul_precision,
    torch_adamw,
    workload,
)
from ringspark.estimators.training.precision import DTYPES, LossScaler, autocast, keep_norms_fp32

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
_STEPS = 20


class Precision(Part):
    columns = (
        *("ms per step", "torch's own", "ratio", "fp32 / this"),
        *(f"loss after {_STEPS} steps", "in fp32"),
    )
    note = (
        "A step with ringspark's autocast, normalization layers in fp32 and loss scaler, and a plain step "
        "with `torch.autocast` and `GradScaler`. `ratio` is plain time / our time; `fp32 / this` is the "
        "speed-up. tf32 is a setting of torch, which ringspark leaves to the user."
    )

    def cases(self) -> Sequence[str]:
        return [f"{name}, {precision}" for name in NAMES for precision in _PRECISIONS]

    def measure(self, case: str) -> Sequence[Value]:
        name, precision = case.split(", ")
        work = workload(_name(name), self.setup)
        device = self.setup.device
        with matmul_precision("high" if precision == "tf32" else "highest"):
            given = "fp32" if precision == "tf32" else precision
            own, plain = OwnStep(work, given, self.setup), _plain_step(work, given, self.setup)
            losses = [float(own()) for _ in range(_STEPS)]
            reference = Step(work, device, torch_adamw)
            with matmul_precision("highest"):
                wanted = [float(reference()) for _ in range(_STEPS)]
            assert abs(losses[-1] - wanted[-1]) < 0.1 * abs(wanted[0]) + 0.02, (losses[-1], wanted[-1])
            rounds = compare({"own": own, "plain": plain, "fp32": _highest(reference)}, self.setup)
        return [
            *(milliseconds(rounds["own"]), milliseconds(rounds["plain"])),
            *(ratio(rounds["plain"], rounds["own"]), ratio(rounds["fp32"], rounds["own"])),
            *(losses[-1], wanted[-1]),
        ]


class OwnStep(Step):
    """A step as the trainer takes it."""

    def __init__(self, work: Workload, precision: str, setup: Setup) -> None:
        def context(module: nn.Module) -> AbstractContextManager[object]:
            return autocast(precision, setup.torch_device)

        super().__init__(work, setup.device, torch_adamw, context)
        self._own = LossScaler(precision, setup.torch_device)
        if precision != "fp32":
            keep_norms_fp32(self.module)

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.work.loss(self.forward(), self.labels)
        self._own.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._own.step(self.optimizer)
        self._own.update()
        return loss.detach()


def _plain_step(work: Workload, precision: str, setup: Setup) -> Step:
    kind = setup.torch_device.type
    scaler: Any = torch.amp.GradScaler(kind) if precision == "fp16" else None

    def context(module: nn.Module) -> AbstractContextManager[object]:
        return nullcontext() if precision == "fp32" else torch.autocast(kind, DTYPES[precision])

    return Step(work, setup.device, torch_adamw, context, scaler)


def _highest(step: Step) -> Any:
    def call() -> None:
        with matmul_precision("highest"):
            step()

    return call


def _name(text: str) -> Name:
    return "mlp" if text == "mlp" else "transformer"
