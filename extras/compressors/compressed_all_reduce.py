"""Gradient compression with error feedback.

The values that a compressor does not send are the rank's residual, and are added to the next step's gradient.
Residuals have no loss scale. They change only after all ranks know that all sums of the step are finite, and
the sum of the ranks' residuals changes only by the values not sent.

On a mesh, the ranks that all-reduce a parameter's gradients compress them. Unsharded parameters are
compressed separately from shards, so that ranks with equal gradients get equal sums.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import Levels
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.options.compression import Compression, Uncompressed
from ringspark.estimators.parallel.base import (
    GradientSync,
    MakeOptimizer,
    SyncSettings,
    refuse_sparse,
    share_weights,
)
from ringspark.estimators.parallel.data.gradient_buckets import (
    GradientBucket,
    memory_shape,
    split_into_buckets,
    view_like,
)
from ringspark.estimators.parallel.data.sparse_rows import split_parameters
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.extras.compressors import COMPRESSORS, Compressor, Sent

_log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.float64)


def compressed_parameters(
    trained: Mapping[str, nn.Parameter], compression: Compression
) -> dict[str, nn.Parameter]:
    return {
        name: p
        for name, p in trained.items()
        if p.dtype in _DTYPES and COMPRESSORS[compression.NAME].helps(memory_shape(p), compression)
    }


def find_levels(collective: Collective) -> Levels:
    """Returns the collectives within and between hosts, also for one host or one rank per host."""
    if collective.levels is not None:
        return collective.levels
    alone = LocalCollective()
    if len(collective.member.leaders) == 1:
        return Levels(inside=collective, between=alone)
    return Levels(inside=alone, between=collective)


def all_reduce_by_host(vector: torch.Tensor, compressor: Compressor, levels: Levels, step: int) -> Sent:
    """Sums vectors within each host, and the sums between hosts by the compressor. Runs on every rank."""
    summed = levels.inside.all_reduce(vector)
    error = torch.zeros_like(vector)
    if levels.between is None:
        total = torch.empty_like(vector)
    elif levels.between.size == 1:
        total = summed
    else:
        sent = compressor.sum(summed, levels.between, step)
        total, error = sent.total, error if sent.error is None else sent.error
    levels.inside.broadcast([total])
    return Sent(total, error)


class CompressedAllReduce(GradientSync):
    """Data parallelism that sums gradients by a compressor.

    A single rank sends nothing. If a training resumes with another number of replicas, the first step adds
    the residuals of all earlier replicas.
    """

    takes_sparse = True

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, mesh: RankMesh, settings: SyncSettings
    ) -> None:
        super().__init__(module, optimizer)
        self._mesh = mesh
        self._collective = collective = mesh.gradients
        options = settings.sync.compressed or Uncompressed()
        kind = COMPRESSORS[options.NAME]
        self._levels = find_levels(collective) if options.between == "hosts" else None
        self._after = options.after
        self._freezes = not isinstance(options, Uncompressed) and hasattr(optimizer, "freeze_variance")
        self._step = 0
        self._scale = 1.0  # of the step's gradients
        # Also on one rank, which may resume the residuals of several ranks, in the same order.
        trained, self._rows = split_parameters(module, optimizer, collective)
        large = compressed_parameters(trained, options)
        rest = {name: p for name, p in trained.items() if name not in large}
        self._small = [GradientBucket(own) for own in split_into_buckets(rest, None)]
        self._groups = [
            _Group(own, kind([memory_shape(p) for p in own.values()], settings.seed, options))
            for part in _split_by_holders(module, large)
            for own in split_into_buckets(part, None)
        ]
        self._waits: list[Callable[[], None]] = []
        collective.on_leave(self._waits.clear)

    @classmethod
    def prepare(
        cls, module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        share_weights(module, mesh)
        return cls(module, make_optimizer(module), mesh, settings)

    @torch.no_grad()
    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        self._scale = scale() if self._groups else 1.0
        for group in self._groups:
            group.take(self._scale)
        counts = self._first_messages()
        self._rows.sum()
        if self._step == self._after and self._freezes:
            self.optimizer.freeze_variance()  # type: ignore[attr-defined]
        self._step += 1
        # The uncompressed sums are equal on all ranks.
        has_groups = self._groups or self._mesh.cuts_network
        is_finite = not has_groups or (
            all(bool(torch.isfinite(bucket.buffer).all()) for bucket in self._small)
            and self._rows.are_finite()
        )
        for group in self._groups:
            *group.counts, not_finite = counts[: len(group.parameters) + 1]
            counts = counts[len(group.parameters) + 1 :]
            is_finite = is_finite and not not_finite
        if not self._agree(is_finite):
            for group in self._groups:
                group.spoil()
            return
        sums = [group.exchange(self._send) for group in self._groups]
        # The sums are equal on all ranks that compress together, so all of them see an overflow.
        is_kept = self._agree(all(bool(torch.isfinite(sent.total).all()) for sent in sums))
        for group, sent in zip(self._groups, sums, strict=True):
            if is_kept:
                group.keep(self._scale, sent)
            group.give(sent.total)

    def _agree(self, flag: bool) -> bool:
        """Returns whether the flag is true on all ranks; ranks that compress together have the same flag."""
        if not self._mesh.cuts_network:
            return flag
        return not int(self._mesh.holders.all_reduce(torch.tensor([int(not flag)])))

    def _first_messages(self) -> list[int]:
        """All-reduces the small tensors.

        Returns for each group how many ranks had each gradient, and how many had one that is not finite.
        """
        mine = torch.tensor([float(n) for group in self._groups for n in (*group.had, group.is_bad)])
        if self._groups:
            self._waits.append(self._collective.start_sum(mine, "compression.had"))
        for number, bucket in enumerate(self._small):
            bucket.take()
            self._waits.append(self._collective.start_sum(bucket.buffer, f"gradients.{number}"))
        for wait in self._waits:
            wait()
        self._waits.clear()
        for bucket in self._small:
            bucket.give()
        return [int(number) for number in mine.tolist()]

    def _send(self, vector: torch.Tensor, compressor: Compressor) -> Sent:
        if self._step <= self._after:
            return Sent(self._collective.all_reduce(vector), torch.zeros_like(vector))
        if self._collective.size == 1:
            return Sent(vector.clone(), torch.zeros_like(vector))
        if self._levels is not None:
            return all_reduce_by_host(vector, compressor, self._levels, self._step)
        return compressor.sum(vector, self._collective, self._step)

    def _part_of(self, group: _Group) -> torch.Tensor:
        """Returns the rank's coordinates, the number of ranks per axis, and a checksum of the group."""
        mesh = self._mesh
        places = [(mesh.coordinates.get(axis, 0), mesh.sizes.get(axis, 1)) for axis in ("pipeline", "tensor")]
        return torch.tensor([*places[0], *places[1], group.checksum])

    def rank_state(self) -> dict[str, torch.Tensor]:
        state = {"step": torch.tensor([self._step])}
        for number, group in enumerate(self._groups):
            state[f"{number}/part"] = self._part_of(group)
            state |= {f"{number}/{key}": t.detach().to("cpu", copy=True) for key, t in group.state().items()}
        return state

    def load_rank_states(self, states: Sequence[Mapping[str, torch.Tensor]], *, is_same: bool) -> None:
        world = self._mesh.world
        if not states[0]:
            return
        self._step = int(states[0]["step"])
        is_lost = False
        for number, group in enumerate(self._groups):
            part, none = self._part_of(group), torch.empty(0, dtype=torch.int64)
            alike = [state for state in states if state.get(f"{number}/part", none).equal(part)]
            if not alike:
                is_lost = True
                continue
            # All ranks take the first rank's state, because the first rank always compresses. With several
            # hosts only the first rank of each host compresses, and a rank that becomes the first may have
            # an older state.
            start = f"{number}/"
            keys = [key for key in alike[0] if key.startswith(start)]
            names = [key.removeprefix(start) for key in keys]
            group.load({name: alike[0][start + name] for name in names if name not in ("part", "residual")})
            if is_same:
                group.residual.copy_(states[world.rank][f"{number}/residual"])
            elif self._collective.rank == 0:
                # The earlier ranks no longer exist, so the first rank sends their residuals.
                total = torch.zeros(len(group.residual), dtype=torch.float64)
                for state in alike:
                    total += state[f"{number}/residual"]
                group.residual.copy_(total)
            else:
                group.residual.zero_()
        if is_lost and self._collective.rank == 0:
            _log.warning(
                "the training resumes over another mesh or other stages, so residuals of gradient "
                "compression are lost; to keep them, resume with the same cuts and axes except 'data'"
            )


def _split_by_holders(module: nn.Module, named: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Splits parameters into shards and parameters on all ranks along an axis, each by the stages with it.

    A compressor mixes the parameters of a part: TopK, for example, takes the largest elements of all of them.
    """
    layout = layout_of(module)
    if layout is None:
        return [dict(named)]
    parts: dict[tuple[bool, tuple[int, ...]], dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        kind = name not in layout.cuts, layout.tied_to_stages.get(name, ())
        parts.setdefault(kind, {})[name] = parameter
    return [parts[kind] for kind in sorted(parts)]


class _Group:
    """The compressed gradients of one dtype, end to end.

    Attributes:
        residual: Values that this rank has not sent yet, (elements,); zeros without error feedback.
        had: 1 for each parameter with a gradient on this rank, else 0.
        counts: Number of ranks with a gradient of each parameter.
        is_bad: Whether a gradient, or its sum with the residual, is not finite.
        checksum: Checksum of the parameters' names and sizes.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], compressor: Compressor) -> None:
        self._names = list(named)
        self.parameters = list(named.values())
        self._compressor = compressor
        first = self.parameters[0]
        self._sizes = [p.numel() for p in self.parameters]
        self._vector = torch.zeros(sum(self._sizes), dtype=first.dtype, device=first.device)
        self._views = self._views_of(self._vector)
        self.residual = torch.zeros_like(self._vector)
        self.had = [0] * len(self.parameters)
        self.counts: list[int] = []
        self.is_bad = False
        self.checksum = crc32(json.dumps([self._names, self._sizes]).encode())

    def _views_of(self, vector: torch.Tensor) -> list[torch.Tensor]:
        pieces = torch.split(vector, self._sizes)
        return [view_like(p, piece) for p, piece in zip(self.parameters, pieces, strict=True)]

    def take(self, scale: float) -> None:
        """Moves this rank's gradients, multiplied by `scale`, into the vector and adds the residual."""
        self._vector.zero_()
        for number, (name, parameter) in enumerate(zip(self._names, self.parameters, strict=True)):
            gradient, parameter.grad = parameter.grad, None
            self.had[number] = int(gradient is not None)
            if gradient is not None:
                refuse_sparse(name, gradient)
                self._views[number].copy_(gradient)
        self._vector.add_(self.residual, alpha=scale)
        self.is_bad = not bool(torch.isfinite(self._vector).all())

    def spoil(self) -> None:
        self.give(torch.full_like(self._vector, torch.nan))

    def exchange(self, send: Callable[[torch.Tensor, Compressor], Sent]) -> Sent:
        """Sums the ranks' vectors with `send`."""
        for view, count in zip(self._views, self.counts, strict=True):
            if not count:
                view.zero_()
        return send(self._vector, self._compressor)

    def keep(self, scale: float, sent: Sent) -> None:
        """Sets the residual to the values not sent, except for parameters without a gradient on any rank."""
        if not self._compressor.has_feedback:
            return
        assert sent.error is not None
        kept = self._views_of(self.residual)
        waiting = [(view, view.clone()) for view, count in zip(kept, self.counts, strict=True) if not count]
        self.residual.copy_(sent.error).div_(scale)
        for view, values in waiting:
            view.copy_(values)

    def give(self, total: torch.Tensor) -> None:
        for parameter, view, count in zip(self.parameters, self._views_of(total), self.counts, strict=True):
            parameter.grad = view if count else None

    def state(self) -> dict[str, torch.Tensor]:
        return {"residual": self.residual, **self._compressor.state()}

    def load(self, compressor: Mapping[str, torch.Tensor]) -> None:
        self._compressor.load({k: t.to(self._vector.device) for k, t in compressor.items()})
