"""A network whose weights are fetched where its forward pass uses them, and dropped right after.

A module finds its own tensors in two dicts, of parameters and of buffers. Here these dicts fetch a tensor
anew with each look into them, so a tensor lives as long as the operation that was given it, whoever asks: the
module itself, its parent, or torch's fused kernels, which take the weights of a whole layer. The operations
and the numbers are those of the network with all its weights.

A network that changes a fetched buffer in place while it predicts changes a copy that is dropped, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn


class Source(Protocol):
    """The tensors of a state dict, by name."""

    def read(self, name: str) -> torch.Tensor:
        """Returns the tensor on the CPU, each time a new one."""

    def announce(self, name: str) -> None:
        """Says that all of the tensor will be used soon; returns at once."""


class FetchedTensors(dict[str, Any]):
    """The parameters, or the buffers, of one module; what it was made with stands in for those to fetch.

    A tensor that the module sets itself is its own from then on.
    """

    def __init__(self, known: dict[str, Any], fetch: dict[str, Callable[[], torch.Tensor]]) -> None:
        """Makes the dict.

        Args:
            known: The module's tensors; those to fetch as stand-ins.
            fetch: What fetches a tensor, for each of those to fetch.
        """
        super().__init__(known)
        self._to_fetch = dict(fetch)

    def __getitem__(self, key: str) -> Any:
        fetch = self._to_fetch.get(key)
        return super().__getitem__(key) if fetch is None else fetch()

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((key, self[key]) for key in list(self))

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self[key] for key in list(self))

    def __setitem__(self, key: str, value: Any) -> None:
        self._to_fetch.pop(key, None)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._to_fetch.pop(key, None)
        super().__delitem__(key)


def offload_to_disk(module: nn.Module, source: Source, device: torch.device | str = "cpu") -> None:
    """Lets the module fetch the weights that it lacks whenever it uses them.

    Args:
        module: A skeleton, see `models.meta_device`. Tensors that have numbers stay, and move to `device`.
        source: Where the others are.
        device: Device of the tensors that the module sees.

    Raises:
        ValueError: The module has a tensor without numbers that its state dict does not hold as it is.
    """
    names = {id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items()}
    stand_ins: list[torch.Tensor] = []
    announced = _Announced(source, _looked_up(module, names))

    def fetch(name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        announced.use(name)
        return read()

    for owner in module.modules():
        for group in ("_parameters", "_buffers"):
            known: dict[str, Any] = dict(getattr(owner, group))
            to_fetch: dict[str, Callable[[], torch.Tensor]] = {}
            for key, tensor in known.items():
                if tensor is None:
                    continue
                if not tensor.is_meta:
                    # The object stays, wherever else the network keeps it.
                    tensor.data = tensor.data.to(device)
                    continue
                if id(tensor) not in names:
                    raise ValueError(
                        f"the state dict of {type(module).__name__} does not hold {key!r} of its "
                        f"{type(owner).__name__} as it is, so it cannot be fetched by itself; set "
                        "inferenceOffload='none'"
                    )
                name = names[id(tensor)]
                to_fetch[key] = partial(fetch, name, _reader(source, name, tensor, device))
                stand_ins.append(tensor)
            if to_fetch:
                owner.__dict__[group] = FetchedTensors(known, to_fetch)
        if isinstance(owner, nn.RNNBase):
            _fetch_around(owner)
    for tensor in stand_ins:
        _bar(tensor)


def _reader(
    source: Source, name: str, stand_in: torch.Tensor, device: torch.device | str
) -> Callable[[], torch.Tensor]:
    """Returns what reads the tensor that a tensor without numbers stands for."""
    dtype, needs_gradient = stand_in.dtype, stand_in.requires_grad
    is_parameter = isinstance(stand_in, nn.Parameter)

    def read() -> torch.Tensor:
        # As a loaded weight is in every respect, even outside of the inference that asks for it: torch (2.13)
        # chooses by `requires_grad`, for one, whether it multiplies the rows of a batch at once.
        with torch.inference_mode(False):
            tensor = source.read(name).to(device, dtype)
            return nn.Parameter(tensor, requires_grad=needs_gradient) if is_parameter else tensor

    return read


class _Barred:
    """Refuses to be used: torch (2.13) multiplies with a tensor on `meta` and gives numbers from nowhere."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Any:
        raise ValueError(
            "the network uses a weight that it keeps beside its parameters and buffers, in a list or an "
            "attribute, where inferenceOffload='disk' cannot fetch it; set inferenceOffload='none', or name "
            "the weight in forward by its attribute"
        )


class _BarredTensor(_Barred, torch.Tensor):
    """A stand-in for a buffer."""


class _BarredParameter(_Barred, nn.Parameter):
    """A stand-in for a parameter."""


def _bar(stand_in: torch.Tensor) -> None:
    """Makes a stand-in one that cannot be used, wherever else the network keeps it."""
    if not isinstance(stand_in, _Barred):
        # The object stays, as where torch makes parameters of uninitialized ones.
        stand_in.__class__ = _BarredParameter if isinstance(stand_in, nn.Parameter) else _BarredTensor


class _Announced:
    """Has the source read a tensor at once, and the one that was used after it the last time.

    Left to itself, a mapping reads a disk in the small pieces that are touched, and waits for each.
    """

    def __init__(self, source: Source, looked_up: set[str]) -> None:
        """Makes it; of the tensors that are looked up, few rows are used, and the rest stays where it is."""
        self._source, self._looked_up = source, looked_up
        self._following: dict[str, str] = {}
        self._last: str | None = None

    def use(self, name: str) -> None:
        if self._last is not None:
            self._following[self._last] = name
        self._last = name
        for each in (name, self._following.get(name)):
            if each is not None and each not in self._looked_up:
                self._source.announce(each)


def _looked_up(module: nn.Module, names: dict[int, str]) -> set[str]:
    """Returns the names of tables of embeddings that no other module has."""
    tables: set[str] = set()
    others: set[str] = set()
    for owner in module.modules():
        found = tables if isinstance(owner, nn.Embedding | nn.EmbeddingBag) else others
        found.update(names.get(id(tensor), "") for tensor in owner.parameters(recurse=False))
    return tables - others


def _fetch_around(layer: nn.RNNBase) -> None:
    """Fetches a recurrent layer's weights for each call, because it keeps a list of them beside the dicts."""

    def before(layer: nn.RNNBase, _: object) -> None:
        layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
        layer.flatten_parameters()

    def after(layer: nn.RNNBase, *_: object) -> None:
        layer._flat_weights = []

    layer._flat_weights, layer._flat_weight_refs = [], [None] * len(layer._flat_weights_names)
    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)
