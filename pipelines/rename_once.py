"""Renames a local file only if the new name is free. Of several concurrent writers, exactly one succeeds."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

# A claim lasts for two calls; its writer is dead if it is this much older than the file to rename.
_DEAD_CLAIM_SECONDS = 600.0


def rename_once(temporary: str, path: str) -> None:
    """Renames a local file. Raises FileExistsError if the new name exists, or if another writer claims it."""
    try:
        # Unlike a rename, a link does not replace an existing file.
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        # Mounts of object stores have no links. There, only the holder of the last claim may rename.
        claims = _claim(temporary, path)
        try:
            if os.path.exists(path):
                raise FileExistsError(errno.EEXIST, "exists", path) from None
            os.rename(temporary, path)
        finally:
            # While there is no file, the claims of dead writers must stay.
            for claim in claims if os.path.exists(path) else claims[-1:]:
                with suppress(OSError):
                    os.remove(claim)
    else:
        os.remove(temporary)


def _claim(temporary: str, path: str) -> list[str]:
    """Creates a claim file: only the writer with the last claim file may create `path`.

    Raises FileExistsError if a claim file belongs to a writer that may be alive. Returns the claim files of
    killed writers, and finally the new one. The claim file of a killed writer is not replaced, because two
    writers might replace it at the same time. Instead a claim file with the next number is created.
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
            # Both times are from the file system, whose clock may differ from the clock of this machine.
            try:
                age = os.stat(temporary).st_mtime - os.stat(claims[-1]).st_mtime
            except FileNotFoundError:
                raise held from None
            if age < _DEAD_CLAIM_SECONDS:
                raise
