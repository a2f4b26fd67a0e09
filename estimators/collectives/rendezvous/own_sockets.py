"""Finds and filters the sockets of this process, including those that a C++ library has opened."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

# On Linux, a classic BPF program attached to a socket sees each packet before the socket does.
_SO_ATTACH_FILTER = 26
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Offsets from here on count from the start of the IP header.
_IP_HEADER = 0xFFF00000
# A program has at most 4,096 instructions, and each address takes two.
_MAX_ADDRESSES = 2000


def _sockets() -> Iterator[socket.socket]:
    """Yields a duplicate of each TCP socket of this process; closes it when the next one is asked for."""
    for name in os.listdir("/dev/fd"):
        # Another thread may close any socket meanwhile.
        with suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found


def is_ours(local: Any, peer: Any) -> bool:
    """Whether a connection from the address `local` to the address `peer` starts in this process."""
    for found in _sockets():
        with suppress(OSError):
            if found.getsockname()[:2] == local[:2] and found.getpeername()[:2] == peer[:2]:
                return True
    return False


def listening() -> dict[int, tuple[Any, ...]]:
    """Returns inode -> address of each socket on which this process listens."""
    result = {}
    for found in _sockets():
        with suppress(OSError):
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                result[os.fstat(found.fileno()).st_ino] = found.getsockname()
    return result


def admit_only(inodes: Collection[int], addresses: Collection[str]) -> None:
    """Lets only these IPv4 addresses connect to the listening sockets `inodes`; without addresses, nobody.

    It does not close the sockets: their user, a library's thread, waits for events on them, and fails or
    spins if they are closed meanwhile. Instead a filter drops the packets of all others. Accepted
    connections are not affected. It works only on Linux, and with addresses only for IPv4 sockets;
    elsewhere it does nothing.
    """
    if not sys.platform.startswith("linux") or len(addresses) > _MAX_ADDRESSES:
        return
    program = _program(addresses)
    code = ctypes.create_string_buffer(program, len(program))
    option = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    for found in _sockets():
        with suppress(OSError):
            is_filtered = found.family == socket.AF_INET or not addresses
            if is_filtered and os.fstat(found.fileno()).st_ino in inodes:
                found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _program(addresses: Collection[str]) -> bytes:
    """Makes a classic BPF program that passes a packet if its source is one of the addresses."""
    lines = [struct.pack("=HBBI", _LOAD_WORD, 0, 0, _IP_HEADER + 12)] if addresses else []
    for address in addresses:
        (number,) = struct.unpack("!I", socket.inet_aton(address))
        lines.append(struct.pack("=HBBI", _JUMP_IF_EQUAL, 0, 1, number))
        lines.append(struct.pack("=HBBI", _RETURN, 0, 0, 0xFFFFFFFF))
    lines.append(struct.pack("=HBBI", _RETURN, 0, 0, 0))
    return b"".join(lines)
