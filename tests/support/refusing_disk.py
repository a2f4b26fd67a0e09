"""A store that refuses the writes of one worker."""

from typing import Any

from fsspec.implementations.local import LocalFileSystem


class RefusingDisk(LocalFileSystem):
    """Refuses checkpoint files in a process that has set `refuses`."""

    protocol = "refusing"
    refuses = False

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if self.refuses and "w" in mode and "/checkpoints/" in path:
            raise PermissionError(f"{path} may not be written")
        return super().open(path, mode, **options)
