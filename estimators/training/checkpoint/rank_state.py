"""Each rank's own state in a checkpoint: random numbers, buffers, sums of the epoch, exchange, callbacks.

Rank 0 gathers the states of all ranks for a checkpoint, in a temporary file unless they are small.

If the number of ranks is unchanged, each restores its own state bitwise. If not, rank 0 takes all sums of
the epoch so far, every rank takes rank 0's buffers and callbacks, and random numbers get new seeds.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes, num_bytes
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.objective.metric_set import section
from ringspark.estimators.training.running import Running
from ringspark.models.generators import get_generator_state, seed_rank, set_generator_state

# States of up to this many bytes together travel in one message, and stay in memory.
_SMALL_BYTES = 1 << 20


class LazyTensors(Mapping[str, torch.Tensor]):
    """Reads each tensor at its access, so that a rank holds only one of them at a time."""

    def __init__(self, read: Callable[[str], torch.Tensor], names: Mapping[str, str]) -> None:
        """Stores the source.

        Args:
            read: Reads a tensor by its stored name.
            names: Key of this mapping -> stored name.
        """
        self._read, self._names = read, names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank's state: tensors on the CPU, and JSON values."""

    tensors: Mapping[str, torch.Tensor]
    values: dict[str, Any]

    @classmethod
    def of(cls, running: Running, mesh: RankMesh) -> RankState:
        """Copies the present state. Runs on every rank.

        Raises:
            ValueError: A callback's state has no JSON form.
        """
        # First, because a strategy may end an exchange for it, which changes the network.
        exchange = {f"exchange/{name}": tensor for name, tensor in running.sync.rank_state().items()}
        tensors, plain = get_generator_state(running.device)
        result = {f"random/{name}": tensor for name, tensor in tensors.items()}
        for name, buffer in running.sync.network.named_buffers():
            result[f"buffers/{name}"] = buffer.detach().to("cpu", copy=True).contiguous()
        values = {
            "random": plain,
            "callbacks": running.callbacks.state_dicts(),
            "stop_reason": running.state.stop_reason,
            "mesh": dict(mesh.sizes),
            "counts": mesh.copy.rank == 0,
            # Stages count in their own layers.
            "layers": all(mesh.places.get(axis, 0) == 0 for axis in ("sequence", "tensor")),
        }
        noise = {} if running.noise is None else running.noise.state()
        return cls(tensors=exchange | result | noise | running.sums.state(), values=values)


class GatheredRanks:
    """The states of all ranks; empty on other ranks than rank 0.

    Attributes:
        values: JSON values of each rank.
    """

    def __init__(
        self,
        values: Sequence[dict[str, Any]] = (),
        file: IO[bytes] | None = None,
        error: Exception | None = None,
    ) -> None:
        """Takes over an open file of the tensors "<rank>/<name>".

        Args:
            error: The reason why there is no file.
        """
        self.values = values
        self._file = file
        self._error = error
        if file is not None:
            weakref.finalize(self, file.close)

    def write(self, target: IO[bytes]) -> None:
        """Writes the tensors as a `.safetensors` file.

        Raises:
            OSError: The folder for temporary files had no room for them.
        """
        if self._error is not None:
            raise self._error
        if self._file is None:
            tensor_file.write({}, target)
            return
        self._file.seek(0)
        shutil.copyfileobj(self._file, target, tensor_file.BLOCK_BYTES)


def gather_ranks(
    mine: RankState, world: Collective, progress: Callable[[], None] = lambda: None
) -> GatheredRanks:
    """Gathers every rank's state on rank 0, which holds the tensors of one other rank at a time.

    Runs on every rank.

    Args:
        progress: Called after each message.
    """
    own = {name: mine.tensors[name] for name in tensor_file.ordered(mine.tensors)}
    shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in own.items()}
    texts = gather_bytes(world, json.dumps([mine.values, shapes]).encode(), to_all=False)
    found = [json.loads(text) for text in texts]
    tensors = [
        {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (dtype, shape) in of.items()
        }
        for _, of in found
    ]
    data = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in own.values()])
    lengths = [int(length) for length in world.all_gather(torch.tensor([len(data)]), [1] * world.size)]
    file: IO[bytes] | None = None
    error: Exception | None = None
    for ranks in _group(lengths):
        counts = [length if rank in ranks else 0 for rank, length in enumerate(lengths)]
        pieces = world.gather(data if world.rank in ranks else data[:0], counts)
        # If there is no room, the other ranks still send: the training goes on without this checkpoint.
        if world.rank == 0 and error is None:
            try:
                if file is None:
                    file, starts = _open_file(own, tensors)
                for rank in ranks:
                    _write_rank(file, pieces[rank], rank, tensors[rank], starts)
            except (OSError, ValueError) as caught:
                error = caught
        # The next message needs its memory.
        del pieces
        progress()
    return GatheredRanks([values for values, _ in found], file, error)


def _group(lengths: Sequence[int]) -> Iterator[range]:
    """Yields ranks that send together: some with little, or one with much."""
    first = 0
    for rank in range(1, len(lengths) + 1):
        if rank == len(lengths) or sum(lengths[first : rank + 1]) > _SMALL_BYTES:
            yield range(first, rank)
            first = rank


def _open_file(
    own: Mapping[str, torch.Tensor], tensors: Sequence[Mapping[str, torch.Tensor]]
) -> tuple[IO[bytes], dict[str, int]]:
    """Opens a file with the header of all ranks' tensors; returns where each tensor starts.

    Raises:
        ValueError: No checkpoint can hold a tensor.
    """
    tensor_file.check_state(own)
    header, starts = tensor_file.header_of(
        {f"{rank}/{name}": tensor for rank, of in enumerate(tensors) for name, tensor in of.items()}
    )
    file: Any = tempfile.SpooledTemporaryFile(max_size=_SMALL_BYTES, prefix="ringspark-")  # noqa: SIM115
    file.write(header)
    return file, starts


def _write_rank(
    file: IO[bytes],
    data: torch.Tensor,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    starts: Mapping[str, int],
) -> None:
    """Writes one rank's tensors, which are end to end in `data`, to their places."""
    pieces = torch.split(data, [num_bytes([tensor]) for tensor in tensors.values()])
    for name, piece in zip(tensors, pieces, strict=True):
        file.seek(starts[f"{rank}/{name}"])
        file.write(piece.numpy())  # type: ignore[call-overload]


def restore_rank(running: Running, states: Sequence[RankState], mesh: RankMesh, seed: int) -> None:
    """Restores this rank from the states of all ranks at the present step, in rank order.

    Raises:
        ValueError: They belong to another network or other callbacks, or are damaged.
    """
    if not states:
        raise ValueError("a checkpoint of no rank is damaged; take another checkpoint")
    # Before there were meshes, all ranks read different rows.
    before = states[0].values.get("mesh", {"data": len(states)})
    is_same = _several(before) == _several(mesh.sizes)
    try:
        exchange = [_lazy_section(state.tensors, "exchange") for state in states]
        running.sync.load_rank_states(exchange, is_same=is_same)
        if is_same:
            _restore_same(running, states[mesh.world.rank])
        else:
            _restore_other(running, states, mesh.data_rank)
            seed_rank(seed, running.state.step, mesh.drawing_rank)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"what the checkpoint has of the ranks is of another training ({type(error).__name__}: {error}); "
            "take another checkpoint, or give runUri a folder of its own"
        ) from error


def _lazy_section(tensors: Mapping[str, torch.Tensor], prefix: str) -> LazyTensors:
    """Returns the tensors "<prefix>/<name>" by name, as `section` does, but reads none of them yet.

    The state of one rank may contain all weights, so not all states are read at once.
    """
    start = f"{prefix}/"
    names = {name.removeprefix(start): name for name in tensors if name.startswith(start)}
    return LazyTensors(tensors.__getitem__, names)


def _several(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the axes that have several places."""
    return {axis: size for axis, size in sizes.items() if size > 1}


def _restore_same(running: Running, own: RankState) -> None:
    _fill_buffers(running.sync.network, section(own.tensors, "buffers"))
    running.sums.load(own.tensors)
    if running.noise is not None:
        running.noise.load([own.tensors])
    running.callbacks.load_state_dicts(own.values["callbacks"])
    running.state.stop_reason = own.values["stop_reason"]
    # Last, because restoring the rest may draw random numbers.
    set_generator_state(section(own.tensors, "random"), own.values["random"], running.device)


def _restore_other(running: Running, states: Sequence[RankState], data_rank: int) -> None:
    _fill_buffers(running.sync.network, section(states[0].tensors, "buffers"))
    # Ranks that were one copy of a network had the same rows, and the same sums.
    counting = [s.tensors for s in states if s.values.get("layers", s.values.get("counts", True))]
    states = [state for state in states if state.values.get("counts", True)]
    # The first rank takes the sums of the epoch so far, because their ranks no longer exist.
    running.sums.load_all([state.tensors for state in states], answers=data_rank == 0, counting=counting)
    if running.noise is not None:
        running.noise.load([state.tensors for state in states] if data_rank == 0 else [])
    running.callbacks.load_state_dicts(states[0].values["callbacks"])
    reasons = [state.values["stop_reason"] for state in states]
    running.state.stop_reason = next((reason for reason in reasons if reason), None)


def _fill_buffers(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copies the values in; skips buffers that only the first forward pass will make."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in values:
                if values[name].shape != buffer.shape:
                    raise ValueError(
                        f"the checkpoint's buffer {name!r} has shape {tuple(values[name].shape)}, the "
                        f"model's {tuple(buffer.shape)}; give the model that was trained"
                    )
                buffer.copy_(values[name])
