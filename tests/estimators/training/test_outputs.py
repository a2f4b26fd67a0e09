"""All forms in which modules return tensors."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from ringspark.models.outputs import as_outputs

A, B = torch.zeros(2, 3), torch.ones(2)


class Pair(NamedTuple):
    mean: torch.Tensor
    scale: torch.Tensor


@dataclass
class ClassifierOutput:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


class ModelOutput(OrderedDict[str, torch.Tensor]):
    """Like the transformers class: a mapping whose keys are attributes too."""

    def __getattr__(self, name: str) -> torch.Tensor:
        if name in self:
            return self[name]
        raise AttributeError(name)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (A, (A,)),
        ((A, B), (A, B)),
        ([A], (A,)),
        (Pair(A, B), (A, B)),
        ({"first": A, "second": B}, (A, B)),
        ({"logits": A, "hidden": (B, B)}, (A,)),
        ({"logits": None, "value": B}, (B,)),
        (ModelOutput(logits=A, attentions=B), (A,)),
        (ModelOutput(start_logits=A, end_logits=B), (A, B)),
        (ClassifierOutput(logits=A, hidden_states=(B,)), (A,)),
        (ClassifierOutput(loss=B), (B,)),
        (ClassifierOutput(logits=(A, B)), (A, B)),  # type: ignore[arg-type]
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_taken_in_the_modules_order(output: object, expected: tuple[torch.Tensor, ...]) -> None:
    outputs = as_outputs(output)
    assert len(outputs) == len(expected)
    assert all(got is wanted for got, wanted in zip(outputs, expected, strict=True))


@pytest.mark.parametrize(
    ("output", "got"),
    [
        (None, "NoneType"),
        ("logits", "str"),
        (3.0, "float"),
        ((), "tuple"),
        ({}, "dict"),
        ((A, 1.0), "tuple with a float inside"),
        ({"a": A, "b": (B,)}, "dict with a tuple inside"),
        (ClassifierOutput(), "ClassifierOutput"),
        (ClassifierOutput, "type"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_tensor_is_refused_with_its_type(output: object, got: str) -> None:
    with pytest.raises(ValueError, match=f"must return a tensor, .*, got {got}; wrap it in a module"):
        as_outputs(output)
