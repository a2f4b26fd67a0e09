"""A network stored as a list of operations on tensors. It predicts without the network's class.

    {"format_version": 1, "torch": "2.13.0", "num_inputs": 1, "single": true, "outputs": [{"at": 3}],
     "tensors": [{"name": "fc.weight", "dtype": "float32", "shape": [2, 4], "kind": "parameter"}, ...],
     "steps": [["aten.linear.default", [{"at": 2}, {"at": 0}, {"at": 1}], {}]]}

An optional key "inner" maps names of inner modules to their outputs. `forward` passes each output through a
module in `Program.inner`, so that a hook on that module gets it.

`{"at": n}` refers to value n. Values are numbered in this order: the tensors, the inputs, the results of the
steps. The format is JSON, because `torch.export.load` (torch 2.13) evaluates code in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from ringspark.models.operators import Device, check_arguments, find_operator

FORMAT_VERSION = 1

Json: TypeAlias = dict[str, Any]

# Attributes that `_resolve` makes from the text.
_RESOLVED = ("_steps", "_outputs", "inner")

_OF_TORCH: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


class NoProgramError(ValueError):
    """A network cannot be recorded; the message is a clause, such as "it has no output"."""


@dataclass(frozen=True)
class ValueRef:
    """Refers to a value by number: the tensors come first, then the inputs, then the results of the steps."""

    index: int


class Program(nn.Module):
    """Computes what the recorded network computes in eval mode, even if this module is in training mode.

    The constructor leaves the weights on `meta`; fill them with `models.meta_device.fill`. It raises
    ValueError if this version of torch cannot run the program.
    """

    def __init__(self, text: Json) -> None:
        super().__init__()
        self.text = text
        try:
            if text["format_version"] != FORMAT_VERSION:
                raise ValueError(
                    f"the program has format {text['format_version']}, but this ringspark reads format "
                    f"{FORMAT_VERSION}; upgrade ringspark"
                )
            for tensor in text["tensors"]:
                self._declare(**tensor)
            self._resolve()
        except (LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"the program does not fit torch {torch.__version__} ({type(error).__name__}: {error}); use "
                "the torch version that saved it"
            ) from error

    def constants(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that checkpoints do not hold, by name."""
        names = [tensor["name"] for tensor in self.text["tensors"] if tensor["kind"] == "constant"]
        return {name: self.get_buffer(name) for name in names}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        path, _, own = name.rpartition(".")
        try:
            owner = self.get_submodule(path)
            known: torch.Tensor | None = owner._parameters.get(own)
            known = owner._buffers[own] if known is None else known
        except (LookupError, AttributeError):
            known = None
        if known is None or (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(f"tensor {name!r} does not fit the program in name, shape or dtype")
        detached = tensor.detach()
        if own in owner._parameters:
            owner._parameters[own] = nn.Parameter(detached, requires_grad=False)
        else:
            owner._buffers[own] = detached

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if len(inputs) != self.text["num_inputs"]:
            raise ValueError(f"the program takes {self.text['num_inputs']} inputs, got {len(inputs)}")
        entries, first = _Values(self), len(self.text["tensors"])
        entries.update(enumerate(inputs, start=first))
        device = next((tensor.device for tensor in inputs), torch.device("cpu"))
        for at, (function, args, kwargs, last_uses) in enumerate(self._steps, start=first + len(inputs)):
            # No local variables for arguments: they would keep tensors alive until the next step.
            entries[at] = function(
                *_resolve_args(args, entries, device),
                **{name: _resolve_args(arg, entries, device) for name, arg in kwargs.items()},
            )
            for index in last_uses:
                entries.pop(index, None)
        for module, value in self.inner.values():
            module(_resolve_args(value, entries, device))
        outputs = tuple(_resolve_args(self._outputs, entries, device))
        return outputs[0] if self.text["single"] else outputs

    def _declare(self, name: str, dtype: str, shape: list[int], kind: str) -> None:
        path, _, own = name.rpartition(".")
        owner: nn.Module = self
        for part in path.split(".") if path else ():
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        empty = torch.empty(shape, dtype=_of_torch("dtype", dtype), device="meta")
        if kind == "parameter":
            owner.register_parameter(own, nn.Parameter(empty, requires_grad=False))
        else:
            owner.register_buffer(own, empty, persistent=kind == "buffer")

    def _resolve(self) -> None:
        first = len(self.text["tensors"]) + self.text["num_inputs"]
        decoded = [
            (find_operator(name), decode(args), {key: decode(value) for key, value in named.items()})
            for name, args, named in self.text["steps"]
        ]
        for step in decoded:
            check_arguments(*step)
        self._outputs = decode(self.text["outputs"])
        # Not among the submodules, whose names belong to the network's tensors.
        self.inner = {name: (nn.Identity(), decode(at)) for name, at in self.text.get("inner", {}).items()}
        last: dict[int, int] = {}
        for at, (_, *arguments) in enumerate(
            [*decoded, (None, self._outputs, [value for _, value in self.inner.values()])], start=first
        ):
            for index in _references(arguments):
                if not 0 <= index < at:
                    raise ValueError(
                        f"step {at - first} of the program uses value {index}, which does not exist"
                    )
                last[index] = at
        ends: dict[int, list[int]] = {}
        for index, at in last.items():
            ends.setdefault(at, []).append(index)
        self._steps = [(*step, ends.get(at, [])) for at, step in enumerate(decoded, start=first)]

    def __getstate__(self) -> dict[str, Any]:
        # `__setstate__` resolves the operators again.
        return {name: value for name, value in self.__dict__.items() if name not in _RESOLVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._resolve()


class _Values(dict[int, Any]):
    """Maps the number of a value (see `ValueRef`) to the value, while a program runs.

    Stores no tensors of the program, so disk offload can drop such a tensor between two uses.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    def __missing__(self, index: int) -> torch.Tensor:
        # Not a method of Program, whose attribute names belong to the network's tensors and modules.
        tensor = self._program.text["tensors"][index]
        program = self._program
        get = program.get_parameter if tensor["kind"] == "parameter" else program.get_buffer
        return get(tensor["name"])


def encode(value: Any) -> Any:
    if isinstance(value, ValueRef):
        return {"at": value.index}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, torch.device):
        return {"device": "inputs"}
    for name, kind in _OF_TORCH.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    raise ValueError(f"an argument of type {type(value).__name__} cannot be recorded")


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name == "at":
        return ValueRef(inner)
    if name == "float":
        return float(inner)
    return Device if name == "device" else _of_torch(name, inner)


def _of_torch(kind: str, name: str) -> Any:
    found = getattr(torch, name)
    # torch's ordinary operators take no quantized or bits dtypes.
    if not isinstance(found, _OF_TORCH[kind]) or name.startswith(("q", "bits")):
        raise ValueError(f"torch has no {kind} {name!r}")
    return found


def _resolve_args(value: Any, entries: dict[int, Any], device: torch.device) -> Any:
    if isinstance(value, ValueRef):
        return entries[value.index]
    if isinstance(value, list):
        return [_resolve_args(item, entries, device) for item in value]
    return device if value is Device else value


def _references(value: Any) -> Iterator[int]:
    if isinstance(value, ValueRef):
        yield value.index
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _references(item)
