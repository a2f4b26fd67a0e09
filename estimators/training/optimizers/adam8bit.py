"""Adam and AdamW with both moments in 8 bits (Dettmers et al. 2022): 2 bytes a weight instead of 8.

Moments are stored as codes and one scale per block of 256 values (see `quantization`). A step computes in
fp32, a part at a time, so that a large parameter needs no fp32 copy of its state. Parameters below 4,096
values keep fp32 moments, as in the authors' version: they cost little, and rounding harms biases and gains
most.

Libraries were compared in 2026: torchao needs the machine's compiler for the step and refuses rates that a
schedule writes as numbers; bitsandbytes 0.50 cannot step on fake tensors, by which memory is planned.
"""

from __future__ import annotations

from typing import Any

import torch

from ringspark.estimators.training.optimizers.base import DenseOptimizer, count_step
from ringspark.estimators.training.optimizers.quantization import BLOCK_SIZE, Quantizer, num_blocks

MIN_VALUES = 4096
# Number of values in fp32 at a time, whole blocks: few for a core's cache, many to keep a GPU busy.
CHUNK = 1 << 18
CUDA_CHUNK = 1 << 22

# Name of each moment -> whether it has a sign.
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}


class Adam8bit(DenseOptimizer):
    """Adam, whose weight decay is part of the gradient; AdamW if `decoupled`."""

    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": False}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state and its dtypes: torch casts all of it, also codes, to the parameter's dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for key in state:
                if key != "step":
                    state[key] = state[key].to(torch.uint8 if key.endswith("_codes") else torch.float32)

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        # Each rank quantizes the part of a DTensor that it holds.
        parameter, gradient = _local(parameter), _local(gradient)
        if not state:
            _allocate(parameter, state)
        step = count_step(state)
        chunk = CUDA_CHUNK if parameter.is_cuda else CHUNK
        weights = parameter.view(-1) if parameter.is_contiguous() else parameter.flatten()
        gradients = gradient.reshape(-1)
        for start in range(0, len(weights), chunk):
            part = slice(start, min(start + chunk, len(weights)))
            mean, square = (self._read(state, name, part) for name in MOMENTS)
            moved = _adam(weights[part].float(), gradients[part].float(), mean, square, step, group)
            weights[part].copy_(moved)
            self._write(state, "exp_avg", part, mean)
            self._write(state, "exp_avg_sq", part, square)
        if not parameter.is_contiguous():
            parameter.copy_(weights.view_as(parameter))

    def _quantizer(self, name: str, device: torch.device) -> Quantizer:
        # Not made in __init__, which torch does not call for a pickled or copied optimizer.
        made: dict[tuple[str, torch.device], Quantizer] = self.__dict__.setdefault("_quantizers", {})
        if (name, device) not in made:
            made[name, device] = Quantizer(MOMENTS[name], device)
        return made[name, device]

    def _read(self, state: dict[str, Any], name: str, part: slice) -> torch.Tensor:
        """Returns the moments of some weights in fp32; the caller may change them."""
        if name in state:
            moments: torch.Tensor = state[name][part]
            return moments
        codes, scales = state[f"{name}_codes"][part], state[f"{name}_scales"][_blocks_of(part)]
        return self._quantizer(name, codes.device).dequantize(codes, scales)

    def _write(self, state: dict[str, Any], name: str, part: slice, moments: torch.Tensor) -> None:
        if name in state:
            return  # changed in place
        codes, scales = self._quantizer(name, moments.device).quantize(moments)
        state[f"{name}_codes"][part] = codes
        state[f"{name}_scales"][_blocks_of(part)] = scales


def _allocate(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    size = parameter.numel()
    for name in MOMENTS:
        if size < MIN_VALUES:
            state[name] = parameter.new_zeros(size, dtype=torch.float32)
        else:
            state[f"{name}_codes"] = parameter.new_zeros(size, dtype=torch.uint8)
            state[f"{name}_scales"] = parameter.new_zeros(num_blocks(size), dtype=torch.float32)


def _blocks_of(part: slice) -> slice:
    return slice(part.start // BLOCK_SIZE, num_blocks(part.stop))


def _adam(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    step: int,
    group: dict[str, Any],
) -> torch.Tensor:
    """Takes one step of Adam over flat fp32 values; changes the moments in place, returns the new weights."""
    beta1, beta2 = group["betas"]
    decay = group["weight_decay"]
    if decay and group["decoupled"]:
        weights = weights * (1 - group["lr"] * decay)
    elif decay:
        gradients = gradients.add(weights, alpha=decay)
    mean.lerp_(gradients, 1 - beta1)
    square.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    return weights.addcdiv(mean, root, value=-group["lr"] / (1 - beta1**step))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor, known by its method: its class takes a second to import."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
