"""Networks with a layer description; a network built from it computes the same."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ringspark.models.layers import build, describe

Make = Callable[[], nn.Module]


def _tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    module[2].weight = module[0].weight
    return module


def _twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer, nn.LeakyReLU(0.3)))


def _frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()
    module[0].requires_grad_(False)
    return module


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, (3, 1), stride=2, groups=2, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.PReLU(8),
    )


def _attention() -> nn.Module:
    settings = {"activation": "gelu", "batch_first": True, "norm_first": True, "bias": False}
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.1, **settings), nn.Flatten(1, -1))


# Networks of (3, 4) rows, except for SHAPES.
NETWORKS: dict[str, Make] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU("tanh"), nn.Dropout(0.2), nn.Linear(8, 2)),
    "one layer": lambda: nn.Linear(4, 2, bias=False),
    "normed": lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=0.3), nn.LayerNorm(4, eps=1e-3)),
    "convolutions": _images,
    "attention": _attention,
    "tied": _tied,
    "twice": _twice,
    "frozen": _frozen,
    "unflatten": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Softmax(-1), nn.Sequential(), nn.Flatten()
    ),
}
SHAPES = {"convolutions": (2, 3, 8, 8), "attention": (3, 5, 8)}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_torchs_layers_is_built_from_text(name: str) -> None:
    module = NETWORKS[name]().eval()
    before = torch.random.get_rng_state()
    description = describe(module)
    assert torch.random.get_rng_state().equal(before)
    again = build(json.loads(json.dumps(description))).eval()
    again.load_state_dict(module.state_dict())
    rows = torch.randn(SHAPES.get(name, (3, 4)), dtype=next(iter(module.parameters()), torch.zeros(1)).dtype)
    assert again(rows).equal(module(rows))
    assert str(again) == str(module)
    names = [[n for n, p in m.named_parameters() if p.requires_grad] for m in (module, again)]
    assert names[0] == names[1]  # tied parameters appear once


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_a_description(kind: type[nn.RNNBase]) -> None:
    module = kind(3, 4, num_layers=2, batch_first=True, bidirectional=True)
    description = describe(module)
    assert description is not None
    again = build(description)
    again.load_state_dict(module.state_dict())
    rows = torch.randn(2, 5, 3)
    assert again(rows)[0].equal(module(rows)[0])


class Own(nn.Linear):
    pass


def _changed(change: Callable[[Any], object]) -> nn.Module:
    change(module := nn.Linear(2, 2))
    return module


OTHERS: dict[str, Make] = {
    "a user's class": lambda: nn.Sequential(Own(2, 2)),
    "a hook": lambda: _changed(lambda module: module.register_forward_hook(lambda *_: None)),
    "a replaced forward": lambda: _changed(lambda module: setattr(module, "forward", lambda rows: rows)),
    "two dtypes": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()),
    "a lazy layer": lambda: nn.LazyLinear(2),
    "a user's activation": lambda: nn.TransformerEncoderLayer(8, 2, activation=torch.sin),
    "a parametrization": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "a buffer added": lambda: _changed(lambda module: module.register_buffer("more", torch.ones(2))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_text_would_not_give_back_has_no_description(name: str) -> None:
    assert describe(OTHERS[name]()) is None


def test_a_description_of_another_torch_is_refused_in_a_sentence() -> None:
    description = describe(nn.Sequential(nn.Linear(2, 2)))
    assert description is not None
    description["layers"]["children"]["0"]["layer"] = "Bilinear3"
    with pytest.raises(ValueError, match=r"torch .* has no layer 'Bilinear3'; use the torch version"):
        build(description)
    description["layers"]["children"]["0"] = {"layer": "Linear", "width": 3}
    with pytest.raises(ValueError, match=r"does not fit torch .* \(TypeError: .*width"):
        build(description)
