"""A store slower than the timeout of the ranks, so waiting for it must count as progress."""

from __future__ import annotations

from typing import IO, Any

from fsspec.implementations.local import LocalFileSystem
from waiting import wait_for

from ringspark.estimators.launch.heartbeat import Pulse, read_beats


class SlowDisk(LocalFileSystem):
    """Accepts a block of weights only after every rank has reported progress since the previous block.

    The write thus outlasts every timeout for a rank that stops while the file is written.
    """

    protocol = "slow"
    pulse: Pulse
    waits = 0

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        return _Slow(file) if mode == "wb" and path.endswith("model.safetensors") else file


class _Slow:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._seen: dict[int, int] = {}
        self._count = 0

    def write(self, data: Any) -> int:
        self._count += 1
        # The header comes first, and nobody reports progress between it and the first block.
        if self._count > 2:
            wait_for("every rank to continue", self._all_went_on)
            SlowDisk.waits += 1
        self._seen = ticks()
        return self._file.write(data)

    def _all_went_on(self) -> bool:
        now = ticks()
        return len(now) == 2 and all(now[rank] > self._seen.get(rank, -1) for rank in now)

    def __enter__(self) -> _Slow:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()


def ticks() -> dict[int, int]:
    pulse = SlowDisk.pulse
    return {beat.rank: beat.ticks for beat in read_beats(pulse.run_uri, 2, pulse.token, pulse.launch)}
