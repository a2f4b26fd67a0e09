"""The driver refuses tensor parallel plans that would compute wrong results."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from small_networks import Net
from torch import nn
from torch.nn.utils import spectral_norm

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.options.mesh import AXES, Mesh
from ringspark.extras.model_parallel.fake_collective import FakeCollective
from ringspark.extras.model_parallel.shard_network import check_shardable
from ringspark.extras.model_parallel.tensor.layers import VocabularyEmbedding
from ringspark.extras.model_parallel.tensor.plan import make_region, plan_of, shard_layers
from ringspark.models import TransformerLM

TWO = dict.fromkeys(AXES, 1) | {"tensor": 2}


def _shared() -> nn.Module:
    up, down = nn.Linear(4, 10), nn.Linear(10, 4)
    compute = lambda self, x: self.down(self.again(x)) + self.down(self.up(x))  # noqa: E731
    return Net(compute, up=up, down=down, again=up)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        # The second name would keep the unsharded layer, which would train separately.
        ({"up": "column", "down": "row"}, "shards 'up', which the network also has as 'again'"),
        ({"again": "column"}, "shards 'again', which the network also has as 'up'"),
        # Shards of blocks of 4, 4 and 2 would be joined in the wrong order.
        ({"down": "row", "*.nothing": "row"}, "names '\\*.nothing', which fits no layer"),
        ({"down": ["column", 3]}, "'down': 4 outputs do not divide into 3 equal blocks"),
        ({"down": ["row", 2]}, "'down': style 'row' takes no number of blocks"),
        ({"down": ["grid", [2, 2]]}, r"'down': style 'grid' \[2, 2\] needs 4 workers, but 'tensor' has 2"),
        ({"down": ["grid", 2]}, r"'down' must give the workers along outputs and along inputs, as \['gri"),
        ({"down": "grid"}, "'down': style 'grid' needs the rows and columns of the grid"),
        ({"down": ["column"]}, r"'down' must be a style or \[style, blocks\], got \['column'\]"),
    ],
)
def test_what_a_plan_cannot_cut_is_refused_on_the_driver(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_shardable(_shared(), TWO, Mesh(plan=plan))


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


def _with(change: Callable[[nn.Linear], object]) -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    change(network[0])  # type: ignore[arg-type]
    return network


@pytest.mark.parametrize(
    ("network", "style", "message"),
    [
        (_with(lambda layer: layer.register_forward_hook(lambda *_: None)), "row", "has a forward hook"),
        (_with(lambda layer: layer.register_full_backward_hook(lambda *_: None)), "row", "a backward hook"),
        (_with(spectral_norm), "column_joined", "has a forward pre-hook"),
        (_with(lambda layer: setattr(layer, "forward", abs)), "column", "has a replaced forward"),
        (_with(lambda layer: layer.register_buffer("mask", torch.ones(4))), "row", "holds bias, mask, wei"),
        (nn.Sequential(Scaled(4, 4)), "vocabulary", "is for nn.Embedding, got Scaled"),
    ],
)
def test_a_layer_that_computes_more_than_its_class_is_not_cut(network: Any, style: str, message: str) -> None:
    """A shard would drop the extra computation and silently train a different network."""
    with pytest.raises(ValueError, match=f"cannot shard '0': .*{message}"):
        check_shardable(network, TWO, Mesh(plan={"0": style}))


def test_a_gradient_hook_is_refused_and_attributes_of_weights_stay() -> None:
    region: Any = make_region(FakeCollective(0, 2))  # type: ignore[arg-type]
    network = _with(lambda layer: setattr(layer.weight, "decays", False))
    shard_layers(network, region, {"0": "row"})
    assert network.get_parameter("0.weight").decays is False  # type: ignore[attr-defined]
    hooked = _with(lambda layer: layer.weight.register_hook(torch.abs))
    with pytest.raises(ValueError, match="has a gradient hook"):
        shard_layers(hooked, region, {"0": "row"})


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layers_of_torch_call_their_cut_layers_in_evaluation_too(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=norm_first)
    network = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    ranks = FakeCollective(0, 2)
    plan = {"layers.*.linear1": "column", "layers.*.linear2": "row"}
    shard_layers(network, make_region(ranks), plan)  # type: ignore[arg-type]
    padding = torch.tensor([[False, False, True]])
    with torch.no_grad():
        network(torch.randn(1, 3, 4), src_key_padding_mask=padding)
    assert [message.kind for message in ranks.messages] == ["all_reduce"] * 2


SIZES = {"vocab_size": 9, "max_seq_len": 4, "dim": 8, "depth": 2, "num_heads": 2}
PAIR = {"blocks.*.up": "column", "blocks.*.down": "row"}
LM, MIXTURE = TransformerLM(**SIZES), TransformerLM(**SIZES, experts={"num_experts": 2})


@pytest.mark.parametrize(
    ("network", "changes", "plan", "message"),
    [
        (_shared(), {}, {"down": "column"}, "Net does not support sequence_parallel=True: .* set sequence"),
        (MIXTURE, {}, None, "needs whole rows for its own part of the loss"),
        (LM, {"pipeline": 2}, None, "a stage does not know the length"),
        # Without a gather, attention would see only the rank's own tokens.
        (LM, {}, PAIR, "'blocks.0.attention' some of the tokens"),
        (LM, {"sequence": 2}, PAIR, "'blocks.0.attention' some of the tokens"),
        # Ranks look up different positions, so they cannot all-reduce the result.
        (LM, {}, {"positions": "vocabulary"}, "shards 'positions' by ids"),
        (LM, {}, {"blocks.0.up": "column_joined"}, "leaves all tokens on every"),
    ],
)
def test_parts_of_the_tokens_between_are_refused_where_they_would_be_wrong(
    network: nn.Module, changes: dict[str, int], plan: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_shardable(deepcopy(network), TWO | changes, Mesh(plan=plan, sequence_parallel=True))


class Tempered(TransformerLM):
    """Divides logits by a temperature, which the sharded loss would ignore."""

    def scores(self, x: torch.Tensor, tokens: nn.Embedding) -> torch.Tensor:  # type: ignore[override]
        return x @ tokens.weight.T / 2


def test_a_way_to_compare_of_ones_own_is_not_replaced() -> None:
    with pytest.raises(ValueError, match=r"Tempered has its own `scores`, .* set 'plan'"):
        check_shardable(Tempered(**SIZES), TWO, Mesh())
    check_shardable(Tempered(**SIZES), TWO, Mesh(plan=PAIR))


@pytest.mark.parametrize("wrong", [5, -1])
def test_an_id_beyond_the_table_is_refused_where_the_table_is_cut(wrong: int) -> None:
    collective: Any = LocalCollective()
    table = VocabularyEmbedding(nn.Embedding(5, 3), make_region(collective))
    assert table(torch.tensor([[0, 4]])).shape == (1, 2, 3)
    with pytest.raises(IndexError):
        table(torch.tensor([[0, wrong]]))


def test_a_network_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="Sequential has none; give it a method tensor_plan"):
        plan_of(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), 2)
