"""Sends values between two stages: tuples of tensors and Nones, of any shapes and dtypes.

A receiver needs the shapes before it receives. The shapes of a micro-batch's arguments determine the shapes
of all values in the network, so only the first micro-batch of each shape sends a description ahead.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Values = tuple[torch.Tensor | None, ...]
Wait = Callable[[], None]

# Largest number of known shapes per neighbour and direction; padded texts have many lengths.
MOST_KEYS = 4096
# Bytes of a description; its length is fixed, so that it can be received.
_LENGTH = 2048


class PointToPoint(Protocol):
    def start_send(self, tensor: torch.Tensor, to: int) -> Wait:
        """Starts to send a contiguous tensor; returns a function that waits until the tensor may change."""

    def start_receive(self, tensor: torch.Tensor, source: int) -> Wait: ...


@dataclass(frozen=True)
class TensorForm:
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


Forms = tuple[TensorForm | None, ...]


def forms_of(values: Values) -> Forms:
    return tuple(None if value is None else TensorForm.of(value) for value in values)


class Wire:
    """Sends and receives one rank's values.

    A rank receives values in the order in which the other rank sends them, so messages need no names.
    """

    def __init__(self, collective: PointToPoint, device: torch.device) -> None:
        self._collective = collective
        self._device = device
        self._known: dict[Hashable, Forms] = {}
        # (direction, peer) -> keys, in the same order on both sides.
        self._keys: dict[tuple[str, int], deque[Hashable]] = {}

    def _learn(self, key: Hashable, forms: Forms, direction: str, peer: int) -> None:
        """Stores the tensor forms of `key`. Of too many keys, sender and receiver drop the oldest."""
        keys = self._keys.setdefault((direction, peer), deque())
        if len(keys) == MOST_KEYS:
            del self._known[keys.popleft()]
        keys.append(key)
        self._known[key] = forms

    def send(self, values: Values, key: Hashable, to: int) -> Wait:
        """Starts to send values; returns a function that waits until the values may change.

        `key` holds all that determines the values' shapes: stage, arguments' shapes, training or evaluation.
        """
        forms = forms_of(values)
        waits = []
        if key not in self._known:
            self._learn(key, forms, "to", to)
            waits.append(self._collective.start_send(_encode_forms(forms), to))
        elif self._known[key] != forms:
            raise ValueError(
                f"a pipeline stage first returned {self._known[key]}, then {forms}, for equal shapes of the "
                "network's arguments; keep values of varying shape inside one stage, and do not freeze or "
                "unfreeze parameters during the training"
            )
        return self._start_sends([value.detach() for value in values if value is not None], to, waits)

    def start_receive(self, key: Hashable, source: int) -> Callable[[], Values]:
        """Starts to receive values; returns a function that waits for them. They have no autograd history."""
        if key not in self._known:
            described = torch.empty(_LENGTH, dtype=torch.uint8)
            self._collective.start_receive(described, source)()
            self._learn(key, _decode_forms(described), "from", source)
        forms = self._known[key]
        values, wait = self._start_receives(forms, source)

        def receive() -> Values:
            wait()
            return mark_gradients(values, forms)

        return receive

    def send_gradients(self, gradients: Sequence[torch.Tensor], to: int) -> Wait:
        return self._start_sends(gradients, to, [])

    def start_receive_gradients(self, key: Hashable, source: int) -> Callable[[], list[torch.Tensor]]:
        """Starts to receive the gradients of the values sent under `key`."""
        forms = tuple(form for form in self._known[key] if form is not None and form.requires_grad)
        gradients, wait = self._start_receives(forms, source)

        def receive() -> list[torch.Tensor]:
            wait()
            return [gradient for gradient in gradients if gradient is not None]

        return receive

    def _start_sends(self, tensors: Sequence[torch.Tensor], to: int, waits: list[Wait]) -> Wait:
        waits += [self._collective.start_send(t.contiguous(), to) for t in tensors if t.numel()]
        return lambda: _wait_for(waits)

    def _start_receives(self, forms: Forms, source: int) -> tuple[Values, Wait]:
        values = tuple(
            None if form is None else torch.empty(form.shape, dtype=form.dtype, device=self._device)
            for form in forms
        )
        filled = [value for value in values if value is not None and value.numel()]
        waits = [self._collective.start_receive(value, source) for value in filled]
        return values, lambda: _wait_for(waits)


def detach_values(values: Values) -> Values:
    """Returns the values as leaves of another graph."""
    return mark_gradients(tuple(None if v is None else v.detach() for v in values), forms_of(values))


def mark_gradients(values: Values, forms: Forms) -> Values:
    for value, form in zip(values, forms, strict=True):
        if value is not None and form is not None and form.requires_grad:
            value.requires_grad_()
    return values


def _wait_for(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()


def _encode_forms(forms: Forms) -> torch.Tensor:
    rows = [
        form and [str(form.dtype).removeprefix("torch."), form.shape, form.requires_grad] for form in forms
    ]
    text = json.dumps(rows, separators=(",", ":")).encode()
    if len(text) > _LENGTH:
        raise ValueError(
            f"a pipeline stage can return about {_LENGTH // 48} tensors, got {len(forms)}; concatenate some"
        )
    return torch.tensor(list(text.ljust(_LENGTH)), dtype=torch.uint8)


def _decode_forms(described: torch.Tensor) -> Forms:
    rows = json.loads(bytes(described.tolist()))
    return tuple(row and TensorForm(getattr(torch, row[0]), tuple(row[1]), row[2]) for row in rows)
