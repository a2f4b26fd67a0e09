"""Batches of shards as torch tensors, for training loops of your own.

`plan_epoch` guarantees three invariants. Per epoch, every row is in one batch of one rank. All ranks have the
same number of steps. The rows of a step depend neither on the number of ranks nor on where a pass resumes.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringspark.estimators.training.feed import ALIGNMENT, Array
from ringspark.pipelines import ShardManifest, open_reader
from ringspark.pipelines.manifest import Split
from ringspark.pipelines.readers import DEFAULT_CACHE_BYTES
from ringspark.pipelines.readers.base import ShardReader

Tensors = dict[str, torch.Tensor]

# Settings that determine the rows of a step; a state must have the same values.
_FIXED = ("seed", "shuffle", "batch_size", "data")


def to_dataloader(
    manifest: ShardManifest | str | os.PathLike[str],
    batch_size: int,
    *,
    split: Split | None = "train",
    columns: Sequence[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    device: str | torch.device | None = None,
    engine: str | None = None,
    cache: str | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> ShardLoader:
    """Returns an iterable over the batches of this rank; the reader's threads read ahead.

    Args:
        manifest: Manifest of shards or of an external table, or the folder that contains it.
        batch_size: Rows per step over all ranks, unlike in `torch.utils.data.DataLoader`.
        split: "train" or "validation"; None for all files.
        columns: Names of the columns to read; all by default.
        rank, world_size: Rank of this process, and number of processes that share each batch. By default from
            `torch.distributed`, else from the variables RANK and WORLD_SIZE, else 0 of 1.
        seed: Any whole number, equal on all ranks. The seed and the epoch determine the order of the rows.
        shuffle: False keeps the rows in the order of the files.
        device: Device of the tensors; a copy to a GPU goes through pinned memory. By default the CPU.
        engine, cache, cache_bytes: See `open_reader`.

    Raises:
        ValueError: The split has no rows, or an argument is wrong.
    """
    if not isinstance(manifest, ShardManifest):
        manifest = ShardManifest.load(manifest)
    selected = manifest if split is None else manifest.select(split)
    if not selected.num_rows:
        of_split = "" if split is None else f" of split {split!r}; choose another split"
        raise ValueError(f"the shards in {manifest.uri!r} have no rows{of_split}")
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size belong together; give both or none")
    if rank is None or world_size is None:
        rank, world_size = _own_rank()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1, got rank {rank} of {world_size}")
    reader = open_reader(
        selected,
        columns,
        shard=rank,
        num_shards=world_size,
        batch_size=batch_size,
        seed=seed,
        engine=engine,
        shuffle=shuffle,
        cache=cache,
        cache_bytes=cache_bytes,
    )
    return ShardLoader(reader, torch.device(device or "cpu"))


class ShardLoader:
    """Iterable over the batches of one rank: dicts of tensors by name, with the reader's dtypes.

    Each pass reads one epoch, and the next pass reads the next epoch. Only one pass can be active at a time.
    Call `close()` at the end, or use it as a context manager.

    Attributes:
        epoch: Epoch of the next batch.
        step: Step of the next batch within the epoch.
    """

    def __init__(self, reader: ShardReader, device: torch.device) -> None:
        self.epoch = 0
        self.step = 0
        self._reader, self._device = reader, device
        # Step at which the next pass starts, after `load_state_dict`.
        self._start = 0
        # Weak, so that a loop that breaks releases its pass and ends the reader's threads.
        self._active: weakref.ref[_Pass] | None = None
        files = [(file.path, file.sha256, file.state, file.row_groups) for file in reader.manifest.files]
        self._data = hashlib.sha256(repr(files).encode()).hexdigest()

    def __len__(self) -> int:
        """Returns the number of steps per epoch, which is the same on every rank."""
        return self._reader.num_steps

    def __iter__(self) -> _Pass:
        self._end_pass()
        self.step, self._start = self._start, 0
        started = _Pass(self)
        self._active = weakref.ref(started)
        return started

    @property
    def step_rows(self) -> int:
        """Number of rows over all ranks in the current step; the last step of an epoch may have fewer.

        With DistributedDataParallel, `losses.sum() * world_size / loader.step_rows` weights all rows equally.
        """
        size, rows, step = self._reader.batch_size, self._reader.manifest.num_rows, max(0, self.step - 1)
        assert isinstance(size, int)
        return min(size, rows - step * size) if self.step else size

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass. For the epoch of a loaded state, keeps the loaded step."""
        if epoch != self.epoch:
            self._reader.plan(epoch)  # refuses a value that is no epoch
            self._end_pass()
            self.epoch, self.step, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch, as a dict for JSON."""
        return {"epoch": self.epoch, "step": self._start or self.step, **self._fixed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the position of `state_dict()`; the number of ranks may have changed.

        Raises ValueError if the state is of other shards, or of another seed, shuffle or batch_size.
        """
        fixed = self._fixed()
        for name in _FIXED:
            if state.get(name) != fixed[name]:
                what = "is of other shards" if name == "data" else f"has {name}={state.get(name)!r}"
                given = "" if name == "data" else f", but this loader has {name}={fixed[name]!r}"
                raise ValueError(
                    f"the loader's state {what}{given}; open the loader as when the state was saved"
                )
        self._end_pass()
        self.epoch, self.step, self._start = state["epoch"], state["step"], state["step"]

    def close(self) -> None:
        """Ends the active pass with its threads, and releases the reader's memory."""
        self._end_pass()
        self._reader.close()

    def __enter__(self) -> ShardLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end_pass(self) -> None:
        active = None if self._active is None else self._active()
        self._active = None
        if active is not None:
            active.close()

    def _fixed(self) -> dict[str, Any]:
        reader = self._reader
        values = (reader.seed, reader.shuffle, reader.batch_size, self._data)
        return dict(zip(_FIXED, values, strict=True))

    def _batches(self) -> Generator[Tensors, None, None]:
        for batch in self._reader.batches(self.epoch, self.step):
            self.step += 1
            yield {name: _to_tensor(values, self._device) for name, values in batch.items()}
        self.epoch, self.step = self.epoch + 1, 0


class _Pass(Iterator[Tensors]):
    """One pass over an epoch. If another pass has started, raises RuntimeError instead of ending early."""

    def __init__(self, loader: ShardLoader) -> None:
        self._batches = loader._batches()
        self._was_ended = False

    def __next__(self) -> Tensors:
        if self._was_ended:
            raise RuntimeError(
                "the loader has started another pass or was closed; open a second loader to iterate twice at "
                "once"
            )
        return next(self._batches)

    def close(self) -> None:
        self._was_ended = True
        self._batches.close()


def _own_rank() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _to_tensor(values: Array, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    # Unaligned tensors change the rounding of a matrix product, and a resumed reader may cut its blocks at
    # other rows.
    tensor = tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
    return tensor.to(device)
