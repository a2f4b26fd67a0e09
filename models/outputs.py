"""Converts a module's return value to the tuple of tensors that losses and metrics take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

import torch


def as_outputs(output: object, model: str = "the model") -> tuple[torch.Tensor, ...]:
    """Returns the tensors of a module's output, in the module's order.

    If a mapping or dataclass has `logits`, as in the transformers library, only the logits are returned,
    because its other values are hidden states and attentions. Otherwise all values except None are returned.
    Raises ValueError if a value is not a tensor; `model` names the module in the message.
    """
    if isinstance(output, torch.Tensor):
        return (output,)
    values = _values(output)
    wrong = next((value for value in values if not isinstance(value, torch.Tensor)), None)
    if wrong is not None or not values:
        inside = f" with a {type(wrong).__name__} inside" if wrong is not None else ""
        raise ValueError(
            f"{model} must return a tensor, several tensors, or an output that has logits, got "
            f"{type(output).__name__}{inside}; wrap it in a module that returns the logits or values"
        )
    return tuple(value for value in values if isinstance(value, torch.Tensor))


def _values(output: object) -> list[object]:
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if logits is not None:
        # A tuple of logits (one per head) is several outputs.
        return list(logits) if isinstance(logits, tuple | list) else [logits]
    if isinstance(output, Mapping):
        return [value for value in output.values() if value is not None]
    if isinstance(output, Sequence) and not isinstance(output, str | bytes):
        return list(output)
    if is_dataclass(output):
        entries = [getattr(output, entry.name) for entry in fields(output)]
        return [value for value in entries if value is not None]
    return []
