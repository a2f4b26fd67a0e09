"""Reads and writes Thrift's compact protocol, the format of Parquet footers, page headers and page indexes.

A struct is a dict from field number to (wire type, value), so fields of unknown meaning can be written again.
"""

from __future__ import annotations

import struct
from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

Struct = dict[int, tuple[int, Any]]

_MAX_DEPTH = 32


class ThriftError(ValueError):
    """The bytes are not a struct in the compact protocol, or they end too early."""


def read_struct(data: bytes, start: int = 0) -> tuple[Struct, int]:
    """Returns the struct that begins at `start`, and the offset after its end, or raises ThriftError."""
    try:
        return _read_struct(data, start, 0)
    except (IndexError, struct.error, OverflowError) as error:
        raise ThriftError("its Thrift data end too early") from error


def write_struct(fields: Struct) -> bytes:
    out = bytearray()
    _write_struct(out, fields)
    return bytes(out)


def _read_struct(data: bytes, at: int, depth: int) -> tuple[Struct, int]:
    if depth > _MAX_DEPTH:
        raise ThriftError("its Thrift data are nested too deeply")
    fields: Struct = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return fields, at
        kind, delta = head & 15, head >> 4
        if delta:
            number += delta
        else:
            zigzag, at = _read_varint(data, at)
            number = _signed(zigzag)
        if kind in (TRUE, FALSE):
            fields[number] = kind, kind == TRUE
            continue
        value, at = _read_value(data, at, kind, depth)
        fields[number] = kind, value


def _read_value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (TRUE, FALSE):  # in a list, a boolean has a byte
        return data[at] == TRUE, at + 1
    if kind == BYTE:
        return data[at], at + 1
    if kind in (I16, I32, I64):
        zigzag, at = _read_varint(data, at)
        return _signed(zigzag), at
    if kind == DOUBLE:
        return struct.unpack_from("<d", data, at)[0], at + 8
    if kind == BINARY:
        size, at = _read_varint(data, at)
        if at + size > len(data):
            raise IndexError
        return data[at : at + size], at + size
    if kind in (LIST, SET):
        return _read_list(data, at, depth)
    if kind == STRUCT:
        return _read_struct(data, at, depth + 1)
    raise ThriftError(f"its Thrift data hold an unknown type {kind}")  # Parquet has no maps


def _read_list(data: bytes, at: int, depth: int) -> tuple[tuple[int, list[Any]], int]:
    head = data[at]
    at += 1
    kind, size = head & 15, head >> 4
    if size == 15:
        size, at = _read_varint(data, at)
    if size > len(data):  # every element takes a byte
        raise IndexError
    values = []
    for _ in range(size):
        value, at = _read_value(data, at, kind, depth + 1)
        values.append(value)
    return (kind, values), at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ThriftError("its Thrift data hold a number of more than 64 bits")


def _signed(zigzag: int) -> int:
    return (zigzag >> 1) ^ -(zigzag & 1)


def _write_struct(out: bytearray, fields: Struct) -> None:
    last = 0
    for number, (kind, value) in sorted(fields.items()):
        code = (TRUE if value else FALSE) if kind in (TRUE, FALSE) else kind
        if 0 < number - last < 16:
            out.append((number - last) << 4 | code)
        else:
            out.append(code)
            _write_varint(out, number << 1)
        if kind not in (TRUE, FALSE):
            _write_value(out, kind, value)
        last = number
    out.append(0)


def _write_value(out: bytearray, kind: int, value: Any) -> None:
    if kind in (TRUE, FALSE):
        out.append(TRUE if value else FALSE)
    elif kind == BYTE:
        out.append(value)
    elif kind in (I16, I32, I64):
        _write_varint(out, (value << 1) ^ (value >> 63))
    elif kind == DOUBLE:
        out += struct.pack("<d", value)
    elif kind == BINARY:
        _write_varint(out, len(value))
        out += value
    elif kind in (LIST, SET):
        inner, values = value
        if len(values) < 15:
            out.append(len(values) << 4 | inner)
        else:
            out.append(0xF0 | inner)
            _write_varint(out, len(values))
        for item in values:
            _write_value(out, inner, item)
    else:
        _write_struct(out, value)


def _write_varint(out: bytearray, value: int) -> None:
    value &= (1 << 64) - 1
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
