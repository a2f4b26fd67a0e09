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
_LEFT_OUT = ("__pycache__",)
_SUFFIXES = (".py", ".typed", ".patch")


def write_wheel(folder: Path) -> Path:
    """Writes the wheel into `folder`, and returns its path. Equal sources make equal bytes."""
    name = f"ringspark-{ringspark.__version__}"
    path = folder / f"{name}-py3-none-any.whl"
    info = f"{name}.dist-info"
    content = dict(_sources())
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


def _sources() -> Iterator[tuple[str, bytes]]:
    # In a checkout the rooms lie outside of the package's folder, and in a wheel inside.
    for entry in _sorted(files("ringspark")):
        if entry.is_file() and entry.name.endswith(_SUFFIXES):
            yield f"ringspark/{entry.name}", entry.read_bytes()
    for room in _ROOMS:
        yield from _walk(files(f"ringspark.{room}"), f"ringspark/{room}")


def _walk(folder: Any, path: str) -> Iterator[tuple[str, bytes]]:
    for entry in _sorted(folder):
        if entry.is_dir() and entry.name not in _LEFT_OUT:
            yield from _walk(entry, f"{path}/{entry.name}")
        elif entry.is_file() and entry.name.endswith(_SUFFIXES):
            yield f"{path}/{entry.name}", entry.read_bytes()


def _sorted(folder: Any) -> list[Any]:
    return sorted(folder.iterdir(), key=lambda entry: entry.name)


def _metadata() -> str:
    try:
        text = distribution("ringspark").read_text("METADATA")
    except PackageNotFoundError:  # shipped as a zip
        text = None
    return text or f"Metadata-Version: 2.1\nName: ringspark\nVersion: {ringspark.__version__}\n"


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
