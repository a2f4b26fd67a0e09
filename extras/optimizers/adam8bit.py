"""Adam and AdamW with both moments in 8 bits (Dettmers et al. 2022): 2 bytes per weight instead of 8.

torchao (2026) needs a C++ compiler for the step, and refuses a schedule that sets rates as Python numbers.
bitsandbytes 0.50 cannot step on fake tensors, but the memory planner steps on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import torch

from ringspark.extras.optimizers.base import Batch, DenseOptimizer, TensorList

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
        self.zero = make_levels(signed).index(0.0)
        # The code of each of the 65,536 fp16 numbers: a look-up is ten times as fast as a search.
        halves = torch.arange(-(2**15), 2**15, device="cpu").to(torch.int16).view(torch.float16)
        codes = torch.bucketize(halves.float().nan_to_num(), (table[1:] + table[:-1]) / 2)
        self._levels, self._codes = table.to(device), codes.to(torch.uint8).to(device)

    def quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds values to codes and scales. Positive squares never become 0: Adam divides by them."""
        blocks = _split_blocks(values)
        scales = torch.linalg.vector_norm(blocks, torch.inf, dim=1)  # (blocks,)
        blocks = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        index = blocks.half().view(torch.int16).view(-1).int().add_(2**15)
        codes = self._codes.index_select(0, index)
        if not self._signed:
            codes = torch.maximum(codes, blocks.view(-1) > 0)
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

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        # Each rank quantizes its own shard of a DTensor.
        (own,) = TensorList([parameter]).local()
        size, state = own.numel(), {}
        for name in MOMENTS:
            if size < MIN_VALUES:
                state[name] = own.new_zeros(size, dtype=torch.float32)
            else:
                state[f"{name}_codes"] = own.new_zeros(size, dtype=torch.uint8)
                state[f"{name}_scales"] = own.new_zeros(num_blocks(size), dtype=torch.float32)
        return state

    def max_values(self, device: torch.device) -> int:
        return CUDA_CHUNK if device.type == "cuda" else CHUNK

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        weights, gradients = batch.parameters.local(), batch.gradients.local()
        if len(weights) == 1 and weights[0].is_contiguous():
            size = self.max_values(weights[0].device)
            for piece in _split_chunks(weights[0], gradients[0], batch, size):
                self._update(piece, group)
            return
        # Parameters with 8-bit moments come first.
        order = sorted(range(len(weights)), key=lambda i: "exp_avg" in batch.states[i])
        weights, gradients = (TensorList(own[i] for i in order) for own in (weights, gradients))
        self._update(Batch(batch.step, weights, gradients, [batch.states[i] for i in order]), group)

    def _update(self, batch: Batch, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        # Each parameter with 8-bit moments fills whole blocks.
        gaps = [-len(codes) % BLOCK_SIZE for codes in batch.state("exp_avg_codes")]
        weights, gradients = (_join(own, gaps).float() for own in (batch.parameters, batch.gradients))
        mean, square = (self._read(batch, name, gaps) for name in MOMENTS)
        if decay and group["decoupled"]:
            weights.mul_(1 - group["lr"] * decay)
        elif decay:
            gradients.add_(weights, alpha=decay)
        mean.lerp_(gradients, 1 - beta1)
        square.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        root = (square / (1 - beta2**batch.step)).sqrt_().add_(group["eps"])
        weights.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**batch.step))
        _split(weights, batch.parameters, gaps)
        self._write(batch, "exp_avg", gaps, mean)
        self._write(batch, "exp_avg_sq", gaps, square)

    def _read(self, batch: Batch, name: str, gaps: list[int]) -> torch.Tensor:
        codes, values = batch.state(f"{name}_codes"), batch.state(name)
        if codes:
            quantizer = self._quantizer(name, codes[0].device)
            scales = torch.cat(batch.state(f"{name}_scales"))
            values.insert(0, quantizer.dequantize(_join(codes, gaps, quantizer.zero), scales))
        return torch.cat(values)

    def _write(self, batch: Batch, name: str, gaps: list[int], moments: torch.Tensor) -> None:
        codes, scales, values = (batch.state(name + end) for end in ("_codes", "_scales", ""))
        num_coded = BLOCK_SIZE * sum(map(len, scales))
        if codes:
            new_codes, new_scales = self._quantizer(name, moments.device).quantize(moments[:num_coded])
            _split(new_codes, codes, gaps)
            _split(new_scales, scales)
        if values:
            _split(moments[num_coded:], values)

    def _quantizer(self, name: str, device: torch.device) -> Quantizer:
        # Not made in __init__, which torch does not call for a pickled or copied optimizer.
        made: dict[tuple[str, torch.device], Quantizer] = self.__dict__.setdefault("_quantizers", {})
        if (name, device) not in made:
            made[name, device] = Quantizer(MOMENTS[name], device)
        return made[name, device]


def _split_chunks(weights: torch.Tensor, gradients: torch.Tensor, batch: Batch, size: int) -> Iterator[Batch]:
    """Yields batches of views with up to `size` values of the only parameter."""
    state = {key: values for key, values in batch.states[0].items() if key != "step"}
    flat = weights.view(-1), gradients.reshape(-1)  # once: it may copy all gradients
    for start in range(0, weights.numel(), size):
        part = slice(start, min(start + size, weights.numel()))
        blocks = slice(part.start // BLOCK_SIZE, num_blocks(part.stop))
        views = {key: v[blocks if key.endswith("_scales") else part] for key, v in state.items()}
        own, change = (TensorList([values[part]]) for values in flat)
        yield Batch(batch.step, own, change, [views])


def _join(tensors: TensorList, gaps: list[int], fill: int = 0) -> torch.Tensor:
    """Joins flattened tensors; a gap of `fill` follows each of the first `len(gaps)` tensors."""
    flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
    if any(gaps):
        filled = flat[0].new_full((sum(gaps),), fill).split_with_sizes(gaps)
        flat[: len(gaps)] = chain.from_iterable(zip(flat, filled, strict=False))
    return torch.cat(flat)


def _split(flat: torch.Tensor, tensors: TensorList, gaps: Iterable[int] = ()) -> None:
    """Undoes `_join`: copies the values of `flat` into the tensors, without the gaps."""
    gaps = chain(gaps, repeat(0))
    sizes = [size for own, gap in zip(tensors, gaps, strict=False) for size in (own.numel(), gap)]
    parts = zip(flat.split_with_sizes(sizes)[::2], tensors, strict=True)
    tensors.copy_([part if own.dim() == 1 else part.view(own.shape) for part, own in parts])
