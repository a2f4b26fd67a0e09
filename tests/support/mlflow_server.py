"""An MLflow server in its own process, on a loopback port: of tracking with SQLite, or of a model."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import wait_for


class MlflowServer:
    """Starts a command of MLflow and waits until it answers at `path`, some 30 s.

    Attributes:
        uri: Address of the server.
        database: Address of its database, readable without the server.
    """

    def __init__(self, folder: Path, command: Sequence[str], path: str, environment: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.uri, self._path = f"http://127.0.0.1:{port}", path
        self.database = f"sqlite:///{folder}/mlflow.db"
        place = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        self._log = (folder / "server.log").open("wb")
        # The command starts server processes, so it gets its own process group.
        self._process = subprocess.Popen(
            [*command, *place],
            cwd=folder,
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_for(f"MLflow at {self.uri}", self._is_up)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends the server processes at once; a second call does nothing."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=300)
            self._log.close()

    def _is_up(self) -> bool:
        assert self._process.poll() is None, "the server has ended; see server.log"
        try:
            with urllib.request.urlopen(f"{self.uri}/{self._path}", timeout=60) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def mlflow_server(
    folder: Path, command: Sequence[str] = (), path: str = "health", environment: Any = None
) -> Iterator[MlflowServer]:
    """Runs a server inside the context; that of tracking without a `command`."""
    folder.mkdir(parents=True, exist_ok=True)
    stores = f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts")
    tracking = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", *stores]
    server = MlflowServer(folder, command or tracking, path, environment)
    try:
        yield server
    finally:
        server.kill()
