"""A network whose weights are fetched where its forward pass uses them, and dropped right after.

A module finds its own tensors in two dicts, of parameters and of buffers. Here these dicts fetch a tensor
anew with each look into them, so a tensor lives as long as the operation that was given it, whoever asks: the
module itself, its parent, or torch's fused kernels, which take the weights of a whole layer. The operations
and the numbers are those of the network with all its weights.

A network that changes a fetched buffer in place while it predicts changes a copy that is dropped, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# Fetches the tensor of a name of the state dict.
Fetch = Callable[[str], torch.Tensor]


class FetchedTensors(dict[str, Any]):
    """The parameters, or the buffers, of one module; what it was made with stands in for those to fetch.

    A tensor that the module sets itself is its own from then on.
    """

    def __init__(self, known: dict[str, Any], names: dict[str, str], fetch: Callable[..., Any]) -> None:
        """Makes the dict.

        Args:
            known: The module's tensors; those to fetch without numbers.
            names: Name in the state dict, for each of those to fetch.
            fetch: Called with a name and the tensor that stands in for it.
        """
        super().__init__(known)
        self._names = dict(names)
        self._fetch = fetch

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        return self._fetch(self._names[key], found) if key in self._names else found

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((key, self[key]) for key in list(self))

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self[key] for key in list(self))

    def __setitem__(self, key: str, value: Any) -> None:
        self._names.pop(key, None)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._names.pop(key, None)
        super().__delitem__(key)


def stream(
    module: nn.Module,
    fetch: Fetch,
    is_kept: Callable[[str], bool],
    device: torch.device | str = "cpu",
) -> None:
    """Lets the module, which has no weights, fetch them whenever it uses them.

    Args:
        module: A skeleton, see `models.skeleton`. Tensors that no state dict holds move to `device`.
        fetch: Returns a tensor on the CPU by its name in the state dict, each time a new one.
        is_kept: Whether the tensor of a name is fetched now and kept.
        device: Device of the tensors that the module sees.

    Raises:
        ValueError: The module has a tensor without numbers that its state dict does not hold as it is.
    """
    names = {id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items()}
    kept: dict[int, torch.Tensor] = {}

    def fetched(name: str, stand_in: torch.Tensor) -> torch.Tensor:
        # As a loaded weight is in every respect, even outside of the inference that asks for it: torch (2.13)
        # chooses by `requires_grad`, for one, whether it multiplies the rows of a batch at once.
        with torch.inference_mode(False):
            tensor = fetch(name).to(device, stand_in.dtype)
            if isinstance(stand_in, nn.Parameter):
                return nn.Parameter(tensor, requires_grad=stand_in.requires_grad)
            return tensor

    for owner in module.modules():
        for group in ("_parameters", "_buffers"):
            known, to_fetch = dict(getattr(owner, group)), {}
            for key, tensor in known.items():
                if tensor is None:
                    continue
                if not tensor.is_meta:
                    known[key] = tensor.to(device)
                    continue
                if id(tensor) not in names:
                    raise ValueError(
                        f"the state dict of {type(module).__name__} does not hold {key!r} of its "
                        f"{type(owner).__name__} as it is, so it cannot be fetched by itself; set "
                        "inferenceOffload='none'"
                    )
                name = names[id(tensor)]
                if not is_kept(name):
                    to_fetch[key] = name
                    continue
                if id(tensor) not in kept:
                    kept[id(tensor)] = fetched(name, tensor)
                known[key] = kept[id(tensor)]
            owner.__dict__[group] = FetchedTensors(known, to_fetch, fetched) if to_fetch else known
        if isinstance(owner, nn.RNNBase):
            _fetch_around(owner)


def _fetch_around(layer: nn.RNNBase) -> None:
    """Fetches a recurrent layer's weights for each call, because it keeps a list of them beside the dicts."""

    def before(layer: nn.RNNBase, _: object) -> None:
        layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]  # type: ignore[misc]
        layer.flatten_parameters()

    def after(layer: nn.RNNBase, *_: object) -> None:
        layer._flat_weights = []

    layer._flat_weights, layer._flat_weight_refs = [], [None] * len(layer._flat_weights_names)
    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)
