"""Claims a run for a driver by `owner.json`, and writes notes into the run directory."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass

from ringspark.estimators import run_layout
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import parse_object, record

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Token of the driver that owns a run, and number of its earlier launches.

    `regroups`: whether the workers are to end at a checkpoint, because the next launch has more of them.
    """

    token: str
    launch: int
    regroups: bool = False


def write_owner(run_uri: str, token: str, launch: int, *, regroups: bool = False) -> None:
    """Claims the run before a start of the workers, so that rank 0 of an earlier owner ends (`heartbeat`)."""
    data = json.dumps(asdict(Owner(token=token, launch=launch, regroups=regroups))).encode()
    storage.write_atomic(storage.join(run_uri, run_layout.OWNER), data)


def read_owner(run_uri: str) -> Owner | None:
    try:
        return record(Owner, parse_object(storage.read_bytes(storage.join(run_uri, run_layout.OWNER))))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def write_note(run_uri: str, name: str, text: str) -> None:
    """Writes a file that only informs; if the store refuses it, the training continues without it."""
    try:
        storage.write_atomic(storage.join(run_uri, name), text.encode())
    except OSError as error:
        _logger.warning("%s was not written (%s); the training continues without it", name, error)
