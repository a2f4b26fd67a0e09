"""Disk offload: reads each weight when the forward pass uses it, and drops it right after.

Each module's dicts of parameters and buffers are replaced by dicts that read a tensor at every access.
Predictions are bitwise the same. If the network changes an offloaded buffer in place, the change is lost at
the next access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.estimators.training.checkpoint.streamed_file import StreamedFile


class FetchedTensors(dict[str, Any]):
    """Dict of one module's parameters or buffers. Each access to a key of `fetch` calls `fetch[key]`.

    If the module assigns a new tensor to a name, that name is no longer fetched.
    """

    def __init__(self, known: dict[str, Any], fetch: dict[str, Callable[[], torch.Tensor]]) -> None:
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


def offload_to_disk(module: nn.Module, source: StreamedFile, device: torch.device | str = "cpu") -> None:
    """Makes a meta-device module fetch its meta tensors to `device` whenever it uses them.

    Raises:
        ValueError: A meta tensor of the module is missing from its state dict, or a state-dict hook changed
            it.
    """
    names = {id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items()}
    replaced: list[torch.Tensor] = []
    prefetcher = _Prefetcher(source, _embedding_names(module, names))

    def fetch(name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        prefetcher.use(name)
        return read()

    for owner in module.modules():
        for group in ("_parameters", "_buffers"):
            known: dict[str, Any] = dict(getattr(owner, group))
            to_fetch: dict[str, Callable[[], torch.Tensor]] = {}
            for key, tensor in known.items():
                if tensor is None:
                    continue
                if not tensor.is_meta:
                    # The object stays the same, because the network may keep it elsewhere too.
                    tensor.data = tensor.data.to(device)
                    continue
                if id(tensor) not in names:
                    raise ValueError(
                        f"the state dict of {type(module).__name__} omits or changes {key!r} of its "
                        f"{type(owner).__name__}, so disk offload cannot read this tensor; set "
                        "inferenceOffload='none'"
                    )
                name = names[id(tensor)]
                to_fetch[key] = partial(fetch, name, _reader(source, name, tensor, device))
                replaced.append(tensor)
            if to_fetch:
                owner.__dict__[group] = FetchedTensors(known, to_fetch)
        if isinstance(owner, nn.RNNBase):
            _fetch_per_call(owner)
    for tensor in replaced:
        if not isinstance(tensor, _Barred):
            # The object stays the same, because the network may keep it elsewhere too.
            tensor.__class__ = _BarredParameter if isinstance(tensor, nn.Parameter) else _BarredTensor


def _reader(
    source: StreamedFile, name: str, meta: torch.Tensor, device: torch.device | str
) -> Callable[[], torch.Tensor]:
    dtype, needs_gradient = meta.dtype, meta.requires_grad
    is_parameter = isinstance(meta, nn.Parameter)

    def read() -> torch.Tensor:
        # Equal to a loaded weight in every respect, and no inference tensor: torch (2.13) chooses kernels
        # by `requires_grad`.
        with torch.inference_mode(False):
            tensor = source.read(name).to(device, dtype)
            return nn.Parameter(tensor, requires_grad=needs_gradient) if is_parameter else tensor

    return read


class _Barred:
    """Raises an error when used.

    Otherwise torch (2.13) would compute with the `meta` tensor and return undefined values.
    """

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Any:
        raise ValueError(
            "forward uses a weight that it took from a list or variable, but inferenceOffload='disk' loads a "
            "weight when forward reads it from its module; read the weight as self.weight, or set "
            "inferenceOffload='none'"
        )


class _BarredTensor(_Barred, torch.Tensor):
    """A buffer on `meta` that raises an error when used."""


class _BarredParameter(_Barred, nn.Parameter):
    """A parameter on `meta` that raises an error when used."""


class _Prefetcher:
    """Prefetches each tensor that is used, and the tensor that was used next in the previous pass.

    Without prefetching, a memory mapping reads one page at a time, and each read waits. Embedding tables are
    not prefetched, because a batch uses few of their rows.
    """

    def __init__(self, source: StreamedFile, embeddings: set[str]) -> None:
        self._source, self._embeddings = source, embeddings
        self._following: dict[str, str] = {}
        self._last: str | None = None

    def use(self, name: str) -> None:
        if self._last is not None:
            self._following[self._last] = name
        self._last = name
        for each in (name, self._following.get(name)):
            if each is not None and each not in self._embeddings:
                self._source.announce(each)


def _embedding_names(module: nn.Module, names: dict[int, str]) -> set[str]:
    tables: set[str] = set()
    others: set[str] = set()
    for owner in module.modules():
        found = tables if isinstance(owner, nn.Embedding | nn.EmbeddingBag) else others
        found.update(names.get(id(tensor), "") for tensor in owner.parameters(recurse=False))
    return tables - others


def _fetch_per_call(layer: nn.RNNBase) -> None:
    """Fetches a recurrent layer's weights before each call, because the layer also keeps them in a list."""

    def before(layer: nn.RNNBase, _: object) -> None:
        layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
        layer.flatten_parameters()

    def after(layer: nn.RNNBase, *_: object) -> None:
        layer._flat_weights = []

    layer._flat_weights, layer._flat_weight_refs = [], [None] * len(layer._flat_weights_names)
    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)
