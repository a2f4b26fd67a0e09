"""An S3 server, and a proxy in front of it that counts requests and fails like a network.

Each command is a line of JSON on standard input, and its answer is a line on standard output.
"""

import http.client
import json
import logging
import re
import socket
import struct
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler
from typing import Any

_ANSWERS = {
    "slow_down": (503, "SlowDown", "Please reduce your request rate."),
    "internal": (500, "InternalError", "We encountered an internal error. Please try again."),
    "forbidden": (403, "AccessDenied", "Access Denied"),
}


class Proxy:
    """Forwards connections to `upstream`, records requests, and injects faults."""

    def __init__(self, upstream: int, address: str) -> None:
        self.upstream = upstream
        self.address = address
        self.requests: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self.stalled = 0
        self.resume = threading.Event()
        # S3 decides a conditional write and makes it in one step; moto lets other requests in between.
        self.conditional = threading.Lock()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listener = self._listen(0)
        self.port = self._listener.getsockname()[1]

    def fault(self, kind: str, times: int = 1, pattern: str = "", skip: int = 0) -> None:
        """Breaks the next `times` requests whose "METHOD /path" has `pattern`, after `skip` of them."""
        self.resume.clear()
        with self._lock:
            self.faults.append({"kind": kind, "times": times, "pattern": pattern, "skip": skip})

    def clear(self) -> None:
        """Forgets requests and faults, and releases stalled answers."""
        with self._lock:
            self.faults.clear()
            self.requests.clear()
        self.resume.set()

    def refuse(self) -> None:
        """Closes the port and all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                connection.shutdown(socket.SHUT_RDWR)

    def accept(self) -> None:
        """Opens the port again."""
        self._listener = self._listen(self.port)

    def state(self) -> dict[str, Any]:
        """Returns the requests so far, the pending faults, and the number of stalled answers."""
        with self._lock:
            left = sum(fault["times"] for fault in self.faults)
            return {"requests": list(self.requests), "faults_left": left, "stalled": self.stalled}

    def record(self, method: str, path: str, byte_range: str | None) -> tuple[dict[str, Any], str | None]:
        """Records a request; returns its record and its fault."""
        note = {"method": method, "path": path, "range": byte_range, "sent": 0, "fault": None}
        with self._lock:
            self.requests.append(note)
            for fault in self.faults:
                if fault["times"] and re.search(fault["pattern"], f"{method} {path}"):
                    if fault["skip"]:
                        fault["skip"] -= 1
                        break
                    fault["times"] -= 1
                    note["fault"] = fault["kind"]
                    break
        return note, note["fault"]

    def stall(self) -> None:
        """Waits until `clear`."""
        with self._lock:
            self.stalled += 1
        self.resume.wait()
        with self._lock:
            self.stalled -= 1

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server((self.address, port), backlog=64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()

    def _serve(self, connection: socket.socket, address: Any) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            _Handler(connection, address, self)
        except OSError:
            pass  # the client closed the connection, or the proxy did
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    """One client connection, kept alive over many requests."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def forward(self) -> None:
        """Forwards a request and its answer, or fails as `fault` says."""
        assert "chunked" not in self.headers.get("Transfer-Encoding", "")
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        note, fault = self.server.record(self.command, self.path, self.headers.get("Range"))
        if fault == "reset_before":
            self._reset()
            return
        if fault == "stall_before":
            self.server.stall()
            self._reset()
        if fault in _ANSWERS:
            self._answer(*_ANSWERS[fault])
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream)
        try:
            headers = {name: value for name, value in self.headers.items() if name != "Expect"}
            with self.server.conditional if "If-None-Match" in headers else nullcontext():
                upstream.request(self.command, self.path, body=sent, headers=headers)
                response = upstream.getresponse()
                body = response.read()
            passed = [
                (name, value)
                for name, value in response.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "date", "server")
            ]
        finally:
            upstream.close()
        if fault == "lost_answer":
            self._reset()
            return
        self.send_response(response.status)
        for name, value in passed:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in passed):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is None:
            self.wfile.write(body)
            note["sent"] = len(body)
            return
        self.wfile.write(body[: len(body) // 2])
        note["sent"] = len(body) // 2
        if fault == "stall":
            self.server.stall()
        if fault == "short":
            self.close_connection = True  # a clean close, too early
            return
        self._reset()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815

    def log_message(self, *args: Any) -> None:
        """Silences the log, because standard error belongs to the tests."""

    def _reset(self) -> None:
        self.wfile.flush()
        # Closing with unsent data and no linger time sends the client a reset.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        raise ConnectionResetError

    def _answer(self, status: int, code: str, message: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def main() -> None:
    """Starts the server and the proxy, and runs the commands."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    _, upstream = moto.get_host_and_port()
    proxy = Proxy(upstream, sys.argv[1])
    first = http.client.HTTPConnection("127.0.0.1", upstream)
    first.request("PUT", "/bucket")
    assert first.getresponse().status == 200
    first.close()
    print(json.dumps({"moto": upstream, "proxy": proxy.port}), flush=True)
    commands = {name: getattr(proxy, name) for name in ("fault", "clear", "refuse", "accept", "state")}
    for line in sys.stdin:
        command = json.loads(line)
        answer = commands[command.pop("do")](**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
