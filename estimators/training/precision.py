"""Mixed precision by autocast: parameters, gradients and optimizer state stay fp32.

After Narang, Micikevicius et al. 2018, "Mixed Precision Training". In fp16 all ranks skip a step whose
gradients overflow. It counts for the schedule and the callbacks, but not for the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

# Values of `TrainConfig.activation_compression` that keep every bit of the activations.
LOSSLESS = ("none", "bits")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Below this scale, overflows are not caused by the scale, and small gradients are lost.
MIN_SCALE = 2.0**-10

# Batch and instance normalisation derive from `_NormBase`.
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def keep_norms_fp32(module: nn.Module) -> None:
    """Makes the module's normalisation layers compute in fp32 under autocast, on every device.

    Autocast on CPU lets LayerNorm keep mean and deviation in 16 bits, on CUDA it promotes only some layers.
    The output returns to the input's dtype, so later layers save no more bytes.
    """
    for layer in module.modules():
        if isinstance(layer, NORMS):
            layer.register_forward_pre_hook(_to_fp32)
            layer.register_forward_hook(_restore_dtype)


def _to_fp32(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    values = inputs[0] if inputs else None
    layer._ringspark_dtype = None  # type: ignore[assignment]
    if not isinstance(values, torch.Tensor) or values.dtype not in DTYPES.values():
        return None
    if not torch.is_autocast_enabled(values.device.type):
        return None
    if any(p.dtype != torch.float32 for p in layer.parameters(recurse=False)):
        return None
    layer._ringspark_dtype = values.dtype  # type: ignore[assignment]
    return (values.float(), *inputs[1:])


def _restore_dtype(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    dtype = layer._ringspark_dtype
    return output.to(dtype) if isinstance(dtype, torch.dtype) else output


class LossScaler:
    """Scales the loss dynamically if the precision needs it, else does nothing.

    Every rank calls `scale` per micro-batch, then `unscale` if it reads the step's gradients, `step` and
    `update`.
    """

    def __init__(
        self,
        precision: str,
        device: torch.device,
        combine: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        guards: bool = False,
        compression: str = "none",
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
    ) -> None:
        """Stores the settings.

        Args:
            combine: Returns the maximum of a tensor (1,) over all ranks; None if gradients are equal on all.
            guards: Whether steps whose gradients are not finite are skipped in other precisions too.
            compression: Value of `TrainConfig.activation_compression`, for `advice`.
        """
        self._compression = compression
        self.enabled = precision == "fp16" or guards
        self._scales = precision == "fp16"
        self.skipped = False
        self.skipped_steps = 0
        self._device = device
        self._combine = combine
        self._bad_loss = torch.zeros(1, device=device)  # above 0 if a loss of this step is not finite
        self._overflow: torch.Tensor | None = None  # this step's flag once known; above 0 after an overflow
        self._scaler = torch.amp.GradScaler(
            device.type,
            enabled=self.enabled,
            init_scale=init_scale if self._scales else 1.0,
            growth_interval=growth_interval,
        )
        # torch's scaler makes its tensors at the first loss, but a rank without rows has no loss.
        self._scaler.scale(torch.zeros((), device=device))

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self._scaler.scale(loss)

    def check_loss(self, losses: torch.Tensor) -> None:
        """Makes all ranks skip this step if a loss is not finite; does not wait for the device.

        The gradients may still be finite, for example if the rows reach no parameter.
        """
        self._bad_loss += (~losses.isfinite()).any()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale; a second call in one step does nothing."""
        if not self.enabled or self._overflow is not None:
            return
        self._scaler.unscale_(optimizer)
        found: dict[Any, torch.Tensor] = self._scaler._found_inf_per_device(optimizer)
        # A rank with an empty gradient shard has no flag, but still takes part in `combine`.
        total = self._bad_loss.clone()
        for flag in found.values():
            total += flag.to(self._device)
        if self._combine is not None:
            total = self._combine(total)
        self._overflow = total[0]
        # `update` of torch's scaler reads this.
        found.clear()
        found[self._device] = self._overflow

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps the optimizer, unless the gradients overflowed."""
        if not self.enabled:
            optimizer.step()
            return
        self.unscale(optimizer)
        assert self._overflow is not None
        self.skipped = bool(self._overflow.item())
        if not self.skipped:
            optimizer.step()
            return
        self.skipped_steps += 1
        if self.current_scale <= MIN_SCALE:
            raise FloatingPointError(
                f"precision 'fp16' overflows at any loss scale: {self.skipped_steps} steps were skipped, and "
                f"the scale is down to {self.current_scale:g}; set precision='bf16', lower learningRate, or "
                "scale the features"
            )

    def update(self) -> None:
        if self.enabled:
            self._scaler.update(None if self._scales else 1.0)
            self._overflow = None
            self._bad_loss.zero_()

    @property
    def current_scale(self) -> float:
        """The factor of the gradients before `unscale`; waits for the device in fp16."""
        return self._scaler.get_scale() if self._scales else 1.0

    @property
    def advice(self) -> str:
        """Likely causes and remedies, to append to messages about a loss or gradient that is not finite."""
        found = ""
        if self._compression not in LOSSLESS:
            found = f"; or, as activationCompression={self._compression!r} rounds activations, set 'bits'"
        if self.skipped_steps and self._scales:
            found += f"; {self.skipped_steps} steps were skipped in fp16, which ends at 65504: set "
            found += "precision='bf16'"
        return found

    def check_trained(self, num_steps: int) -> None:
        """Raises FloatingPointError, on every rank, if all of `num_steps` steps were skipped."""
        if num_steps and self.skipped_steps == num_steps and not self._scales:
            raise FloatingPointError(
                f"onNonFinite 'skip' trains by the steps with finite loss and gradients, but none of "
                f"{num_steps} was finite; lower learningRate, or look for rows that are not finite"
                f"{self.advice}"
            )
        if num_steps and self.skipped_steps == num_steps:
            raise FloatingPointError(
                f"precision 'fp16' trains by the steps that do not overflow, but all {num_steps} did, at "
                f"loss scales down to {self.current_scale:g}; train for more steps, or set precision='bf16'"
            )

    def state_dict(self) -> dict[str, Any]:
        if not self.enabled:
            return {}
        scaling = self._scaler.state_dict() if self._scales else {}
        return {**scaling, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state; an empty one, from another precision, changes nothing."""
        if self.enabled and state:
            own = dict(state)
            self.skipped_steps = own.pop("skipped_steps")
            if self._scales and own:
                self._scaler.load_state_dict(own)
