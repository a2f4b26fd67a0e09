"""An attacker, run as `stranger.py PID STOP_FILE SOURCE`: attacks every port of a process and its children.

It prints when it is ready, and at the end the number of accepted connections.
"""

import itertools
import os
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress

import psutil

HELD = 40
GARBAGE = bytes(range(256)) * 4
ATTACKS = {
    "garbage": GARBAGE,
    "http get": b"GET /global/0 HTTP/1.1\r\nHost: ringspark\r\n\r\n",
    "http put": b"PUT /global/0 HTTP/1.1\r\nHost: ringspark\r\nContent-Length: 5\r\n\r\nwrong",
    # TCPStore: the query type VALIDATE with its magic number, then SET of a key.
    "torch store": struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<BQ", 1, 3) + b"abc",
    # Ringspark's: a random number, rank 1, and a signature made without the secret.
    "wrong mark": b"\x01" * 32 + struct.pack("!I", 1) + b"\x02" * 32,
    # Gloo: the number of a pair, which a real peer would send first.
    "gloo number": struct.pack("<q", 1),
    "huge length": struct.pack("!I", 0xFFFFFFFF) + b"\xff" * 64,
    "nothing": b"",
}


def main(pid: int, stop_file: str, source: str) -> None:
    attacks = itertools.cycle(ATTACKS.values())
    held: deque[socket.socket] = deque()
    reached = 0
    print("ready", flush=True)
    while not os.path.exists(stop_file):
        for address in _ports(pid):
            try:
                connection = socket.create_connection(address, timeout=0.2, source_address=(source, 0))
            except OSError:
                continue
            reached += 1
            with suppress(OSError):
                connection.sendall(next(attacks))
            # Keep most connections open: a server that waits for them would hang.
            held.append(connection)
            if len(held) > HELD:
                held.popleft().close()
        time.sleep(0.002)
    print(reached)


def _ports(pid: int) -> list[tuple[str, int]]:
    found = []
    with suppress(psutil.Error):
        gang = psutil.Process(pid)
        for process in [gang, *gang.children(recursive=True)]:
            if process.pid == os.getpid():
                continue
            with suppress(psutil.Error):
                found += [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return [(address.ip, address.port) for address in found]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
