"""Faults of the network between ranks, put into the ranks' own TCP connections.

Gloo connects every rank to every other by itself, on addresses it finds out by itself, so there is no
place for a proxy between them. The faults are the kernel's instead: `pidfd_getfd` (Linux 5.6) gives this
process a copy of a rank's socket, and

- `cut` resets the connection with RST, as a router does that has forgotten it;
- `drop` attaches a packet filter that takes no packet: silence, as behind a pulled cable;
- `heal` detaches it: the retransmissions get through, nothing is lost but time.

It needs the right to trace the rank (root, or its ancestor where /proc/sys/kernel/yama/ptrace_scope is 1).
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

Socket = socket.socket
_PIDFD_GETFD = 438  # the same number on every architecture
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_libc = ctypes.CDLL(None, use_errno=True)


def reason_not_to() -> str | None:
    """Why this machine cannot do it; None where it can."""
    try:
        with socket.socket() as own, _copies(os.getpid(), [own.fileno()]) as (copy,):
            _filter(copy, drops=True)
    except (OSError, AttributeError) as error:
        return f"sockets of other processes are out of reach: {error}"
    return None


@contextmanager
def between(pids: Sequence[int], of: int | None = None) -> Iterator[list[Socket]]:
    """Copies of both ends of all connections that join two of the processes; closed afterwards.

    Args:
        of: Only those of this process with the others.
    """
    ends: dict[tuple[object, object], tuple[int, int]] = {}
    for pid in pids:
        for c in psutil.Process(pid).net_connections("tcp"):
            if c.status == psutil.CONN_ESTABLISHED and c.fd >= 0:
                ends[(_plain(c.laddr), _plain(c.raddr))] = (pid, c.fd)
    joined = [
        end
        for (mine, other), end in ends.items()
        if (other, mine) in ends and (of is None or of in (end[0], ends[(other, mine)][0]))
    ]
    held: list[socket.socket] = []
    try:
        for pid, fd in joined:
            with _copies(pid, [fd]) as (copy,):
                held.append(socket.socket(fileno=os.dup(copy.fileno())))
        yield held
    finally:
        for one in held:
            one.close()


def cut(connections: Sequence[socket.socket]) -> None:
    """Resets them: both sides get an error at once."""
    for one in connections:
        # Connecting to "no address" makes the kernel send RST; Python has no name for it.
        address = struct.pack("=H14x", socket.AF_UNSPEC)
        _libc.connect(one.fileno(), address, len(address))
        # Which leaves this end without the end of stream that an RST from elsewhere brings, and Gloo waiting.
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def drop(connections: Sequence[socket.socket]) -> None:
    """No packet arrives any more; nobody is told."""
    for one in connections:
        _filter(one, drops=True)


def heal(connections: Sequence[socket.socket]) -> None:
    """Packets arrive again."""
    for one in connections:
        _filter(one, drops=False)


def _filter(one: socket.socket, *, drops: bool) -> None:
    if not drops:
        one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        return
    # One instruction of the classic packet filter, "return 0 bytes".
    program = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
    header = struct.pack("@HP", 1, ctypes.addressof(program))
    one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)


@contextmanager
def _copies(pid: int, fds: Sequence[int]) -> Iterator[list[socket.socket]]:
    handle = os.pidfd_open(pid)
    copies = []
    try:
        for fd in fds:
            copy = _libc.syscall(_PIDFD_GETFD, handle, fd, 0)
            if copy < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            copies.append(socket.socket(fileno=copy))
        yield copies
    finally:
        for copied in copies:
            copied.close()
        os.close(handle)


def _plain(address: object) -> tuple[str, int]:
    """IPv4 in IPv6 as IPv4: the two ends may see the same address differently."""
    ip, port = address  # type: ignore[misc]
    return str(ip).removeprefix("::ffff:"), int(port)
