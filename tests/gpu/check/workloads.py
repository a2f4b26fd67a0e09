"""The networks, batches and steps that several parts measure. Needs only torch and NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from check.part import Setup
from check.timing import seconds_of
from ringspark.estimators.training.optimizers.registry import make_optimizer
from ringspark.estimators.training.precision import DTYPES
from ringspark.models import ModelSpec, apply_activation_checkpoint

NAMES = ("mlp", "transformer")

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network and one batch for it. Batches and weights are made on the CPU, so they are equal everywhere.

    Attributes:
        vocabulary: Number of ids that the network takes; 0 means numbers.
        classes: Number of classes that it predicts; 0 means one number per row.
    """

    spec: ModelSpec
    rows: int
    shape: tuple[int, ...]
    vocabulary: int = 0
    classes: int = 0

    def batch(self, device: str, seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(seed)

        def values(ids: int, *shape: int) -> torch.Tensor:
            if ids:
                return torch.randint(ids, shape, generator=generator)
            return torch.randn(shape, generator=generator)

        inputs = values(self.vocabulary, self.rows, *self.shape)
        return inputs.to(device), values(self.classes, self.rows).to(device)

    def build(self, device: str) -> nn.Module:
        torch.manual_seed(0)
        return self.spec.build().to(device).train()

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.classes:
            return functional.cross_entropy(outputs.float(), labels)
        return functional.mse_loss(outputs.float().reshape(labels.shape), labels)


def workload(name: str, setup: Setup, dropout: float = 0.0) -> Workload:
    """Returns a workload. Even tiny tensors exceed a page, because offload and codecs skip smaller ones."""
    if name == "mlp":
        width, rows = (64, 64) if setup.is_tiny else (2048, 8192)
        sizes = {"in_features": 32, "hidden": [width] * 4, "out_features": 1, "dropout": dropout}
        return Workload(spec=ModelSpec("mlp", sizes), rows=rows, shape=(32,))
    dim, depth, heads, length, rows = (32, 2, 2, 16, 8) if setup.is_tiny else (512, 6, 8, 256, 32)
    vocabulary = 64 if setup.is_tiny else 4096
    sizes = {"vocab_size": vocabulary, "max_seq_len": length, "dim": dim, "depth": depth, "num_heads": heads}
    spec = ModelSpec("transformer_classifier", {**sizes, "out_features": 10, "dropout": dropout})
    return Workload(spec=spec, rows=rows, shape=(length,), vocabulary=vocabulary, classes=10)


class Step:
    """One optimizer step. Every call takes the same batch.

    Args:
        context: Entered around the forward pass.
        scaler: Scales the loss and steps the optimizer; by default, nothing is scaled.
    """

    def __init__(
        self,
        work: Workload,
        device: str,
        context: Callable[[nn.Module], AbstractContextManager[object]] = lambda module: nullcontext(),
        scaler: Any = None,
    ) -> None:
        self.work, self.module = work, work.build(device)
        self.inputs, self.labels = work.batch(device)
        self.optimizer = torch_adamw(list(self.module.parameters()))
        self._context, self._scaler = context, scaler or torch.amp.GradScaler(enabled=False)

    def forward(self) -> torch.Tensor:
        with self._context(self.module):
            outputs: torch.Tensor = self.module(self.inputs)
        return outputs

    def __call__(self) -> torch.Tensor:
        """Returns the loss before the step, on the device."""
        self.optimizer.zero_grad()
        loss = self.work.loss(self.forward(), self.labels)
        self._scaler.scale(loss).backward()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients of one pass, with the same random seed in each call."""
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        self.work.loss(self.forward(), self.labels).backward()
        return [p.grad.clone() for p in self.module.parameters() if p.grad is not None]


def torch_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns torch's own AdamW with its fastest kernel, as the reference of all comparisons."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=parameters[0].is_cuda or None)


def torch_autocast(precision: str, device: str) -> AbstractContextManager[object]:
    kind = torch.device(device).type
    return torch.autocast(kind, DTYPES.get(precision), enabled=precision != "fp32")


def torch_scaler(precision: str, device: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(torch.device(device).type, enabled=precision == "fp16")


def plain_rate(
    work: Workload, batches: Sequence[Batch], device: str, precision: str, checkpointing: str = "none"
) -> float:
    """Returns rows/s of the second epoch of a plain PyTorch loop over batches in host memory."""
    module = apply_activation_checkpoint(work.build(device), checkpointing)
    optimizer = make_optimizer("adamw", module.parameters(), 1e-3, 0.0)
    scaler = torch_scaler(precision, device)

    def epoch() -> None:
        for pair in batches:
            inputs, labels = (tensor.to(device, non_blocking=True) for tensor in pair)
            optimizer.zero_grad()
            with torch_autocast(precision, device):
                outputs = module(inputs)
            scaler.scale(work.loss(outputs, labels)).backward()
            scaler.step(optimizer)
            scaler.update()

    epoch()
    return sum(len(inputs) for inputs, _ in batches) / seconds_of(epoch, device)


@contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    """Sets the rounding of fp32 products inside the context: "highest", or "high" for TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
