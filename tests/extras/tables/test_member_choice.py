"""The choice of a pack's members by held-out rows."""

from typing import Any

import pytest
import torch
from small_training import epoch_record

from ringspark.estimators.collectives.in_process import InProcessCollective, run_in_turns
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
    net.choose_on(batches, LocalCollective(), is_classes=True, loss="cross_entropy_per_member")
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


def count_pack() -> TabPack:
    torch.manual_seed(0)
    options = {"dropouts": [0.0] * 3, "rates": [1.0] * 3, "center": 0.5, "link": "log"}
    net = TabPack([[-1.0, 0.0, 1.0]], [], 1, width=4, **options).eval()
    with torch.no_grad():
        net.head.bias[2] += 2.0  # predicts far too much
    return net


def count_batch(rows: range) -> Batch:
    x = torch.linspace(-1, 1, 20)[rows.start : rows.stop, None]
    ids = torch.zeros(len(x), 0, dtype=torch.int64)
    offset = torch.linspace(0, 2, 20)[rows.start : rows.stop]
    labels = torch.tensor([0, 2, 1, 7, 3] * 4)[rows.start : rows.stop]
    return Batch(inputs=(x, ids, offset), labels=(labels,), weight=1.0 + labels % 2)


def test_members_of_counts_are_chosen_by_the_deviance_over_all_ranks() -> None:
    whole = count_batch(range(20))
    net, alone = count_pack(), LocalCollective()
    found = net.candidates(*whole.inputs)[:3, :, 0].double()
    net.choose_on([whole], alone, is_classes=False, loss="poisson_per_member")
    label, weight = whole.labels[0].double(), whole.weight
    assert weight is not None

    def deviance(shares: torch.Tensor) -> float:
        mean = shares.double() @ found
        return float(((mean - label * mean.log()) * weight).sum())

    # Half of the shares are equal; the other half is the greedy choice.
    chosen = 2 * net.shares - 1 / 3
    assert float(chosen.sum()) == pytest.approx(1.0)
    steps = torch.cartesian_prod(*[torch.arange(11)] * 3)
    best = min(deviance(each / 10) for each in steps[steps.sum(1) == 10])
    assert deviance(chosen) <= best + 0.02
    # Three ranks: one has no rows.
    given, packs = [range(7), range(7, 20), range(0)], [count_pack() for _ in range(3)]

    def work(collective: InProcessCollective) -> None:
        batches = [count_batch(given[collective.rank])]
        packs[collective.rank].choose_on(batches, collective, is_classes=False, loss="poisson_per_member")

    run_in_turns(3, work)
    assert all(torch.equal(each.shares, net.shares) for each in packs)
    # The prediction is the mean of the members' positive means, and the offset multiplies it.
    x, ids, offset = whole.inputs
    torch.testing.assert_close(net(*whole.inputs)[:, 0], (net.shares.double() @ found).float())
    torch.testing.assert_close(net(x, ids, offset + 1), net(*whole.inputs) * torch.tensor(1.0).exp())
