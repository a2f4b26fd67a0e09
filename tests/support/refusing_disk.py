"""A store that one worker may not write to, while the others may."""

from __future__ import annotations

from typing import Any

from fsspec.implementations.local import LocalFileSystem


class RefusingDisk(LocalFileSystem):
    """Takes no file of a checkpoint in a process that has set `refuses`."""

    protocol = "refusing"
    refuses = False

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if self.refuses and "w" in mode and "/checkpoints/" in path:
            raise PermissionError(f"{path} may not be written")
        return super().open(path, mode, **options)
