"""Stores that fail: an S3 server behind a proxy that breaks requests, and a small disk that is full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

PROXY = Path(__file__).resolve().parents[1] / "pipelines" / "faulty_proxy.py"


class Bucket:
    """moto's S3 server and the proxy before it, in a process of their own; see `faulty_proxy.Proxy`.

    Attributes:
        settings: What s3fs needs to reach it through the proxy.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, PROXY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ports = self._answer()
        self.settings: dict[str, Any] = {
            "key": "test",
            "secret": "test",
            "endpoint_url": f"http://127.0.0.1:{ports['proxy']}",
            "client_kwargs": {"region_name": "us-east-1"},
            "config_kwargs": {"read_timeout": 2, "connect_timeout": 2, "retries": {"max_attempts": 2}},
        }
        self._uploaded: set[str] = set()
        self._direct = f"http://127.0.0.1:{ports['moto']}"
        bucket = urllib.request.Request(f"{self._direct}/bucket", method="PUT")
        with urllib.request.urlopen(bucket) as response:
            assert response.status == 200

    @property
    def environment(self) -> dict[str, str]:
        """The settings as fsspec reads them in every process that inherits it."""
        return {"FSSPEC_S3": json.dumps(self.settings)}

    def upload(self, folder: Path, name: str) -> str:
        """Copies a folder into the bucket, past the proxy and once for each name; returns its URI."""
        uri = f"s3://bucket/{name}"
        if name in self._uploaded:
            return uri  # whoever is not the owner may not replace it
        for path in folder.rglob("*"):
            if path.is_file():
                key = quote(f"/bucket/{name}/{path.relative_to(folder)}")
                # urllib's own type is that of a form, which moto reads as one and then waits for the body.
                headers = {"Content-Type": "application/octet-stream"}
                url, data = f"{self._direct}{key}", path.read_bytes()
                request = urllib.request.Request(url, data, headers, method="PUT")
                urllib.request.urlopen(request, timeout=60).close()
        self._uploaded.add(name)
        return uri

    def tell(self, what: str, **arguments: Any) -> Any:
        """Sends a command to the proxy and returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=30)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def reason_not_to_mount() -> str | None:
    """Why a small disk cannot be made here; None where it can."""
    if os.geteuid() != 0:
        return "only root mounts a small disk"
    return None


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A tmpfs of that size at `folder`; OSError where this container may not mount."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "ringspark-faults", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"cannot mount a small disk: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Takes all the room that is left; returns the file that has it, whose removal gives it back."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for block in (1 << 16, 1 << 12, 1):  # down to the last byte: the files of a run are small
            with suppress(OSError):
                while file.write(bytes(block)):
                    pass
    return path
