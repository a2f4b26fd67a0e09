"""`TabularNet`: shapes, embeddings, and rejected arguments."""

import pytest
import torch

from ringspark.extras.tables.tabular import embedding_dim
from ringspark.models import ModelSpec, TabularNet


def test_rule_of_thumb_grows_with_the_cardinality_up_to_50() -> None:
    assert [embedding_dim(n) for n in (1, 3, 16, 100, 4000)] == [2, 3, 8, 21, 50]


@pytest.mark.parametrize(("cardinalities", "num_numeric"), [([], 3), ([4, 9], 0)])
def test_either_kind_of_column_may_be_missing(cardinalities: list[int], num_numeric: int) -> None:
    net = TabularNet(cardinalities, num_numeric, hidden=[5], out_features=1)
    out = net(torch.zeros(7, len(cardinalities), dtype=torch.int32), torch.zeros(7, num_numeric))
    assert out.shape == (7, 1)


def test_without_hidden_layers_it_is_a_linear_model() -> None:
    net = TabularNet([4], 2, hidden=[], out_features=1, embedding_dims=[1])
    assert sum(p.numel() for p in net.parameters()) == 4 + (1 + 2) + 1


def test_embedding_dropout_acts_in_training_only() -> None:
    net = TabularNet([4], 0, hidden=[], out_features=1, embedding_dropout=0.5)
    rows = torch.zeros(64, 1, dtype=torch.int64), torch.zeros(64, 0)
    assert net(*rows).unique().numel() > 1
    assert net.eval()(*rows).unique().numel() == 1


@pytest.mark.parametrize("bad", [4, -1])
def test_an_index_out_of_range_names_the_column(bad: int) -> None:
    net = TabularNet([9, 4], 0, hidden=[], out_features=1)
    with pytest.raises(ValueError, match=r"categorical column 1 takes indices 0 to 3, got -?\d to \d"):
        net(torch.tensor([[0, 0], [0, bad]]), torch.zeros(2, 0))


def test_a_wrong_number_of_columns_is_refused() -> None:
    net = TabularNet([9, 4], 3, hidden=[], out_features=1)
    with pytest.raises(ValueError, match=r"takes \(batch, 2\) categories and \(batch, 3\) numbers"):
        net(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cardinalities": [0]}, "cardinalities and embedding_dims must be at least 1"),
        ({"embedding_dims": [1, 2]}, "one width for each of 1 categorical columns, got 2"),
        ({"cardinalities": [], "num_numeric": 0}, "must be a categorical or numeric column"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"embedding_dropout": -0.1}, "embedding_dropout must be at least 0 and below 1"),
        ({"out_features": 0}, "out_features must be at least 1"),
        ({"activation": "reul"}, "activation must be one of"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"cardinalities": [3], "num_numeric": 1, "hidden": [2], "out_features": 1}
    with pytest.raises(ValueError, match=message):
        TabularNet(**{**good, **arguments})


def test_an_ensemble_predicts_the_mean_of_its_members() -> None:
    sizes = {"members": 3, "cardinalities": [4], "num_numeric": 2, "hidden": [5], "out_features": 1}
    network = ModelSpec("tabular_ensemble", sizes).build()
    rows = torch.tensor([[1], [3]]), torch.randn(2, 2)
    each = network(*rows)
    assert each.shape == (2, 3, 1)
    assert torch.equal(network.eval()(*rows), each.mean(1))
