"""moto's S3 server behind a proxy that breaks requests on command, in their own process."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any


class S3Server:
    """An S3 server with an empty bucket named `bucket`; see `faulty_proxy.Proxy`.

    Args:
        client: Options of botocore's client, e.g. timeouts and retries.
        address: Address to listen on.
        command: Returns the command line that runs a program on the server's machine.

    Attributes:
        settings: Settings for s3fs to use the proxy.
    """

    def __init__(
        self,
        client: dict[str, Any],
        address: str = "127.0.0.1",
        command: Callable[[list[str]], list[str]] = list,
    ) -> None:
        script = Path(__file__).with_name("faulty_proxy.py")
        words = command([sys.executable, str(script), address])
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ports = self._answer()
        self.settings: dict[str, Any] = {
            "key": "test",
            "secret": "test",
            "endpoint_url": f"http://{address}:{ports['proxy']}",
            "client_kwargs": {"region_name": "us-east-1"},
            "config_kwargs": client,
        }
        self._direct = f"http://127.0.0.1:{ports['moto']}"

    def put(self, path: str, data: bytes | None = None) -> None:
        """Sends a PUT directly to the server, without the proxy."""
        # urllib's default content type is a form; moto would parse it and then wait for the body.
        headers = {} if data is None else {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"{self._direct}{path}", data, headers, method="PUT")
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200

    def tell(self, what: str, **arguments: Any) -> Any:
        """Sends a command to the proxy and returns its answer."""
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=300)

    def _answer(self) -> Any:
        return json.loads(self._process.stdout.readline())
