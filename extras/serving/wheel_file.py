"""Makes a wheel of the running ringspark, which is stored in the logged model.

This needs no build: a wheel of pure Python is a zip of the sources and four files of metadata.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import Any

import ringspark

_ROOMS = ("pipelines", "models", "estimators", "extras", "jobs")
_SUFFIXES = (".py", ".typed")


def write_wheel(folder: Path) -> Path:
    """Writes the wheel into `folder`, and returns its path. Equal sources make equal bytes."""
    name = f"ringspark-{ringspark.__version__}"
    path = folder / f"{name}-py3-none-any.whl"
    info = f"{name}.dist-info"
    content = dict(list_sources())
    content[f"{info}/METADATA"] = _metadata().encode()
    content[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: ringspark\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    content[f"{info}/entry_points.txt"] = b"[console_scripts]\nringspark = ringspark.jobs.command:main\n"
    lines = [f"{file},{_digest(data)},{len(data)}" for file, data in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in content.items():
            archive.writestr(zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return path


def list_sources() -> Iterator[tuple[str, bytes]]:
    """Yields path and content of each source file of ringspark, always in the same order."""
    # In a checkout the rooms lie outside of the package's folder, and in a wheel inside.
    yield from _walk(files("ringspark"), "ringspark", is_deep=False)
    for room in _ROOMS:
        yield from _walk(files(f"ringspark.{room}"), f"ringspark/{room}")


def _walk(folder: Any, path: str, *, is_deep: bool = True) -> Iterator[tuple[str, bytes]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = f"{path}/{entry.name}"
        if is_deep and entry.is_dir() and entry.name != "__pycache__":
            yield from _walk(entry, name)
        elif entry.is_file() and name.endswith(_SUFFIXES):
            yield name, entry.read_bytes()


def _metadata() -> str:
    try:
        text = distribution("ringspark").read_text("METADATA")
    except PackageNotFoundError:  # shipped as a zip
        text = None
    return text or f"Metadata-Version: 2.1\nName: ringspark\nVersion: {ringspark.__version__}\n"


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
