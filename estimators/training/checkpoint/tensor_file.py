"""A state dict to and from a `.safetensors` file, without ever holding all of it in memory.

The safetensors library writes a file from copies of all tensors and returns when it is complete. Here
one tensor at a time goes out in blocks, to any open file: the peak is one block on the CPU and one
tensor where the weights lie on a GPU. The format (https://github.com/huggingface/safetensors): eight
bytes with the length of a JSON header, the header, the tensors end to end.

Reading maps the file: nothing is copied, pages come in as they are used, and all processes of a host
share them. The mapping is private, so that a module which changes a buffer changes its own copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ringspark.estimators.parallel.optimizer_state import whole

BLOCK_BYTES = 16 << 20

# Where the tensors start in the file: a multiple of what vector instructions like to load.
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


def check_state(state: Mapping[str, object]) -> None:
    """Refuses a state dict that no checkpoint can hold; cheap, so that it can be asked before a training.

    Raises:
        ValueError: Something in it is no dense tensor, or has a dtype that the format lacks.
    """
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"the model's state {name!r} is of type {type(tensor).__name__}, a checkpoint holds dense "
                "tensors only; keep it in a buffer rather than in get_extra_state"
            )
        if tensor.layout != torch.strided or tensor.is_meta:
            raise ValueError(
                f"the model's state {name!r} is no dense tensor and cannot be saved; keep its numbers in a "
                "dense buffer"
            )
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"the model's tensor {name!r} has dtype {tensor.dtype}, which a checkpoint cannot hold; "
                f"known are {', '.join(str(dtype).removeprefix('torch.') for dtype in _NAMES)}"
            )


def write(state: Mapping[str, torch.Tensor], file: IO[bytes]) -> int:
    """Writes the tensors, each under its own name also where two share memory.

    Returns:
        Bytes written.

    Raises:
        ValueError: As `check_state`.
    """
    check_state(state)
    names = ordered(state)
    header: dict[str, object] = {}
    end = 0
    for name in names:
        start, end = end, end + state[name].numel() * state[name].element_size()
        header[name] = {
            "dtype": _NAMES[state[name].dtype],
            "shape": list(state[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        for block in _blocks(state[name]):
            file.write(block)
    return 8 + len(text) + end


def assist(state: Mapping[str, torch.Tensor]) -> None:
    """Gives this rank's parts to the one that calls `write`; every other rank calls it with its own state.

    Only parts of tensors (`DTensor`) travel, one tensor at a time.

    Raises:
        ValueError: As `check_state`, so that no rank waits for the others.
    """
    check_state(state)
    for name in ordered(state):
        whole(state[name])


def ordered(state: Mapping[str, torch.Tensor]) -> list[str]:
    """The widest numbers first, so that each tensor starts at a multiple of its own width."""
    return sorted(state, key=lambda name: (-state[name].element_size(), name))


def read(path: str | Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The tensors of a local file; on the CPU they are views of the mapped file.

    Raises:
        ValueError: The file is not what `write` wrote.
    """
    try:
        return load_file(path, device=device)
    # The library checks lengths and offsets; dtypes that it knows and torch does not end in the others.
    except (SafetensorError, OSError, LookupError, TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            f"{path} is no readable safetensors file ({error}); take another checkpoint"
        ) from error


def _blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order."""
    all_of_it = whole(tensor)
    assert isinstance(all_of_it, torch.Tensor)
    flat = all_of_it.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return
    data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]
