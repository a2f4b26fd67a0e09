"""Plans of tensor parallelism: what cannot be cut right is refused before a rank computes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel.mesh import AXES
from ringspark.estimators.parallel.model.spread import check_spread
from ringspark.estimators.parallel.model.tensor import VocabularyEmbedding, region_of
from ringspark.models import TransformerLM


class Shared(nn.Module):
    """Calls one layer by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 10), nn.Linear(10, 4)
        self.again = self.up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.again(x)) + self.down(self.up(x))
        return out


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        # The other name would go on with the whole layer, which is then trained by itself.
        ({"up": "column", "down": "row"}, "cuts 'up', which the network has as 'again' too"),
        ({"again": "column"}, "cuts 'again', which the network has as 'up' too"),
        # Parts of blocks of 4, 4 and 2 would be put together to other numbers.
        ({"down": "row", "*.nothing": "row"}, "names '\\*.nothing', which fits no layer"),
        ({"down": ["column", 3]}, "'down': its 4 outputs are not 3 equal blocks"),
        ({"down": ["row", 2]}, "'down': style 'row' takes no blocks"),
        ({"down": ["grid", [2, 2]]}, r"'down': style 'grid' \[2, 2\] is of 4 workers, and 'tensor' has 2"),
        (
            {"down": ["grid", 2]},
            r"'down' must give workers along outputs and inputs, as \['grid', ",
        ),
        ({"down": "grid"}, "'down': style 'grid' takes workers along outputs and inputs"),
        ({"down": ["column"]}, r"'down' must be a style or \[style, blocks\], got \['column'\]"),
    ],
)
def test_what_a_plan_cannot_cut_is_refused_on_the_driver(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_spread(Shared(), dict.fromkeys(AXES, 1) | {"tensor": 2}, {"plan": plan})


SIZES = {"vocab_size": 9, "max_seq_len": 4, "dim": 8, "depth": 2, "num_heads": 2}
PAIR = {"blocks.*.up": "column", "blocks.*.down": "row"}


@pytest.mark.parametrize(
    ("network", "changes", "plan", "message"),
    [
        (
            Shared,
            {},
            {"down": "column"},
            "Shared cannot have parts of the tokens .* set parallelism's 'between'",
        ),
        (
            lambda: TransformerLM(**SIZES, experts={"num_experts": 2}),
            {},
            None,
            "adds to the loss of whole rows",
        ),
        (lambda: TransformerLM(**SIZES), {"pipeline": 2}, None, "a stage does not know how long the rows"),
        # Attention that no rank gathers the tokens for would see its own alone.
        (lambda: TransformerLM(**SIZES), {}, PAIR, "'blocks.0.attention' a part of the tokens"),
        (lambda: TransformerLM(**SIZES), {"sequence": 2}, PAIR, "'blocks.0.attention' a part of the tokens"),
        # Ranks look up other positions, so none could take the others' part of the sum.
        (lambda: TransformerLM(**SIZES), {}, {"positions": "vocabulary"}, "cuts 'positions' by ids"),
        (lambda: TransformerLM(**SIZES), {}, {"blocks.0.up": "column_joined"}, "leaves all tokens on every"),
    ],
)
def test_parts_of_the_tokens_between_are_refused_where_they_would_be_wrong(
    network: Callable[[], nn.Module], changes: dict[str, int], plan: dict[str, Any] | None, message: str
) -> None:
    sizes = dict.fromkeys(AXES, 1) | {"tensor": 2} | changes
    with pytest.raises(ValueError, match=message):
        check_spread(network(), sizes, {"plan": plan, "between": "parts"})


class Tempered(TransformerLM):
    """Divides by a temperature, which no rank's own way to compare would."""

    def scores(self, x: torch.Tensor, tokens: nn.Embedding) -> torch.Tensor:  # type: ignore[override]
        return x @ tokens.weight.T / 2


def test_a_way_to_compare_of_ones_own_is_not_replaced() -> None:
    sizes = dict.fromkeys(AXES, 1) | {"tensor": 2}
    with pytest.raises(ValueError, match=r"Tempered has its own `scores`, .* set 'plan'"):
        check_spread(Tempered(**SIZES), sizes, {})
    check_spread(Tempered(**SIZES), sizes, {"plan": PAIR})


@pytest.mark.parametrize("wrong", [5, -1])
def test_an_id_beyond_the_table_is_refused_where_the_table_is_cut(wrong: int) -> None:
    collective: Any = LocalCollective()
    table = VocabularyEmbedding(nn.Embedding(5, 3), region_of(collective))
    assert table(torch.tensor([[0, 4]])).shape == (1, 2, 3)
    with pytest.raises(IndexError):
        table(torch.tensor([[0, wrong]]))
