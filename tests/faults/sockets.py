"""Network faults between ranks, injected into their TCP connections.

Gloo connects every rank to every other one at addresses that it finds out, so no proxy fits between them.
Instead, `pidfd_getfd` (Linux 5.6) gives this process a copy of a rank's socket, and

- `cut` resets the connection with RST, like a router that has lost its state;
- `drop` attaches a packet filter that accepts no packet: silence, like an unplugged cable;
- `heal` detaches it: the retransmissions arrive, and only time is lost.

It needs permission to trace the rank (root, or an ancestor if /proc/sys/kernel/yama/ptrace_scope is 1).
"""

import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

Socket = socket.socket
_PIDFD_GETFD = 438  # same on all architectures
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_libc = ctypes.CDLL(None, use_errno=True)


def reason_not_to() -> str | None:
    """Returns why this machine cannot inject these faults, or None."""
    try:
        with socket.socket() as own, _copies(os.getpid(), [own.fileno()]) as (copy,):
            _filter(copy, drops=True)
    except (OSError, AttributeError) as error:
        return f"sockets of other processes are out of reach: {error}"
    return None


@contextmanager
def between(pids: Sequence[int], of: int | None = None) -> Iterator[list[Socket]]:
    """Yields copies of both ends of all connections between the processes; closes them afterwards.

    Args:
        of: Restricts to the connections of this process.
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
    """Resets the connections, so that both sides get an error at once."""
    for one in connections:
        # Connecting to "no address" makes the kernel send RST; Python has no constant for it.
        address = struct.pack("=H14x", socket.AF_UNSPEC)
        _libc.connect(one.fileno(), address, len(address))
        # This end does not get the end of stream that a remote RST causes, and Gloo would wait.
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def drop(connections: Sequence[socket.socket]) -> None:
    """Drops all incoming packets, without a message to anybody."""
    for one in connections:
        _filter(one, drops=True)


def heal(connections: Sequence[socket.socket]) -> None:
    """Lets packets arrive again."""
    for one in connections:
        _filter(one, drops=False)


def _filter(one: socket.socket, *, drops: bool) -> None:
    if not drops:
        one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        return
    # Returns one instruction of the classic packet filter, "return 0 bytes".
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
    """Returns IPv4-mapped IPv6 as IPv4, because the two ends may see the same address differently."""
    ip, port = address
    return str(ip).removeprefix("::ffff:"), int(port)
