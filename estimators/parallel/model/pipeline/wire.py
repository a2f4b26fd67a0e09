"""Values between two stages: tuples of tensors and Nones, of any shapes and dtypes.

A receiver must know shapes before it can receive. All ranks of one copy of the network see the same rows, so
the shapes of a micro-batch's arguments name what its values look like anywhere in the network. The first
micro-batch of a kind sends a description ahead of its values; later ones are received without one, and so
before they are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Values = tuple[torch.Tensor | None, ...]
Wait = Callable[[], None]

# A rank remembers the forms of this many keys per neighbour and direction; padded texts have many lengths.
MOST_KEYS = 4096
# Numbers of a description, which has one length so that it can be received unseen.
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
    """What the collective of a pipeline must be able to do."""

    def start_send(self, tensor: torch.Tensor, to: int) -> Wait:
        """Begins to send a contiguous tensor; returns a function that waits until it may change."""

    def start_receive(self, tensor: torch.Tensor, source: int) -> Wait:
        """Begins to overwrite a contiguous tensor; returns a function that waits until it is complete."""


@dataclass(frozen=True)
class Form:
    """The look of a tensor; `requires_grad` says whether its gradient is wanted back."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


Forms = tuple[Form | None, ...]


def forms_of(values: Values) -> Forms:
    return tuple(None if value is None else Form.of(value) for value in values)


class Wire:
    """Sends and receives the values of one rank.

    Invariant: two ranks send and receive between each other in one order, so that no message needs a name.
    """

    def __init__(self, collective: PointToPoint, device: torch.device) -> None:
        self._collective = collective
        self._device = device
        self._known: dict[Hashable, Forms] = {}
        # (direction, peer) -> keys, in the order in which both sides learned them.
        self._keys: dict[tuple[str, int], deque[Hashable]] = {}

    def _learn(self, key: Hashable, forms: Forms, direction: str, peer: int) -> None:
        """Keeps the forms of a key. If there are too many keys, both sides forget the same oldest one."""
        keys = self._keys.setdefault((direction, peer), deque())
        if len(keys) == MOST_KEYS:
            del self._known[keys.popleft()]
        keys.append(key)
        self._known[key] = forms

    def send(self, values: Values, key: Hashable, to: int) -> Wait:
        """Begins to send values, which must not change before the wait.

        Args:
            key: What decides the values' forms, equal on both sides: the place in the network, the
                micro-batch's arguments, the mode.

        Raises:
            ValueError: The forms are others than those of the last values with this key.
        """
        forms = forms_of(values)
        waits = []
        if key not in self._known:
            self._learn(key, forms, "to", to)
            waits.append(self._collective.start_send(_described(forms), to))
        elif self._known[key] != forms:
            raise ValueError(
                "a pipeline needs values whose shapes follow from those of the arguments, and for arguments "
                f"of the same shapes a stage gave {self._known[key]}, and now {forms}; let what differs from "
                "row to row stay inside one stage, and train the same parameters throughout"
            )
        waits += [
            self._collective.start_send(value.detach().contiguous(), to)
            for value in values
            if value is not None and value.numel()
        ]
        return lambda: _wait_for(waits)

    def start_receive(self, key: Hashable, source: int) -> Callable[[], Values]:
        """Begins to receive values; returns a function that waits for them.

        Returns:
            Leaves of autograd's graph, of which those require gradients that did on the sender's side.
        """
        if key not in self._known:
            numbers = torch.empty(_LENGTH, dtype=torch.int64)
            self._collective.start_receive(numbers, source)()
            self._learn(key, _read(numbers.tolist()), "from", source)
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
            return marked(values, forms)

        return wait

    def send_gradients(self, gradients: Sequence[torch.Tensor], to: int) -> Wait:
        waits = [self._collective.start_send(g.contiguous(), to) for g in gradients if g.numel()]
        return lambda: _wait_for(waits)

    def start_receive_gradients(self, forms: Forms, source: int) -> Callable[[], list[torch.Tensor]]:
        """Begins to receive the gradients of values that were sent; those whose form requires one."""
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
        """Returns the forms of values that were sent or received with this key."""
        return self._known[key]


def marked(values: Values, forms: Forms) -> Values:
    """Marks the values whose gradients are wanted."""
    for value, form in zip(values, forms, strict=True):
        if value is not None and form is not None and form.requires_grad:
            value.requires_grad_()
    return values


def _wait_for(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()


def _described(forms: Forms) -> torch.Tensor:
    numbers = [len(forms)]
    for form in forms:
        if form is None:
            numbers.append(-1)
        else:
            numbers += [_DTYPES.index(form.dtype), int(form.requires_grad), len(form.shape), *form.shape]
    if len(numbers) > _LENGTH:
        raise ValueError(
            f"a stage of a pipeline can pass on some {_LENGTH // 6} tensors, got {len(forms)}; join some"
        )
    return torch.tensor(numbers + [0] * (_LENGTH - len(numbers)))


def _read(numbers: list[int]) -> Forms:
    """Returns the forms that a description holds."""
    rest = iter(numbers)
    forms: list[Form | None] = []
    for _ in range(next(rest)):
        code = next(rest)
        if code < 0:
            forms.append(None)
            continue
        requires_grad, num_dims = bool(next(rest)), next(rest)
        forms.append(Form(_DTYPES[code], tuple(next(rest) for _ in range(num_dims)), requires_grad))
    return tuple(forms)
