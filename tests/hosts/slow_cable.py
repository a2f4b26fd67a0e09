"""A cable between two interfaces that holds back each packet: `slow_cable.py INTERFACE INTERFACE SECONDS`."""

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
# Whole segments of TCP that no hardware has cut yet, each behind a header which says how to.
_LONGEST_PACKET = 1 << 17


def opened(interface: str) -> socket.socket:
    """Returns a socket that gets every packet which comes to the interface, and can send any."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    packets.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    packets.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 25)
    packets.bind((interface, _ALL_PROTOCOLS))
    return packets


def carry(source: socket.socket, target: socket.socket, seconds: float) -> None:
    """Sends what comes from `source` to `target`, each packet that much later."""
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
        # As on any cable: what cannot be delivered is lost.
        with suppress(OSError):
            target.send(packet)


def main() -> None:
    """Carries both ways, until it is killed; writes a line when it begins."""
    one, other = opened(sys.argv[1]), opened(sys.argv[2])
    print("carrying", flush=True)
    seconds = float(sys.argv[3])
    threading.Thread(target=carry, args=(one, other, seconds), daemon=True).start()
    carry(other, one, seconds)


if __name__ == "__main__":
    main()
