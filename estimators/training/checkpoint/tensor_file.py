"""Writes and reads a state dict as a `.safetensors` file without holding all of it in memory.

The safetensors library writes to a local path, or returns the bytes of the whole file. Here one tensor at a
time is written in blocks, to any open file, such as one in an object store: the peak is one block on the
CPU, or one tensor if the weights are on a GPU. The
format (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the
header, the tensors end to end.

Reading maps the file: nothing is copied, pages are loaded when they are used, and all processes of a host
share them. The mapping is private, so a module that changes a buffer changes its own copy.
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

from ringspark.estimators.parallel.optimizer_state import whole
from ringspark.estimators.training.checkpoint.solo import Solo
from ringspark.pipelines.typed_json import parse_object

BLOCK_BYTES = 16 << 20

# Longer headers are refused, as by the library.
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
    """Refuses a state dict that no checkpoint can hold; cheap enough to run before a training.

    Raises:
        ValueError: A value is no dense tensor, or has a dtype that the format lacks.
    """
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
                f"known are {', '.join(str(dtype).removeprefix('torch.') for dtype in _NAMES)}"
            )


def write(state: Mapping[str, torch.Tensor], file: IO[bytes], solo: Solo | None = None) -> int:
    """Writes the tensors, each under its own name, even if two share memory.

    Args:
        solo: Lets the ranks wait that run `assist`.

    Returns:
        The number of bytes written.

    Raises:
        ValueError: Like `check_state`.
    """
    check_state(state)
    header, _ = header_of(state)
    file.write(header)
    has_parts = _has_parts(state)
    for name in ordered(state):
        for block in _blocks(state[name]):
            file.write(block)
            if solo is not None:
                solo.progress()
        if solo is not None and has_parts:
            solo.end()
    return len(header) + sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def header_of(state: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Returns what a file begins with, and the byte at which each tensor starts.

    Args:
        state: Dtypes and shapes count alone, so the tensors may be on the device "meta".
    """
    entries: dict[str, object] = {}
    starts: dict[str, int] = {}
    end = 0
    for name in ordered(state):
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


def assist(state: Mapping[str, torch.Tensor], solo: Solo | None = None) -> None:
    """Sends this rank's parts of tensors to the rank that calls `write`; all other ranks call this.

    Only parts of tensors (`DTensor`) travel, one tensor at a time.

    Raises:
        ValueError: Like `check_state`, so that no rank waits for the others.
    """
    check_state(state)
    has_parts = _has_parts(state)
    for name in ordered(state):
        whole(state[name])
        # After each tensor, also a whole one: a rank that sent its next part would not hear of progress.
        if solo is not None and has_parts:
            solo.end()


def _has_parts(state: Mapping[str, torch.Tensor]) -> bool:
    return any(hasattr(tensor, "full_tensor") for tensor in state.values())


def ordered(state: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names by falling width of their numbers: each tensor starts at a multiple of its width."""
    return sorted(state, key=lambda name: (-state[name].element_size(), name))


def read_header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Reads the header from the beginning of a file, and nothing behind it.

    Returns:
        Tensor -> its "dtype", "shape" and "data_offsets", unchecked; and the byte at which tensors begin.

    Raises:
        ValueError: It is no header.
    """
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if length <= _MAX_HEADER else b""
    if len(text) != length:
        raise ValueError("it ends within its header")
    entries = parse_object(text)
    entries.pop("__metadata__", None)
    return entries, 8 + length


def read(path: str | Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Returns the tensors of a local file; on the CPU they are views of the mapped file.

    Raises:
        ValueError: The file is not what `write` wrote.
        MemoryError: This process may not map as much.
    """
    try:
        return load_file(path, device=device)
    except (OSError, RuntimeError, MemoryError) as error:
        if "Cannot allocate memory" in str(error):
            raise MemoryError(
                f"{path} has {os.path.getsize(path):,} bytes, which this process may not map ({error}); give "
                "it more memory, see spark.executor.pyspark.memory, or let transform map one tensor at a "
                "time by inferenceOffload='disk'"
            ) from error
        if isinstance(error, OSError):
            raise _unreadable(path, error) from error
        raise
    # The library checks lengths and offsets; the other errors come from dtypes that torch lacks.
    except (SafetensorError, LookupError, TypeError, OverflowError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is no readable safetensors file ({error}); take another checkpoint")


def _blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields the tensor's bytes in row-major order."""
    all_of_it = whole(tensor)
    assert isinstance(all_of_it, torch.Tensor)
    flat = all_of_it.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return
    data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]
