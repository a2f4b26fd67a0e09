"""A proxy on loopback to the rendezvous, which replaces Horovod's HTTP key-value server.

Horovod's client has no authentication, so the proxy is open only while `hvd.init` runs, and only to sockets
of this process.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, TypeVar

from ringspark.estimators.collectives.rendezvous import own_sockets
from ringspark.estimators.collectives.rendezvous.channel import MAX_FRAME_BYTES
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.gloo_ports import PortGuard

# Horovod asks for a key every 10 ms until it exists; an answer that waits a little saves most requests.
_PATIENCE_SECONDS = 2.0
_HOST = "127.0.0.1"
P = TypeVar("P", bound="HorovodProxy")


class HorovodProxy(ThreadingTCPServer):
    """A context in which `address` and `port` answer Horovod's client in this process."""

    daemon_threads = True
    # A thread may still wait for a key.
    block_on_close = False
    request_queue_size = 16

    def __init__(self, client: RendezvousClient, addresses: list[str]) -> None:
        super().__init__((_HOST, 0), _Handler)
        self.client = client
        # After the proxy's own port is open, which the guard must not close.
        self.guard = PortGuard(addresses)
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
        """Does nothing, because the client retries and reports errors."""


class _Handler(BaseHTTPRequestHandler):
    server: HorovodProxy
    timeout = 30.0

    def do_GET(self) -> None:
        value = self.server.client.get(self.path, _PATIENCE_SECONDS)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if not 0 <= length <= MAX_FRAME_BYTES // 2:
            self._answer(413)
            return
        value = self.rfile.read(length)
        # The value may hold addresses of new ports.
        self.server.guard.restrict()
        self.server.client.set(self.path, value)
        self._answer(200)

    def do_DELETE(self) -> None:
        # The keys live as long as the gang.
        self._answer(200)

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...
