"""Gives a local file its name only if there is none of it: of several writers at once one succeeds."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

# A claim is held for two calls; its writer is dead if it is this much older than the file to be renamed.
_DEAD_CLAIM_SECONDS = 600.0


def rename_once(temporary: str, path: str) -> None:
    """Renames a local file if there is none of the new name; of several at once exactly one succeeds.

    Raises:
        FileExistsError: There is one, or another writer is about to put one there.
    """
    try:
        # Unlike a rename, a link does not replace an existing file.
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        # Mounts of object stores have no links. Here only the holder of the last claim may rename.
        claims = _claim(temporary, path)
        try:
            if os.path.exists(path):
                raise FileExistsError(errno.EEXIST, "exists", path) from None
            os.rename(temporary, path)
        finally:
            # Where there is no file yet, the claims of the dead must keep their places.
            for claim in claims if os.path.exists(path) else claims[-1:]:
                with suppress(OSError):
                    os.remove(claim)
    else:
        os.remove(temporary)


def _claim(temporary: str, path: str) -> list[str]:
    """Takes the sole right to put a file at `path`.

    Returns:
        The claims of writers that were killed while they held that right, and then the own one. A dead claim
        is never removed to take its place, since another writer may do the same: the next number is claimed.

    Raises:
        FileExistsError: Another writer has the right.
    """
    parent, name = os.path.split(path)
    claims: list[str] = []
    while True:
        number = f".{len(claims)}" if claims else ""
        claims.append(os.path.join(parent, f".{name}.claim{number}"))
        try:
            os.close(os.open(claims[-1], os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return claims
        except FileExistsError as held:
            # Both times are the file system's, whose clock may be another than this machine's.
            try:
                age = os.stat(temporary).st_mtime - os.stat(claims[-1]).st_mtime
            except FileNotFoundError:
                raise held from None
            if age < _DEAD_CLAIM_SECONDS:
                raise
