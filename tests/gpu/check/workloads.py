"""The networks, batches and steps that several parts measure. Needs only torch and NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from check.part import Setup
from ringspark.models import ModelSpec

Name = Literal["mlp", "transformer"]
NAMES: tuple[Name, ...] = ("mlp", "transformer")


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

    def batch(self, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def values(ids: int, *shape: int) -> torch.Tensor:
            if ids:
                return torch.randint(ids, shape, generator=generator)
            return torch.randn(shape, generator=generator)

        inputs = values(self.vocabulary, self.rows, *self.shape)
        return inputs.to(device), values(self.classes, self.rows).to(device)

    def build(self, device: str) -> nn.Module:
        torch.manual_seed(0)
        module: nn.Module = self.spec.build()
        return module.to(device).train()

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.classes:
            return functional.cross_entropy(outputs.float(), labels)
        return functional.mse_loss(outputs.float().reshape(labels.shape), labels)


def workload(name: Name, setup: Setup, dropout: float = 0.0) -> Workload:
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
        scaler: Scales the loss and steps the optimizer, for fp16; by default, nothing is scaled.
    """

    def __init__(
        self,
        work: Workload,
        device: str,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        context: Callable[[nn.Module], AbstractContextManager[object]] = lambda module: nullcontext(),
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.work, self.module = work, work.build(device)
        self.inputs, self.labels = work.batch(device)
        self.optimizer = optimizer(list(self.module.parameters()))
        self._context, self._scaler = context, scaler

    def forward(self) -> torch.Tensor:
        with self._context(self.module):
            outputs: torch.Tensor = self.module(self.inputs)
        return outputs

    def __call__(self) -> torch.Tensor:
        """Returns the loss before the step, on the device."""
        self.optimizer.zero_grad()
        loss = self.work.loss(self.forward(), self.labels)
        if self._scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        else:
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self._scaler.step(self.optimizer)
            self._scaler.update()
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients of one pass, with the same random seed in each call."""
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        self.work.loss(self.forward(), self.labels).backward()  # type: ignore[no-untyped-call]
        return [p.grad.clone() for p in self.module.parameters() if p.grad is not None]


def torch_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns torch's own AdamW with its fastest kernel, as the reference of all comparisons."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=parameters[0].is_cuda or None)


@contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    """Sets the rounding of fp32 products inside the context: "highest", or "high" for TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
