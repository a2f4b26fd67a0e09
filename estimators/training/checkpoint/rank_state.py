"""Each rank's own state in a checkpoint: random state, buffers, epoch sums, strategy state, callbacks.

If the number of ranks has changed, rank 0 takes over the sums of the epoch, all ranks load the buffers and
callbacks that rank 0 saved, and the random number generators get new seeds.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes, num_bytes
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.attributes import read_attributes, write_attributes
from ringspark.estimators.training.checkpoint.shards import LazyMapping
from ringspark.estimators.training.objective.metric_set import tensors_under
from ringspark.estimators.training.train_state import TrainState
from ringspark.models.generators import get_generator_state, seed_rank, set_generator_state
from ringspark.models.meta_device import dense_parts

Tensors = Mapping[str, torch.Tensor]

# States of at most this size together travel in one message and stay in memory.
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RankState:
    tensors: Tensors
    values: dict[str, Any]

    @classmethod
    def of(cls, train_state: TrainState, mesh: RankMesh) -> RankState:
        """Copies the present state on every rank. Raises ValueError if a callback's state cannot be JSON."""
        # First, because a strategy may finish a synchronization for it, which changes the network.
        exchange = {f"exchange/{name}": tensor for name, tensor in train_state.sync.rank_state().items()}
        tensors, plain = get_generator_state(train_state.device)
        network, held = train_state.sync.network, train_state.sync.held()
        before = train_state.attributes
        # A shared weight is listed under all its names, because a pipeline stage may use another one.
        named = list(network.named_parameters(remove_duplicate=False))
        result = {f"random/{name}": tensor for name, tensor in tensors.items()}
        for name, part in _buffer_parts(network):
            result[f"buffers/{name}"] = part.to("cpu", copy=True).contiguous()
        values = {
            "random": plain,
            "callbacks": train_state.callbacks.state_dicts(),
            "stop_reason": train_state.state.stop_reason,
            "logged": {name: [*noted] for name, noted in train_state.state._logged.items()},
            "frozen": [name for name, parameter in named if not parameter.requires_grad],
            # A layer that was thawed and is frozen again still has its state in the optimizer.
            "held": [name for name, parameter in named if parameter in held],
            "attributes": {n: v for n, v in read_attributes(network).items() if before.get(n) != v},
            "num_steps": train_state.state.num_steps,
            "mesh": dict(mesh.sizes),
            "counts": mesh.replica.rank == 0,
            # Each stage counts in its own layers.
            "layers": all(mesh.coordinates.get(axis, 0) == 0 for axis in ("sequence", "tensor")),
        }
        noise = {} if train_state.noise is None else train_state.noise.state()
        logged = {} if train_state.own_step is None else train_state.own_step.state()
        return cls(tensors=exchange | result | noise | logged | train_state.sums.state(), values=values)


@dataclass(frozen=True, eq=False)
class GatheredRanks:
    """The states of all ranks, only on rank 0; `error`: the error of writing their tensors to `file`."""

    values: Sequence[dict[str, Any]] = ()
    file: IO[bytes] | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        if self.file is not None:
            weakref.finalize(self, self.file.close)

    def write(self, target: IO[bytes]) -> None:
        if self.error is not None:
            raise self.error
        if self.file is None:
            tensor_file.write({}, target)
            return
        self.file.seek(0)
        shutil.copyfileobj(self.file, target, tensor_file.BLOCK_BYTES)


def gather_ranks(
    mine: RankState, world: Collective, progress: Callable[[], None] = lambda: None
) -> GatheredRanks:
    """Gathers every rank's state on rank 0, one other rank at a time. Runs on every rank."""
    own = {name: mine.tensors[name] for name in tensor_file.order_names(mine.tensors)}
    shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in own.items()}
    texts = gather_bytes(world, json.dumps([mine.values, shapes]).encode(), to_all=False)
    found = [json.loads(text) for text in texts]

    def empty(dtype: str, shape: list[int]) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    tensors = [{name: empty(*spec) for name, spec in specs.items()} for _, specs in found]
    data = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in own.values()])
    lengths = [int(length) for length in world.all_gather(torch.tensor([len(data)]), [1] * world.size)]
    file: IO[bytes] | None = None
    error: Exception | None = None
    for ranks in _group(lengths):
        counts = [length if rank in ranks else 0 for rank, length in enumerate(lengths)]
        pieces = world.gather(data if world.rank in ranks else data[:0], counts)
        # Without room, the other ranks still send: training continues without this checkpoint.
        if world.rank == 0 and error is None:
            try:
                if file is None:
                    file, starts = _open_file(own, tensors)
                for rank in ranks:
                    _write_rank(file, pieces[rank], rank, tensors[rank], starts)
            except (OSError, ValueError) as caught:
                error = caught
        # Frees memory for the next message.
        del pieces
        progress()
    return GatheredRanks([values for values, _ in found], file, error)


def _group(lengths: Sequence[int]) -> Iterator[range]:
    """Yields groups of ranks that send together: several with small states, or one with a large state."""
    first = 0
    for rank in range(1, len(lengths) + 1):
        if rank == len(lengths) or sum(lengths[first : rank + 1]) > _SMALL_BYTES:
            yield range(first, rank)
            first = rank


def _open_file(own: Tensors, tensors: Sequence[Tensors]) -> tuple[IO[bytes], dict[str, int]]:
    tensor_file.check_state(own)
    header, starts = tensor_file.make_header(
        {f"{rank}/{name}": tensor for rank, of in enumerate(tensors) for name, tensor in of.items()}
    )
    file: Any = tempfile.SpooledTemporaryFile(max_size=_SMALL_BYTES, prefix="ringspark-")  # noqa: SIM115
    file.write(header)
    return file, starts


def _write_rank(
    file: IO[bytes], data: torch.Tensor, rank: int, tensors: Tensors, starts: Mapping[str, int]
) -> None:
    pieces = torch.split(data, [num_bytes([tensor]) for tensor in tensors.values()])
    for name, piece in zip(tensors, pieces, strict=True):
        file.seek(starts[f"{rank}/{name}"])
        file.write(piece.numpy())  # type: ignore[call-overload]


def restore_rank(train_state: TrainState, states: Sequence[RankState], mesh: RankMesh, seed: int) -> None:
    """Restores this rank from the states of all ranks at the present step, in rank order."""
    if not states:
        raise ValueError(
            "the checkpoint is damaged: it has the state of no rank; resume from another checkpoint"
        )
    try:
        own = states[mesh.world.rank] if restore_strategy(train_state, states, mesh) else None
        _restore(train_state, states, own, mesh.data.rank)
        # Last, because restoring the rest may use random numbers.
        if own is None:
            seed_rank(seed, train_state.state.step, mesh.random_stream)
        else:
            random = tensors_under(own.tensors, "random")
            set_generator_state(random, own.values["random"], train_state.device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"the checkpoint's rank states are of another training ({type(error).__name__}: {error}); "
            "use another checkpoint, or give runUri a new folder"
        ) from error


def restore_strategy(train_state: TrainState, states: Sequence[RankState], mesh: RankMesh) -> bool:
    """Restores the strategy's own state, such as residuals; returns whether the mesh is the same."""
    is_same = _drop_ones(states[0].values["mesh"]) == _drop_ones(mesh.sizes)
    # Lazily, because a rank's state may hold all weights.
    exchange = [_map_under(state.tensors, "exchange/") for state in states]
    train_state.sync.load_rank_states(exchange, is_same=is_same)
    return is_same


def _map_under(tensors: Tensors, start: str) -> Tensors:
    names = [name for name in tensors if name.startswith(start)]
    return LazyMapping({name.removeprefix(start): partial(tensors.__getitem__, name) for name in names})


def _drop_ones(sizes: Mapping[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if size > 1}


def _restore(
    train_state: TrainState, states: Sequence[RankState], own: RankState | None, data_rank: int
) -> None:
    """Restores from the state of this rank, `own`, or if it is None from the states of other ranks."""
    network, state = train_state.sync.network, train_state.state
    states = states if own is None else [own]
    # Takes the buffers of rank 0, and from other ranks only buffers of stages that rank 0 lacks.
    holders = {name: each.tensors for each in reversed(states) for name in each.tensors}
    buffers = {name: partial(tensors.__getitem__, name) for name, tensors in holders.items()}
    _fill_buffers(network, _map_under(LazyMapping(buffers), "buffers/"))
    changed: dict[str, Any] = {}
    for each in reversed(states):
        changed |= each.values["attributes"]
    write_attributes(network, changed, train_state.device)
    # The first rank takes the sums of the epoch so far, because the ranks that made them no longer exist.
    takes_all = own is not None or data_rank == 0
    if own is not None:
        train_state.sums.load(own.tensors)
        state._logged = own.values["logged"]
    else:
        # The ranks of one replica have the same rows and the same sums.
        counting = [each.tensors for each in states if each.values["layers"]]
        states = [each for each in states if each.values["counts"]]
        train_state.sums.load_all([each.tensors for each in states], takes_all=takes_all, counting=counting)
        state._logged.clear()  # the means of this epoch are of its remaining steps
    tensors = [each.tensors for each in states] if takes_all else []
    if train_state.noise is not None:
        train_state.noise.load(tensors)
    if train_state.own_step is not None:
        train_state.own_step.load(tensors)
    train_state.callbacks.load_state_dicts(states[0].values["callbacks"])
    # An epoch ended the training early, and now the run gets more epochs: its callbacks decide again.
    is_over = train_state.step_in_epoch == 0 and states[0].values["num_steps"] < state.num_steps
    reasons = [each.values["stop_reason"] for each in states]
    state.stop_reason = None if is_over else next((reason for reason in reasons if reason), None)


def _buffer_parts(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers by name; of a sparse buffer the indices and values, with a number after the name."""
    for name, buffer in module.named_buffers():
        first, *others = dense_parts(buffer)
        yield name, first
        yield from ((f"{name}:{number}", part) for number, part in enumerate(others))


def _fill_buffers(module: nn.Module, values: Tensors) -> None:
    """Copies the values in; skips buffers that the first forward pass creates."""
    with torch.no_grad():
        for name, buffer in _buffer_parts(module):
            if name in values:
                if values[name].shape != buffer.shape:
                    raise ValueError(
                        f"the checkpoint's buffer {name!r} has shape {tuple(values[name].shape)}, the "
                        f"model's {tuple(buffer.shape)}; give the model that was trained"
                    )
                buffer.copy_(values[name])
