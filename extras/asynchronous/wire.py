"""Messages between a worker and a server.

A message is its type (1 byte), the length of its header (4 bytes), the length of its payload (8 bytes), the
header and the payload.

The header is JSON, and the payload is the bytes of tensors, so nothing is unpickled. Peers authenticate
before the first message.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch

PUSH, PULL, VALUES, PROGRESS, FAILED = range(1, 6)

_HEAD = struct.Struct("!BIQ")
_MAX_HEADER_BYTES = 16 << 20
# Every tensor is aligned, so that its bytes can be read in place as any dtype.
_ALIGNMENT = 16


def send(
    connection: socket.socket, kind: int, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()
) -> int:
    """Sends one message with 1-D CPU tensors as its payload; returns the payload's number of bytes."""
    text = json.dumps(header).encode()
    ends = _ends([tensor.nbytes for tensor in tensors])
    total = ends[-1] if ends else 0
    connection.sendall(_HEAD.pack(kind, len(text), total) + text)
    if total:
        payload = torch.empty(total, dtype=torch.uint8)
        for tensor, end in zip(tensors, ends, strict=True):
            start = end - _pad(tensor.nbytes)
            payload[start : start + tensor.nbytes] = tensor.detach().contiguous().view(torch.uint8)
        connection.sendall(payload.numpy().data)
    return total


def receive(connection: socket.socket, most_bytes: int) -> tuple[int, dict[str, Any], torch.Tensor]:
    """Reads the next message; returns its type, header and payload (1-D uint8).

    Raises ConnectionError if the payload is longer than `most_bytes`.
    """
    kind, header_bytes, payload_bytes = _HEAD.unpack(_read(connection, _HEAD.size).numpy().tobytes())
    if header_bytes > _MAX_HEADER_BYTES or payload_bytes > most_bytes:
        raise ConnectionError(
            f"a message has a header of {header_bytes} bytes and a payload of {payload_bytes} bytes, but at "
            f"most {_MAX_HEADER_BYTES} and {most_bytes} bytes are allowed"
        )
    try:
        header = json.loads(_read(connection, header_bytes).numpy().tobytes())
    except ValueError as error:
        raise ConnectionError(f"a message has a damaged header ({error})") from None
    return kind, header, _read(connection, payload_bytes)


def split_payload(payload: torch.Tensor, like: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Splits a payload into tensors without a copy; `like` has each tensor's number of elements and dtype."""
    sizes = [number * dtype.itemsize for number, dtype in like]
    ends = _ends(sizes)
    expected = ends[-1] if ends else 0
    if expected != len(payload):
        raise ConnectionError(f"expected a payload of {expected} bytes, got {len(payload)}")
    return [
        payload[end - _pad(size) :][:size].view(dtype)
        for (_, dtype), size, end in zip(like, sizes, ends, strict=True)
    ]


def payload_bytes(like: Sequence[tuple[int, torch.dtype]]) -> int:
    return sum(_pad(number * dtype.itemsize) for number, dtype in like)


def _pad(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _ends(sizes: Sequence[int]) -> list[int]:
    ends, end = [], 0
    for size in sizes:
        end += _pad(size)
        ends.append(end)
    return ends


def _read(connection: socket.socket, num_bytes: int) -> torch.Tensor:
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    view = buffer.numpy().data
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the peer closed the connection")
        view = view[got:]
    return buffer
