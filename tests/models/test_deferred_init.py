"""Deferred initialization gives bit-identical weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ringspark.models import ModelSpec
from ringspark.models.deferred_init import defer_initialization

TEXT = {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 2, "num_heads": 4}
SPECS = {
    "mlp": ModelSpec("mlp", {"in_features": 8, "hidden": [21, 16], "out_features": 1}),
    "classifier": ModelSpec("transformer_classifier", {**TEXT, "out_features": 3, "padding_id": 0}),
    "language model": ModelSpec("transformer_lm", TEXT),
    "mixture": ModelSpec("transformer_lm", {**TEXT, "experts": {"num_experts": 4, "router": "switch"}}),
    "resnet": ModelSpec("resnet", {"in_channels": 3, "out_features": 4}),
    "lstm": ModelSpec("torch.nn:LSTM", {"input_size": 8, "hidden_size": 2}),
}


class Own(nn.Module):
    """Parameters that are tied, transposed, computed from other parameters, changed twice, and constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        nn.init.orthogonal_(self.first.weight)
        self.turned = nn.Parameter(torch.randn(8, 5).t())
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.second.weight = self.first.weight
        self.register_buffer("places", torch.arange(7)[None].float() / 3)
        self.scale = torch.rand(3)
        self.table = nn.Embedding(5, 3, padding_idx=1)
        with torch.no_grad():
            self.table.weight.mul_(self.first.weight[0, :3])
            self.first.weight.zero_().add_(1)
        self.last = nn.Linear(5, 1)


@pytest.mark.extras
@pytest.mark.parametrize("build", [*(spec.build for spec in SPECS.values()), Own], ids=[*SPECS, "own"])
def test_numbers_drawn_later_are_those_of_the_whole_network(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    whole = build()
    torch.manual_seed(3)
    found = defer_initialization(build)
    assert found is not None
    module, first = found
    torch.rand(5)  # other random numbers must not change the result
    names = list(dict(whole.named_parameters(remove_duplicate=False)))
    assert list(first.tensors) == names
    for name in reversed(names):
        drawn, parameter = first.initialize(name), whole.get_parameter(name)
        assert torch.equal(drawn, parameter), name
        assert drawn.stride() == parameter.stride(), name
    for (name, buffer), (_, own) in zip(whole.named_buffers(), module.named_buffers(), strict=True):
        assert torch.equal(buffer, own), name
    if isinstance(whole, Own):
        assert torch.equal(whole.scale, module.scale)  # type: ignore[arg-type]
        assert module.second.weight is module.first.weight  # type: ignore[union-attr]


def _layer_after(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        change(layer := nn.Linear(3, 3))
        return layer

    return build


# The values decide, as when they are drawn again; a list keeps drawn values; another generator draws.
CHANGES: list[Callable[[Any], object]] = [
    lambda layer: layer.weight.max() > 0 and nn.init.zeros_(layer.bias),
    lambda layer: setattr(layer, "extra", [torch.rand(3)]),
    lambda layer: nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1)),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_constructor_that_cannot_be_noted_leaves_the_generator_as_it_was(change: Any) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert defer_initialization(_layer_after(change)) is None
    assert torch.equal(before, torch.get_rng_state())
