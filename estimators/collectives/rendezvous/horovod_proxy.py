"""A proxy on loopback to the rendezvous, which replaces Horovod's HTTP key-value server.

Horovod's client has no authentication, so the proxy is open only while `hvd.init` runs, and only to sockets
of this process. Each rank of a scope puts its addresses under its number, then gets those of each other rank.
The proxy exchanges them in one request per rank and scope.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, TypeVar

from ringspark.estimators.collectives.base import CollectiveError
from ringspark.estimators.collectives.rendezvous import own_sockets
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.gloo_ports import PortGuard
from ringspark.estimators.collectives.traffic import Member

# Gloo's address for one other rank: a sockaddr_storage and a number.
_ADDRESS_BYTES = 136
_HOST = "127.0.0.1"
P = TypeVar("P", bound="HorovodProxy")

_logger = logging.getLogger(__name__)


class HorovodProxy(ThreadingTCPServer):
    """A context in which `address` and `port` answer Horovod's client in this process."""

    daemon_threads = True
    # A thread may still wait for other ranks.
    block_on_close = False
    request_queue_size = 16

    def __init__(self, client: RendezvousClient, addresses: list[str], timeout_seconds: float) -> None:
        super().__init__((_HOST, 0), _Handler)
        self._client = client
        self._seconds = timeout_seconds
        # Scope -> each rank's address for this rank; number of times that this rank has put its own.
        self.found: dict[str, list[bytes]] = {}
        self._uses: Counter[str] = Counter()
        # After the proxy's own port is open, which the guard must not close.
        self._guard = PortGuard(addresses)
        self.address, self.port = _HOST, int(self.server_address[1])
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.02,), name="ringspark-proxy", daemon=True
        )

    def __enter__(self: P) -> P:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return own_sockets.is_ours(client_address, self.server_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if self._seconds and isinstance(error, CollectiveError):
            # Horovod tries again, then ends the process without the reason.
            _logger.error("%s", error)
            self._seconds = 0.0

    def exchange(self, scope: str, rank: int, addresses: bytes) -> None:
        """Sends each rank of a scope this rank's address for it. Waits for all ranks."""
        rows = [addresses[at : at + _ADDRESS_BYTES] for at in range(0, len(addresses), _ADDRESS_BYTES)]
        rows.insert(rank, bytes(_ADDRESS_BYTES))
        # The ports may be new.
        self._guard.restrict()
        # Numbered, because a process may start Horovod several times.
        self._uses[scope] += 1
        ranks = self._client.within(f"{scope}/{self._uses[scope]}", Member(rank=rank, size=len(rows)))
        self.found[scope] = ranks.all_to_all("addresses", rows, self._seconds)


class _Handler(BaseHTTPRequestHandler):
    server: HorovodProxy
    timeout = 30.0

    def do_GET(self) -> None:
        scope, _, rank = self.path.rpartition("/")
        if rank.isdigit():
            found = self.server.found[scope]
            # Gloo reads only this rank's place, which it computes from the length.
            self._answer(200, found[int(rank)] * (len(found) - 1))
        else:
            # The host of a rank, from which Gloo computes a local rank that it never uses.
            self._answer(404)

    def do_PUT(self) -> None:
        value = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        scope, _, rank = self.path.rpartition("/")
        if rank.isdigit() and value:
            self.server.exchange(scope, int(rank), value)
        self._answer(200)

    def do_DELETE(self) -> None:
        self._answer(200)

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...
