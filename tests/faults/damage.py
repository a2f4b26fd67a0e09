"""Damage to files on the local disk, as by a bad disk, a bad copy or a user."""

import os
import random
from pathlib import Path


def flip(path: Path, draw: random.Random) -> None:
    """Inverts one bit in place. The size does not change, and text stays ASCII."""
    position = draw.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << draw.randrange(7)]))


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def newest_checkpoint(run: Path) -> Path | None:
    """Returns the folder of the last committed checkpoint, or None."""
    folders = sorted(path.parent for path in run.glob("checkpoints/step-*/checkpoint.json"))
    return folders[-1] if folders else None
