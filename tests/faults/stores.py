"""Failing stores: an S3 server behind a proxy that breaks requests, and a small full disk."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from s3_server import S3Server


class Bucket(S3Server):
    def __init__(self) -> None:
        super().__init__({"read_timeout": 2, "connect_timeout": 2, "retries": {"max_attempts": 2}})
        self._uploaded: set[str] = set()

    @property
    def environment(self) -> dict[str, str]:
        """Returns the settings that fsspec reads in every process that inherits them."""
        return {"FSSPEC_S3": json.dumps(self.settings)}

    def upload(self, folder: Path, name: str) -> str:
        """Uploads a folder to the bucket, past the proxy and once per name. Returns its URI."""
        if name not in self._uploaded:  # only the owner may replace it
            for path in folder.rglob("*"):
                if path.is_file():
                    self.put(quote(f"/bucket/{name}/{path.relative_to(folder)}"), path.read_bytes())
            self._uploaded.add(name)
        return f"s3://bucket/{name}"


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mounts a tmpfs of this size at `folder`. Raises OSError if the container may not mount."""
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
    """Fills the disk. Returns the file, whose removal frees the space."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for block in (1 << 16, 1 << 12, 1):  # to the last byte, because the files of a run are small
            with suppress(OSError):
                while file.write(bytes(block)):
                    pass
    return path
