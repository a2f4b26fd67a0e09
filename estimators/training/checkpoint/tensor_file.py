"""Writes and reads a state dict as a `.safetensors` file without holding all of it in memory.

The safetensors library returns the bytes of a whole file; this module writes blocks to any open file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ringspark.estimators.parallel.optimizer_state import gather_value
from ringspark.estimators.training.checkpoint.rank_zero import RankZeroSection
from ringspark.pipelines.typed_json import parse_object

BLOCK_BYTES = 16 << 20

# The limit of the safetensors library.
_MAX_HEADER = 100_000_000

# The tensors start at a multiple of this many bytes, the width of vector loads.
_ALIGNMENT = 64

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def check_state(state: Mapping[str, object]) -> None:
    """Raises ValueError if a checkpoint cannot hold the state dict."""
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"the model's state {name!r} is of type {type(tensor).__name__}, a checkpoint holds dense "
                "tensors only; keep it in a buffer rather than in get_extra_state"
            )
        if tensor.layout != torch.strided or (tensor.is_meta and not hasattr(tensor, "full_tensor")):
            raise ValueError(
                f"the model's state {name!r} is no dense tensor and cannot be saved; keep its numbers in a "
                "dense buffer"
            )
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"the model's tensor {name!r} has dtype {tensor.dtype}, which a checkpoint cannot hold; "
                f"convert it to one of {', '.join(str(dtype).removeprefix('torch.') for dtype in _NAMES)}"
            )


def write(
    state: Mapping[str, torch.Tensor], file: IO[bytes] | None, section: RankZeroSection | None = None
) -> int:
    """Writes one tensor per name; returns the number of bytes. `section` tells other ranks of progress.

    If tensors are `DTensor`s, every other rank calls this without a file, to send its shards.
    """
    check_state(state)
    header, _ = make_header(state)
    is_sharded = any(hasattr(tensor, "full_tensor") for tensor in state.values())
    if file is not None:
        file.write(header)
    for name in order_names(state):
        whole = gather_value(state[name])
        if file is not None:
            for block in _blocks(whole):
                file.write(block)
                if section is not None:
                    section.progress()
        # After every tensor, whole ones too: a rank that sent its next shard would not hear of progress.
        if section is not None and is_sharded:
            section.end()
    return len(header) + sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def make_header(state: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Returns the beginning of a file and the start byte of each tensor; tensors may be on "meta"."""
    entries: dict[str, object] = {}
    starts: dict[str, int] = {}
    end = 0
    for name in order_names(state):
        start, end = end, end + state[name].numel() * state[name].element_size()
        entries[name] = {
            "dtype": _NAMES[state[name].dtype],
            "shape": list(state[name].shape),
            "data_offsets": [start, end],
        }
        starts[name] = start
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def order_names(state: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names by falling element size, so that each tensor is aligned to its elements."""
    return sorted(state, key=lambda name: (-state[name].element_size(), name))


def read_header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Reads the header of a file: the unchecked entries by tensor, and the first byte of the tensors."""
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if length <= _MAX_HEADER else b""
    if len(text) != length:
        raise ValueError("it ends within its header")
    entries = parse_object(text)
    entries.pop("__metadata__", None)
    return entries, 8 + length


def read(path: str | Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Returns the tensors of a local file; on the CPU they are views of the mapped file."""
    try:
        return load_file(path, device=device)
    except Exception as error:
        if "Cannot allocate memory" in str(error):
            raise MemoryError(
                f"{path} has {os.path.getsize(path):,} bytes, which this process may not map ({error}); give "
                "it more memory, see spark.executor.pyspark.memory, or let transform map one tensor at a "
                "time with inferenceOffload='disk'"
            ) from error
        # The library checks lengths and offsets; the other errors come from dtypes that torch lacks.
        if isinstance(error, (OSError, SafetensorError, LookupError, TypeError, OverflowError, ValueError)):
            raise ValueError(
                f"{path} is no readable safetensors file ({error}); use another checkpoint"
            ) from error
        raise


def _blocks(tensor: Any) -> Iterator[memoryview]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return
    data = memoryview(flat.view(torch.uint8).numpy())
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]
