"""The choice of a pack's members by held-out rows."""

from typing import Any

import torch
from small_training import epoch_record

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.selection import Pack, calibrated
from ringspark.extras.pretraining.table_networks import MaskedTabPack
from ringspark.extras.tables.tabpack import TabPack


def pack() -> TabPack:
    torch.manual_seed(0)
    members = {"dropouts": [0.0] * 3, "rates": [1.0] * 3, "averages": "probabilities"}
    return TabPack([[-1.0, 0.0, 1.0]], [], 2, width=4, **members).eval()


def batch(labels: list[int], weights: list[float] | None = None) -> Batch:
    x = torch.linspace(-1, 1, len(labels))[:, None]
    weight = None if weights is None else torch.tensor(weights)
    ids = torch.zeros(len(labels), 0, dtype=torch.int64)
    return Batch(inputs=(x, ids), labels=(torch.tensor(labels),), weight=weight)


def shares(*batches: Batch) -> Any:
    net = pack()
    net.choose_on(batches, LocalCollective(), is_classes=True)
    return net.shares


def test_batches_without_rows_and_ignored_rows_change_nothing() -> None:
    labels = [0, 1, 1, 0, 1, 0, 0, 1]
    expected = shares(batch(labels))
    assert torch.equal(shares(batch(labels), batch([])), expected)
    # Rows of weight 0 count as little as rows of the class that cross entropy ignores.
    ignored = [-100 if row % 3 == 0 else label for row, label in enumerate(labels)]
    weighted = batch(labels, [0.0 if row % 3 == 0 else 1.0 for row in range(8)])
    assert torch.equal(shares(batch(ignored)), shares(weighted))
    assert float(expected.sum()) == 1.0


def test_a_pack_that_learns_without_a_label_chooses_no_members() -> None:
    assert isinstance(pack(), Pack)
    assert not isinstance(MaskedTabPack([[-1.0, 0.0, 1.0]], []), Pack)


def test_a_saved_network_is_calibrated_within_bounds_and_the_training_is_not() -> None:
    net: Any = pack()
    for found, expected in ((1.5, 1.5), (0.125, 0.5), (8.0, 4.0), (float("nan"), 1.0)):
        with calibrated(net, epoch_record(metrics={"validation_temperature": found})):
            assert float(net.temperature) == expected
        assert float(net.temperature) == 1.0
