"""Which driver works on a run: `owner.json`, written anew before each start of its workers.

Two gangs never write into one run directory for long: rank 0 of the older one sees that the file has
another token, or a later launch, and ends (`heartbeat`).
"""

from __future__ import annotations

import json
from typing import Any

from ringspark.estimators import run_layout
from ringspark.pipelines import storage


def write_owner(run_uri: str, token: str, launch: int) -> None:
    """Takes the run: ranks of other drivers, and of earlier launches, end. Runs on the driver."""
    data = json.dumps({"token": token, "launch": launch}).encode()
    storage.write_atomic(storage.join(run_uri, run_layout.OWNER), data)


def read_owner(run_uri: str) -> dict[str, Any] | None:
    """Token and launch of the driver that runs it now, None where there is none."""
    try:
        owner = json.loads(storage.read_bytes(storage.join(run_uri, run_layout.OWNER)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return None
    return owner if isinstance(owner, dict) and {"token", "launch"} <= owner.keys() else None
