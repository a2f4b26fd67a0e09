"""Sends values between two stages: tuples of tensors and Nones, of any shapes and dtypes.

A receiver needs the shapes before it receives. The shapes of a micro-batch's arguments determine the shapes
of all values in the network, so only the first micro-batch of each shape sends a description ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Values = tuple[torch.Tensor | None, ...]
Wait = Callable[[], None]

# Largest number of known shapes per neighbour and direction; padded texts have many lengths.
MOST_KEYS = 4096
# Numbers of a description; its length is fixed, so that it can be received.
_LENGTH = 256
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


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
        waits += [
            self._collective.start_send(value.detach().contiguous(), to)
            for value in values
            if value is not None and value.numel()
        ]
        return lambda: _wait_for(waits)

    def start_receive(self, key: Hashable, source: int) -> Callable[[], Values]:
        """Starts to receive values; returns a function that waits for them. They have no autograd history."""
        if key not in self._known:
            numbers = torch.empty(_LENGTH, dtype=torch.int64)
            self._collective.start_receive(numbers, source)()
            self._learn(key, _decode_forms(numbers.tolist()), "from", source)
        forms = self._known[key]
        values = tuple(
            None if form is None else torch.empty(form.shape, dtype=form.dtype, device=self._device)
            for form in forms
        )
        waits = [
            self._collective.start_receive(value, source)
            for value in values
            if value is not None and value.numel()
        ]

        def wait() -> Values:
            _wait_for(waits)
            return mark_gradients(values, forms)

        return wait

    def send_gradients(self, gradients: Sequence[torch.Tensor], to: int) -> Wait:
        waits = [self._collective.start_send(g.contiguous(), to) for g in gradients if g.numel()]
        return lambda: _wait_for(waits)

    def start_receive_gradients(self, forms: Forms, source: int) -> Callable[[], list[torch.Tensor]]:
        gradients = [
            torch.empty(form.shape, dtype=form.dtype, device=self._device)
            for form in forms
            if form is not None and form.requires_grad
        ]
        waits = [self._collective.start_receive(g, source) for g in gradients if g.numel()]

        def wait() -> list[torch.Tensor]:
            _wait_for(waits)
            return gradients

        return wait

    def forms(self, key: Hashable) -> Forms:
        return self._known[key]


def mark_gradients(values: Values, forms: Forms) -> Values:
    for value, form in zip(values, forms, strict=True):
        if value is not None and form is not None and form.requires_grad:
            value.requires_grad_()
    return values


def _wait_for(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()


def _encode_forms(forms: Forms) -> torch.Tensor:
    numbers = [len(forms)]
    for form in forms:
        if form is None:
            numbers.append(-1)
        else:
            numbers += [_DTYPES.index(form.dtype), int(form.requires_grad), len(form.shape), *form.shape]
    if len(numbers) > _LENGTH:
        raise ValueError(
            f"a pipeline stage can return about {_LENGTH // 6} tensors, got {len(forms)}; concatenate some"
        )
    return torch.tensor(numbers + [0] * (_LENGTH - len(numbers)))


def _decode_forms(numbers: list[int]) -> Forms:
    rest = iter(numbers)
    forms: list[TensorForm | None] = []
    for _ in range(next(rest)):
        code = next(rest)
        if code < 0:
            forms.append(None)
            continue
        requires_grad, num_dims = bool(next(rest)), next(rest)
        forms.append(TensorForm(_DTYPES[code], tuple(next(rest) for _ in range(num_dims)), requires_grad))
    return tuple(forms)
