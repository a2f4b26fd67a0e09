"""One contract for every network in `MODELS`, with one or more examples per name."""

from importlib import import_module
from typing import Any

import pytest
import torch
from registries import EXTRAS, has_extras

from ringspark.models import MODELS, ModelSpec, apply_activation_checkpoint

# Mixtures of experts are in extras, which may be absent.
ROUTERS = list(import_module("ringspark.extras.experts.routing").ROUTERS) if has_extras() else []
_TRANSFORMER = {"vocab_size": 9, "max_seq_len": 4, "dim": 8, "depth": 2, "num_heads": 2, "dropout": 0.1}
_CLASSIFIER = {**_TRANSFORMER, "out_features": 2, "padding_id": 0}
# 2 tokens, as the other networks have 2 outputs, so that an output is (batch, 2, ...).
_LM = {**_TRANSFORMER, "vocab_size": 2}
_BINS = {"edges": [[-1.0, 0.0, 2.0], [-1.0, 1.0]], "cardinalities": [4, 50], "out_features": 2}
_TABLE = {"cardinalities": [4, 30], "num_numeric": 3, "hidden": [8, 7], "out_features": 2}
_IDS = {"vocab_size": 9, "out_features": 2}
EXAMPLES: dict[str, dict[str, object]] = {
    "embedding_mean": {**_IDS, "dim": 8, "dropout": 0.1},
    "linear": {"in_features": 5, "out_features": 2},
    "mlp": {"in_features": 5, "hidden": [8, 7], "out_features": 2, "dropout": 0.2, "norm": "batch"},
    "recurrent": {"in_features": 5, "hidden": 6, "depth": 2, "out_features": 2, "dropout": 0.1},
    "recurrent lstm of ids": {
        **_IDS,
        "hidden": 6,
        "depth": 3,
        "kind": "lstm",
        "pool": "mean",
        "padding_id": 0,
    },
    "resnet": {"in_channels": 3, "out_features": 2, "depths": [1, 2], "width": 4, "norm": "group"},
    "tabm": _BINS,
    "tabpack": {**_BINS, "dropouts": [0.0, 0.5], "rates": [1.0, 0.5]},
    "tabular": _TABLE,
    "tabular_ensemble": {**_TABLE, "members": 3},
    "transformer_classifier": _CLASSIFIER,
    "transformer_lm": _LM,
}
for _router in ROUTERS:
    _experts = {"num_experts": 2, "router": _router}
    EXAMPLES[f"transformer_classifier {_router}"] = {**_CLASSIFIER, "experts": {**_experts, "every": 1}}
if ROUTERS:
    EXAMPLES[f"transformer_lm {ROUTERS[0]}"] = {**_LM, "experts": {"num_experts": 2, "router": ROUTERS[0]}}
# Dimensions after (batch, 2).
MORE_DIMS = dict.fromkeys(["transformer_lm", *(f"transformer_lm {router}" for router in ROUTERS[:1])], (4,))


def spec(name: str) -> ModelSpec:
    return ModelSpec(name.partition(" ")[0], EXAMPLES[name])


def example_inputs(name: str, rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    if name in ("tabm", "tabpack"):
        ids = torch.randint(0, 4, (rows, 2), generator=generator)
        return torch.randn(rows, 2, generator=generator), ids
    if name.startswith("tabular"):
        categories = torch.randint(0, 4, (rows, 2), generator=generator)
        return categories, torch.randn(rows, 3, generator=generator)
    if name == "recurrent":
        return (torch.randn(rows, 4, 5, generator=generator),)
    if name in ("embedding_mean", "recurrent lstm of ids") or name.startswith("transformer"):
        vocab_size = EXAMPLES[name]["vocab_size"]
        ids = torch.randint(0, vocab_size, (rows, 4), generator=generator)  # type: ignore[call-overload]
        return (ids, ids > 1) if name == "embedding_mean" else (ids,)
    if name == "resnet":
        return (torch.randn(rows, 3, 6, 6, generator=generator),)
    return (torch.randn(rows, 5, generator=generator),)


def _param(name: str) -> Any:
    is_extra = MODELS[name.partition(" ")[0]].startswith(EXTRAS) or "experts" in EXAMPLES[name]
    return pytest.param(name, marks=[pytest.mark.extras] if is_extra else [])


@pytest.fixture(params=map(_param, sorted(EXAMPLES)))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_entry_has_an_example() -> None:
    assert {name.partition(" ")[0] for name in EXAMPLES} == set(MODELS)


def test_output_is_batch_by_out_features(name: str) -> None:
    net = spec(name).build().eval()
    assert net(*example_inputs(name, 6)).shape == (6, 2, *MORE_DIMS.get(name, ()))


def test_state_dict_loads_into_a_second_build(name: str) -> None:
    first, second = spec(name).build().eval(), spec(name).build().eval()
    second.load_state_dict(first.state_dict())
    inputs = example_inputs(name, 6)
    assert torch.equal(first(*inputs), second(*inputs))


def test_gradients_reach_every_parameter(name: str) -> None:
    net = spec(name).build()
    net(*example_inputs(name, 64)).square().sum().backward()
    without = [key for key, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_a_batch_without_rows_goes_through_in_evaluation(name: str) -> None:
    net = spec(name).build().eval()
    assert net(*example_inputs(name, 0)).shape == (0, 2, *MORE_DIMS.get(name, ()))


def test_checkpointing_applies_or_says_why_not(name: str) -> None:
    net = spec(name).build()
    if name in ("embedding_mean", "linear"):
        with pytest.raises(ValueError, match=f"found no chain of blocks in {type(net).__name__}"):
            apply_activation_checkpoint(net, "sqrt")
    else:
        assert apply_activation_checkpoint(net, "sqrt") is net
