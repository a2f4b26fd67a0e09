"""Adam and AdamW with both moments in 8 bits (Dettmers et al. 2022): 2 bytes per weight instead of 8.

torchao (2026) needs a C++ compiler for the step, and refuses a schedule that sets rates as Python numbers.
bitsandbytes 0.50 cannot step on fake tensors, but the memory planner steps on them.
"""

from __future__ import annotations

from typing import Any

import torch

from ringspark.estimators.training.optimizers.base import DenseOptimizer, count_step

BLOCK_SIZE = 256
DECADES = 7
# Smaller parameters keep fp32 moments, as in the authors' version: rounding harms biases and gains most.
MIN_VALUES = 4096
# Values in fp32 at a time, in whole blocks: few for a core's cache, many to keep a GPU busy.
CHUNK = 1 << 18
CUDA_CHUNK = 1 << 22

# Name of each moment -> whether it has a sign.
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}


def make_levels(signed: bool) -> list[float]:
    """Returns the 256 levels in ascending order; each decade has twice as many as the decade below."""
    positive = []
    for decade in range(DECADES):
        # Unsigned levels use the sign's bit for the fraction.
        count = 2**decade if signed else 2 ** (decade + 1)
        scale = 10.0 ** (decade - DECADES + 1)
        positive += [scale * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
    negative = [-value for value in positive] if signed else []
    return sorted([*negative, 0.0, *positive, 1.0])


def num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK_SIZE)


class Quantizer:
    """Converts 1-D fp32 values to codes (one byte each) and scales (fp32, one per block), and back.

    A value is divided by the largest magnitude of its block, and rounded to the nearest level.
    """

    def __init__(self, signed: bool, device: torch.device) -> None:
        self._signed = signed
        table = torch.tensor(make_levels(signed), dtype=torch.float32, device="cpu")
        # The code of each of the 65,536 fp16 numbers: a look-up is ten times as fast as a search.
        halves = torch.arange(-(2**15), 2**15, device="cpu").to(torch.int16).view(torch.float16)
        codes = torch.bucketize(halves.float().nan_to_num(), (table[1:] + table[:-1]) / 2)
        self._levels, self._codes = table.to(device), codes.to(torch.uint8).to(device)

    def quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds values to codes and scales. Positive squares never become 0: Adam divides by them."""
        blocks = _split_blocks(values)
        scales = blocks.abs().amax(1)  # (blocks,)
        blocks = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
        index = blocks.half().view(torch.int16).view(-1).int().add_(2**15)
        codes = self._codes.index_select(0, index)
        if not self._signed:
            codes.clamp_(min=1).mul_(blocks.view(-1) > 0)
        return codes[: len(values)], scales

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        values = self._levels.index_select(0, codes.int())
        return (_split_blocks(values) * scales[:, None]).view(-1)[: len(codes)]


def _split_blocks(values: torch.Tensor) -> torch.Tensor:
    """Reshapes to (blocks, BLOCK_SIZE); zeros fill the last block."""
    missing = num_blocks(len(values)) * BLOCK_SIZE - len(values)
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, BLOCK_SIZE)


class Adam8bit(DenseOptimizer):
    """Adam with weight decay in the gradient, or AdamW if `decoupled`."""

    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": False}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state in its own dtypes; torch alone would cast it to the parameter's dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for key in state:
                if key != "step":
                    state[key] = state[key].to(torch.uint8 if key.endswith("_codes") else torch.float32)

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        # Each rank quantizes its own shard of a DTensor.
        parameter, gradient = _local(parameter), _local(gradient)
        if not state:
            size = parameter.numel()
            for name in MOMENTS:
                if size < MIN_VALUES:
                    state[name] = parameter.new_zeros(size, dtype=torch.float32)
                else:
                    state[f"{name}_codes"] = parameter.new_zeros(size, dtype=torch.uint8)
                    state[f"{name}_scales"] = parameter.new_zeros(num_blocks(size), dtype=torch.float32)
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
    """Returns the weights after one Adam step over flat fp32 values; changes the moments in place."""
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
    # By its method, because to import the DTensor class takes a second.
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
