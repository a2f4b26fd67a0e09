"""Claims a run for a driver: `owner.json`, written before each start of the workers.

Two gangs never write into one run directory for long: rank 0 of the older gang sees another token, or a later
launch, in the file and ends (`heartbeat`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ringspark.estimators import run_layout
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import parse_object, record


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The content of `owner.json`: token of the driver, and number of its earlier launches."""

    token: str
    launch: int


def write_owner(run_uri: str, token: str, launch: int) -> None:
    """Claims the run, so that ranks of other drivers and of earlier launches end. Runs on the driver."""
    data = json.dumps(asdict(Owner(token=token, launch=launch))).encode()
    storage.write_atomic(storage.join(run_uri, run_layout.OWNER), data)


def read_owner(run_uri: str) -> Owner | None:
    """Returns the present owner of the run, or None."""
    try:
        return record(Owner, parse_object(storage.read_bytes(storage.join(run_uri, run_layout.OWNER))))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
