"""Forward passes in less than fp32: bf16 by autocast, int8 by torch's own kernels.

In int8, `torch.nn.functional.linear` with a parameter as weight is quantized: the weight once per output
channel, the input in each pass (dynamic quantization). Everything else stays fp32. torch's own conversion
(`torch.ao.quantization`) replaces modules, which a recorded `Program` does not have. torchao 0.18 was slower
than fp32 without a compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ringspark.estimators.training.precision import keep_norms_fp32
from ringspark.estimators.training.settings.choices import InferencePrecision
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta
from ringspark.models.program import Program

_LINEAR = "aten.linear.default"


class ReducedNetwork(nn.Module):
    """Runs a network in the context of a lower precision; its parameters stay fp32."""

    def __init__(self, network: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.network = network
        self._context = context

    def forward(self, *inputs: torch.Tensor) -> Any:
        with self._context():
            return self.network(*inputs)


def reduce_precision(module: nn.Module, precision: InferencePrecision, device: str = "cpu") -> nn.Module:
    """Returns a module that computes in this precision with the weights of `module`."""
    if precision == "bf16":
        keep_norms_fp32(module)
        # A cache would keep a second copy of the weights.
        kind = torch.device(device).type
        return ReducedNetwork(module, partial(torch.autocast, kind, torch.bfloat16, cache_enabled=False))
    if precision == "int8":
        mode = _QuantizedLinear()
        return ReducedNetwork(module, lambda: mode)
    return module


def check_int8(model: ModelSpec | nn.Module) -> None:
    """Raises ValueError if int8 cannot run the network."""
    if not hasattr(torch.ops.quantized, "linear_dynamic"):
        raise ValueError(
            f"inferencePrecision='int8' needs kernels that torch {torch.__version__} lacks; set 'bf16'"
        )
    module = build_on_meta(model.build) if isinstance(model, ModelSpec) else model
    if isinstance(module, Program):
        has_linear = any(step[0] == _LINEAR for step in module.text["steps"])
    else:
        has_linear = any(isinstance(layer, nn.Linear) for layer in module.modules())
    if not has_linear:
        raise ValueError(
            f"inferencePrecision='int8' quantizes linear layers, but {type(module).__name__} has none; set "
            "'bf16' or 'fp32'"
        )


class _QuantizedLinear(TorchFunctionMode):
    """Replaces calls of `linear` by torch's int8 kernel, in modules and in recorded programs."""

    def __init__(self) -> None:
        super().__init__()
        # Holds weight and bias too, so that no other tensor gets their ids.
        self._packed: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (linear, torch.ops.aten.linear.default) and len(args) > 1 and not kwargs:
            x, weight, bias = (*args, None)[:3]
            # The kernel takes no empty input.
            if isinstance(weight, nn.Parameter) and weight.dtype == x.dtype == torch.float32 and x.numel():
                key = id(weight), id(bias)
                if key not in self._packed:
                    self._packed[key] = _pack(weight, bias), weight, bias
                # 7 bits for activations, because CPUs without VNNI add pairs of products in 16 bits.
                return torch.ops.quantized.linear_dynamic(x, self._packed[key][0], True)
        return func(*args, **(kwargs or {}))


def _pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    weight = weight.detach()
    scales = weight.abs().amax(1).clamp(min=1e-12).double() / 127
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():
        # torch announces the end of this tensor type, not of the kernel.
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(quantized, None if bias is None else bias.detach())


@dataclass(frozen=True, kw_only=True)
class PrecisionDifference:
    """Absolute differences between predictions in `precision` and in fp32.

    A classifier's class probabilities are compared, otherwise the outputs of the network.

    Attributes:
        rows_of: Compared rows: "validation" for held-out rows of the fit, "train" for rows that the model was
            trained on, "given" for rows that the user passed.
        changed_classes: Share of the rows with another predicted class; None without classes.
    """

    precision: InferencePrecision
    rows_of: Literal["validation", "train", "given"]
    rows: int
    largest: float
    mean: float
    changed_classes: float | None = None
