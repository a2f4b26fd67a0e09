"""Which part of the whole network a rank has, and how the parts become the whole again.

The names of a rank's parameters are those of the whole network: a stage of a pipeline has some of them, and
a parameter that is cut has its whole name. So a checkpoint holds the whole network, whatever ranks wrote it,
and any mesh, or one process, reads it.

Invariant: what is not cut is equal on all ranks that have it, to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.parallel.cut import Cut, Spread, join, part_of, shape_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.optimizer_state import OptimizerState, StateValue, whole

_LAYOUTS: WeakKeyDictionary[nn.Module, ModelLayout] = WeakKeyDictionary()


def layout_of(module: nn.Module) -> ModelLayout | None:
    """Returns the layout of a network that is spread over ranks; None for a whole one."""
    return _LAYOUTS.get(module)


@dataclass(frozen=True)
class _Place:
    """Where one tensor of the whole network lies.

    Attributes:
        shape: Shape of the whole.
        dtype: Its dtype, by torch's name.
        holders: Ranks of `RankMesh.whole` that have the pieces, in the order of the cut's places.
    """

    shape: tuple[int, ...]
    dtype: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Pieces:
    """What a rank writes of some tensors, and what the others do.

    Attributes:
        names: Tensors of which this rank writes what it has.
        spreads: Those of which several parts have pieces.
        total: Number of all tensors.
    """

    names: frozenset[str]
    spreads: dict[str, Spread]
    total: int


class ModelLayout:
    """The layout of one network on one rank.

    Attributes:
        mesh: This rank's place.
        cuts: How each parameter that is cut is a part; the others are whole where they are.
        shapes: Shape of each whole tensor of the state dict, of all ranks.
        trained: Names of the parameters that any rank trains, in the whole network's order.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: RankMesh,
        cuts: Mapping[str, Cut],
        shapes: Mapping[str, torch.Size],
        copies: frozenset[str] = frozenset(),
        trained: Sequence[str] = (),
        tied: Mapping[str, str] | None = None,
    ) -> None:
        """Ties the layout to the rank's part of the network.

        Args:
            module: What this rank has.
            shapes: Shape of each tensor of the whole network's state dict.
            copies: Parameters of which another stage has the one that counts, as it is tied.
            trained: Names of the parameters of the whole network that are trained.
            tied: The further names of tied parameters -> the first one, by which the whole network knows an
                optimizer's state.
        """
        self.mesh = mesh
        self.cuts = dict(cuts)
        self.shapes = dict(shapes)
        self.trained = tuple(trained)
        self._tied = dict(tied or {})
        self._parameters = [name for name, _ in module.named_parameters()]
        self._copies = copies
        _LAYOUTS[module] = self

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a parameter, or of a tensor of the parameter's shape."""
        cut = self.cuts.get(name)
        if cut is None or whole.shape != self.shapes[name]:
            return whole
        return part_of(whole, cut, self.mesh.places[cut.axis], self.mesh.sizes[cut.axis])

    def whole_name(self, name: str) -> str:
        """Returns the whole network's name of a parameter; a stage may know but another one of a tied one."""
        return self._tied.get(name, name)

    def own_parameters(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns this rank's part of tensors of parameters, such as their averages, by its own names."""
        known = {name: whole.get(self.whole_name(name)) for name in self._parameters}
        return {name: self.own(name, tensor) for name, tensor in known.items() if tensor is not None}

    def counts(self, name: str, among: Sequence[str] = ("expert", "sequence", "tensor")) -> bool:
        """Whether this rank's part of a gradient counts in a sum over `RankMesh.whole`: each element once.

        Args:
            among: Axes along which ranks have the same elements, unless the parameter is cut along one.
        """
        places, cut = self.mesh.places, self.cuts.get(name)
        alike = [axis for axis in among if cut is None or cut.axis != axis]
        return name not in self._copies and all(places[axis] == 0 for axis in alike)

    def norm(self, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the 2-norm of the whole network's gradients. Runs on every rank.

        Args:
            named: This rank's gradients by name.
        """
        square = torch.zeros((), dtype=torch.float64)
        for name, gradient in named.items():
            if self.counts(name):
                square += torch.linalg.vector_norm(gradient, dtype=torch.float64).square().cpu()
        return self.mesh.whole.all_reduce(square.reshape(1))[0].sqrt()

    def own_optimizer(self, whole: Mapping[str, Mapping[str, StateValue]]) -> OptimizerState:
        """Returns this rank's part of a whole optimizer state, by its own names."""
        known = {name: whole.get(self.whole_name(name)) for name in self._parameters}
        # Those of another network stay, so that whoever loads the state refuses it.
        known |= {name: values for name, values in whole.items() if name not in self.shapes}
        return {
            name: {key: self.own(name, v) if isinstance(v, torch.Tensor) else v for key, v in values.items()}
            for name, values in known.items()
            if values is not None
        }

    def pieces(self, own: Mapping[str, torch.Tensor]) -> Pieces:
        """Returns which pieces of all tensors this rank writes into its part. Runs on every rank.

        Args:
            own: As `shared` takes it.
        """
        table = self._table(own)
        spreads = {}
        for name, place in table.items():
            if len(place.holders) > 1:
                parts = tuple(self.mesh.part_of(holder) for holder in place.holders)
                spreads[name] = Spread(self.cuts[self._parameter_of(name)], place.shape, parts)
        rank = self.mesh.whole.rank
        names = {n for n, place in table.items() if rank in place.holders} if self.mesh.holds_first else set()
        return Pieces(frozenset(names), spreads, len(table))

    def shared(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns stand-ins for all tensors of the whole network, which `whole` fetches. Runs on every rank.

        Args:
            own: This rank's tensors; "<parameter>" or "<parameter>/<key>" for those of an optimizer.
        """
        table = self._table(own)
        return {name: self._stand_in(name, place, own.get(name)) for name, place in table.items()}

    def merged_values(self, own: OptimizerState) -> dict[str, dict[str, Any]]:
        """Returns what the whole optimizer's state has beside tensors. Runs on every rank.

        Args:
            own: The whole state of this rank's parameters; looked at where `RankMesh.holds_first`.
        """
        plain = {
            self.whole_name(name): {k: v for k, v in values.items() if not isinstance(v, torch.Tensor)}
            for name, values in own.items()
        }
        result: dict[str, dict[str, Any]] = {}
        for text in gather_bytes(self.mesh.whole, json.dumps(plain).encode()):
            for name, values in json.loads(text).items():
                result.setdefault(name, {}).update(values)
        return {name: result[name] for name in sorted(result)}

    def _table(self, own: Mapping[str, torch.Tensor]) -> dict[str, _Place]:
        """Returns where all tensors lie; equal on all ranks."""
        mesh = self.mesh
        merged: dict[str, _Place] = {}
        if mesh.holds_first:
            told = {
                name: [
                    self._place_on_axis(name, t),
                    str(t.dtype).removeprefix("torch."),
                    self._whole(name, t),
                ]
                for name, t in own.items()
            }
            of_ranks = [json.loads(text) for text in gather_bytes(mesh.whole, json.dumps(told).encode())]
            for name in sorted({name for known in of_ranks for name in known}):
                holders: dict[int, int] = {}
                for rank, known in enumerate(of_ranks):
                    if name in known:
                        holders.setdefault(known[name][0], rank)
                first = next(known[name] for known in of_ranks if name in known)
                merged[name] = _Place(tuple(first[2]), first[1], tuple(holders[p] for p in sorted(holders)))
        text = json.dumps({n: [p.shape, p.dtype, p.holders] for n, p in merged.items()}).encode()
        # Ranks of other copies have nothing to send, but count the tensors with the others.
        (known_text, *_) = gather_bytes(mesh.world, text if mesh.world.rank == 0 else b"")
        return {n: _Place(tuple(s), d, tuple(h)) for n, (s, d, h) in json.loads(known_text).items()}

    def _cut_of(self, name: str, tensor: torch.Tensor) -> Cut | None:
        """Returns the cut of a rank's tensor: not of one that only belongs to a parameter, as a count."""
        parameter = self._parameter_of(name)
        cut = self.cuts.get(parameter)
        if cut is None:
            return None
        place, size = self.mesh.places[cut.axis], self.mesh.sizes[cut.axis]
        shape = shape_of(self.shapes[parameter], cut, place, size)
        return cut if list(tensor.shape) == shape else None

    def _place_on_axis(self, name: str, tensor: torch.Tensor) -> int:
        cut = self._cut_of(name, tensor)
        return 0 if cut is None else self.mesh.places[cut.axis]

    def _whole(self, name: str, tensor: torch.Tensor) -> list[int]:
        cut = self._cut_of(name, tensor)
        return list(tensor.shape if cut is None else self.shapes[self._parameter_of(name)])

    def _parameter_of(self, name: str) -> str:
        """Returns the parameter of "<parameter>" or "<parameter>/<key>"; its own name may have slashes."""
        return name if name in self.shapes else name.rpartition("/")[0]

    def _stand_in(self, name: str, place: _Place, own: torch.Tensor | None) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, place.dtype)
        stand_in = torch.empty(place.shape, dtype=dtype, device="meta")

        def fetch() -> torch.Tensor:
            return self._fetched(name, place, dtype, own)

        # What `whole` looks for, as in parts that torch itself has cut.
        stand_in.full_tensor = fetch  # type: ignore[attr-defined]
        stand_in.fetch = fetch  # type: ignore[attr-defined]
        return stand_in

    def _fetched(
        self, name: str, place: _Place, dtype: torch.dtype, own: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the whole on the first rank, and nothing on the others. Runs on every rank."""
        parts, nothing = self.mesh.whole, torch.empty(0, dtype=dtype)
        if own is not None and hasattr(own, "full_tensor"):
            # A sharding has cut this rank's part once more.
            own = whole(own)  # type: ignore[assignment]
        if not self.mesh.holds_first:
            return nothing
        cut = self.cuts.get(self._parameter_of(name)) if len(place.holders) > 1 else None
        shapes = [list(place.shape) for _ in place.holders]
        if cut is not None:
            places = range(len(place.holders))
            shapes = [shape_of(place.shape, cut, index, len(place.holders)) for index in places]
        counts = [0] * parts.size
        for holder, shape in zip(place.holders, shapes, strict=True):
            counts[holder] = torch.Size(shape).numel()
        mine = nothing
        if parts.rank in place.holders:
            assert own is not None
            mine = own.detach().to("cpu").contiguous().reshape(-1)
        pieces = parts.gather(mine, counts)
        if not pieces:
            return nothing
        found = [pieces[holder].view(shape) for holder, shape in zip(place.holders, shapes, strict=True)]
        if cut is not None:
            return join(found, cut)
        # A copy of what this rank has, because an optimizer goes on to change it; another's came as one.
        return found[0].clone() if place.holders[0] == parts.rank else found[0]
