"""Finds and filters the sockets of this process, including sockets of C++ libraries."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import resource
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

# On Linux, a classic BPF program attached to a socket sees each packet before the socket does.
_SO_ATTACH_FILTER = 26
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Base of offsets in the IP header.
_IP_HEADER = 0xFFF00000
# Bytes; the longest program has 4,096 instructions, and an address needs 2, an IPv6 address 8, plus a return.
_INSTRUCTION = 8
_LONGEST_PROGRAM = 4096 * _INSTRUCTION

# The rendezvous needs one socket per rank, and so does each process group that a library connects.
_SOCKETS_PER_RANK, _OTHER_FILES = 4, 256


def _sockets() -> Iterator[socket.socket]:
    """Yields a duplicate of each TCP socket of this process; closes it at the next iteration."""
    # Newest sockets first, because callers look for new ones among thousands.
    for name in sorted(os.listdir("/dev/fd"), key=int, reverse=True):
        # Another thread may close any socket meanwhile.
        with suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found


def allow_sockets(num_ranks: int) -> None:
    """Increases this process's limit of open files if a gang of `num_ranks` needs more."""
    needed = _SOCKETS_PER_RANK * num_ranks + _OTHER_FILES
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (limit, most) and most <= num_ranks:
        raise ValueError(
            f"{num_ranks} ranks need a connection each, but this process may open only {most} files; raise "
            f"the hard limit (ulimit -Hn) to at least {needed} on every host"
        )
    if limit != resource.RLIM_INFINITY and limit < needed:
        allowed = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def is_ours(local: Any, peer: Any) -> bool:
    """Whether a socket of this process has the local address `local` and the peer `peer`."""
    for found in _sockets():
        with suppress(OSError):
            if found.getsockname()[:2] == local[:2] and found.getpeername()[:2] == peer[:2]:
                return True
    return False


def listening() -> dict[int, tuple[Any, ...]]:
    result = {}
    for found in _sockets():
        with suppress(OSError):
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                result[os.fstat(found.fileno()).st_ino] = found.getsockname()
    return result


def admit_only(inodes: Collection[int], addresses: Collection[str]) -> None:
    """Lets only these addresses connect to the listening sockets `inodes`; an empty list admits nobody.

    A filter drops all other packets; accepted connections are not affected. Closing the sockets instead
    would make the library's thread, which waits for events on them, fail or spin. Works on Linux only.
    """
    if not sys.platform.startswith("linux"):
        return
    sources = [ipaddress.ip_address(address).packed for address in addresses]
    for found in _sockets():
        with suppress(OSError):
            if os.fstat(found.fileno()).st_ino not in inodes:
                continue
            program = _program(sources, *((12, 4) if found.family == socket.AF_INET else (8, 16)))
            if len(program) <= _LONGEST_PROGRAM:
                code = ctypes.create_string_buffer(program, len(program))
                option = struct.pack("@HP", len(program) // _INSTRUCTION, ctypes.addressof(code))
                found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _program(sources: Sequence[bytes], offset: int, length: int) -> bytes:
    """Makes a BPF program that accepts only packets from `sources`.

    Ignores sources whose address has not `length` bytes (4 for IPv4, 16 for IPv6). `offset` is the
    position of the source address in the IP header.
    """
    lines = []
    for source in (source for source in sources if len(source) == length):
        words = struct.unpack(f"!{length // 4}I", source)
        for number, word in enumerate(words):
            # If a word differs, skip the rest of this source.
            rest = 2 * (len(words) - number - 1) + 1
            lines.append(_line(_LOAD_WORD, _IP_HEADER + offset + 4 * number))
            lines.append(_line(_JUMP_IF_EQUAL, word, 0, rest))
        lines.append(_line(_RETURN, 0xFFFFFFFF))
    return b"".join([*lines, _line(_RETURN, 0)])


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Makes one instruction; `if_true` and `if_false` are numbers of instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
