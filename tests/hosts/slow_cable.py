"""A cable between two interfaces that delays each packet: `slow_cable.py INTERFACE INTERFACE SECONDS`."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress

_ALL_PROTOCOLS = 0x0003
_SO_RCVBUFFORCE = 33
_SOL_PACKET, _PACKET_IGNORE_OUTGOING, _PACKET_VNET_HDR = 263, 23, 15
# Whole TCP segments that no hardware has split yet, each after a header with the offload information.
_LONGEST_PACKET = 1 << 17


def opened(interface: str) -> socket.socket:
    """Returns a socket that receives every packet of the interface, and can send any packet."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    packets.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    packets.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 25)
    packets.bind((interface, _ALL_PROTOCOLS))
    return packets


def carry(source: socket.socket, target: socket.socket, seconds: float) -> None:
    """Sends packets from `source` to `target` after the delay."""
    under_way: deque[tuple[float, bytes]] = deque()
    has_more = threading.Semaphore(0)

    def receive() -> None:
        while True:
            packet = source.recv(_LONGEST_PACKET)
            under_way.append((time.monotonic() + seconds, packet))
            has_more.release()

    threading.Thread(target=receive, daemon=True).start()
    while True:
        has_more.acquire()
        due, packet = under_way.popleft()
        time.sleep(max(0.0, due - time.monotonic()))
        # Undeliverable packets are lost, as on any cable.
        with suppress(OSError):
            target.send(packet)


def main() -> None:
    """Carries packets in both directions until it is killed; writes a line at the start."""
    one, other = opened(sys.argv[1]), opened(sys.argv[2])
    print("carrying", flush=True)
    seconds = float(sys.argv[3])
    threading.Thread(target=carry, args=(one, other, seconds), daemon=True).start()
    carry(other, one, seconds)


if __name__ == "__main__":
    main()
