"""LoRA adapters: their result, and merging them into a plain network."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from ringspark.models import ModelSpec
from ringspark.models.lora import adapter_state, add_lora, find_adapters, linear_layers, merged_state

SPEC = ModelSpec(
    "transformer_classifier",
    {"vocab_size": 11, "max_seq_len": 6, "dim": 8, "depth": 2, "num_heads": 2, "out_features": 3},
)
IDS = torch.arange(24).reshape(4, 6) % 11


def _adapted(targets: list[str], dropout: float = 0.0) -> tuple[nn.Module, nn.Module]:
    """Returns a network and a copy with adapters that change its outputs."""
    torch.manual_seed(0)
    base = SPEC.build().eval()
    module = copy.deepcopy(base)
    add_lora(module, rank=2, alpha=6, targets=targets, dropout=dropout)
    return base, module


def _move(module: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("lora_B"):
                nn.init.normal_(parameter, std=0.1)


def test_the_first_outputs_are_those_of_the_network_without_adapters() -> None:
    base, module = _adapted(["*"])
    assert torch.equal(base(IDS), module(IDS))


def test_the_merged_network_is_a_plain_one_that_computes_the_same() -> None:
    base, module = _adapted(["*.qkv", "blocks.*.up", "head"])
    _move(module)
    state = merged_state(module)
    assert list(state) == list(base.state_dict())
    merged = SPEC.build().eval()
    merged.load_state_dict(state)
    assert (merged(IDS) - module(IDS)).abs().max() < 1e-6
    assert (merged(IDS) - base(IDS)).abs().max() > 0.01
    # A copy has its own matrices, so changing them changes its output.
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.get_parameter("head.lora_B").zero_()
    assert not torch.equal(other(IDS), module(IDS))


def test_an_adapter_of_full_rank_takes_any_weight_to_any_other() -> None:
    """With rank min(in, out), B A can be any weight difference; here from its SVD."""
    base, other = nn.Linear(5, 3), nn.Linear(5, 3)
    wanted = (other.weight - base.weight).detach()
    module = nn.Sequential(base)
    add_lora(module, rank=3, alpha=6, targets=["0"])
    left, values, right = torch.linalg.svd(wanted, full_matrices=False)
    with torch.no_grad():
        module.get_parameter("0.lora_A").copy_(right)
        module.get_parameter("0.lora_B").copy_(left * values / 2)
        x = torch.randn(7, 5)
        assert torch.allclose(module(x), x @ other.weight.T + base.bias, atol=1e-6)
    assert torch.allclose(merged_state(module)["0.weight"], other.weight, atol=1e-6)


@pytest.mark.slow
def test_the_peft_package_computes_the_same_with_the_same_matrices() -> None:
    peft = pytest.importorskip("peft")
    base, module = _adapted(["*.qkv"])
    _move(module)
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["qkv"], lora_dropout=0.0)
    theirs = peft.inject_adapter_in_model(config, base).eval()
    names = {
        name.replace("lora_A", "lora_A.default.weight").replace("lora_B", "lora_B.default.weight"): tensor
        for name, tensor in adapter_state(module).items()
        if "lora" in name
    }
    assert not theirs.load_state_dict(names, strict=False).unexpected_keys
    assert torch.allclose(theirs(IDS), module(IDS), atol=1e-6)


def test_dropout_is_of_the_adapter_and_of_training_alone() -> None:
    _, module = _adapted(["head"], dropout=0.5)
    base = module(IDS)
    _move(module)
    assert torch.equal(module(IDS), module(IDS))
    module.train()
    outputs = [module(IDS) for _ in range(2)]
    assert not torch.equal(*outputs)
    with torch.no_grad():
        module.get_parameter("head.lora_B").zero_()
    assert torch.allclose(module(IDS), base, atol=1e-6)


class _OwnLora(nn.Linear):
    """User-defined layer with parameters that have the names of our matrices."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.lora_A, self.lora_B = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


def test_matrices_of_a_user_s_own_are_no_adapter() -> None:
    module = nn.Sequential(_OwnLora(), nn.Linear(1, 1))
    assert merged_state(module).keys() == module.state_dict().keys()
    assert find_adapters(module) == {}
    add_lora(module, rank=1, alpha=1, targets=["1"])
    assert {"0.lora_A", "0.lora_B"} <= merged_state(module).keys()


class _Masked(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * (self.weight > 0), self.bias)


def _in_chain(change: Callable[[Any], object]) -> nn.Module:
    change(layer := nn.Linear(2, 1))
    return nn.Sequential(layer)


def _tied() -> nn.Module:
    module = nn.ModuleDict({"tokens": nn.Embedding(7, 4), "head": nn.Linear(4, 7)})
    module["head"].weight = module["tokens"].weight
    return module


NAMED_ALIKE = _in_chain(lambda layer: setattr(layer, "lora_A", nn.Parameter(torch.zeros(1))))
HOOKED = _in_chain(lambda layer: layer.register_forward_hook(lambda _, inputs, output: output * 2))


@pytest.mark.parametrize(
    ("module", "targets", "words"),
    [
        (nn.Sequential(nn.Linear(2, 1)), ["head"], r"'head' matches no linear layer; the layers are \['0'\]"),
        (_tied(), ["head"], "'head' shares its weight with another layer"),
        (nn.Sequential(nn.LazyLinear(3)), ["0"], "'0' is lazy"),
        (nn.Sequential(_Masked(2, 1)), ["0"], "'0' computes more than W x . b"),
        (HOOKED, ["0"], "'0' computes more than W x . b"),
        (nn.Sequential(weight_norm(nn.Linear(2, 1))), ["0"], "'0' computes more than W x . b"),
        (NAMED_ALIKE, ["0"], "'0' already has 'lora_A'"),
        (nn.MultiheadAttention(4, 2), ["out_proj"], "matches no linear layer"),
    ],
)
def test_a_layer_that_cannot_have_an_adapter_is_refused(module: Any, targets: Any, words: str) -> None:
    before = list(module.state_dict())
    with pytest.raises(ValueError, match=words):
        add_lora(module, rank=1, alpha=1, targets=targets)
    assert list(module.state_dict()) == before


def test_the_projections_that_attention_only_reads_are_no_layers_to_adapt() -> None:
    assert list(linear_layers(nn.TransformerEncoderLayer(8, 2))) == ["linear1", "linear2"]
