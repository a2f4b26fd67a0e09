"""Predicted scaling with workers: closed forms, a published table, layers, and a measuring gang."""

import itertools
import math

import numpy as np
import pytest
import torch
from small_networks import Net
from torch import nn

from ringspark.extras.planning import FORMS, Link, fit_scaling, plan_scaling
from ringspark.extras.planning.exchange_time import hierarchical_seconds, ring_seconds, solve_link
from ringspark.extras.planning.work import count_layers
from ringspark.models import ModelSpec

# Minutes per epoch of a measured BERT training, by number of GPUs.
BERT = {1: 399.0, 2: 214.0, 4: 118.0, 8: 61.0}
SPEC = ModelSpec("mlp", {"in_features": 8, "hidden": [16], "out_features": 1})
ROWS = (((64, 8), "float32"), ((64,), "float32"))
STEPS = {16: 0.02, 64: 0.05}  # 10 ms and 0.625 ms per row
LINK = Link(alpha=1e-3, beta=1e-6)


def test_two_rows_of_the_bert_table_tell_the_others() -> None:
    """Tree rounds fitted to 1 and 2 GPUs predict within 4 %, and any two rows but the largest within 7 %."""
    assert [round(BERT[1] / (n * BERT[n]), 3) for n in (2, 4, 8)] == [0.932, 0.845, 0.818]
    worst = {}
    for form in FORMS:
        for pair in itertools.combinations(BERT, 2):
            fit = fit_scaling({n: BERT[n] for n in pair}, form)
            worst[form, pair] = max(abs(fit.time(n) / BERT[n] - 1) for n in BERT)
            assert all(fit.time(n) == pytest.approx(BERT[n]) for n in pair)
    assert worst["tree", (1, 2)] < 0.035
    assert max(error for (form, pair), error in worst.items() if form == "tree" and pair != (4, 8)) < 0.07
    assert worst["ring", (1, 2)] < 0.08
    assert max(error for (form, pair), error in worst.items() if form == "ring" and 1 in pair) < 0.08
    # Sequential work of one rank does not explain the table.
    assert worst["latency", (1, 2)] > 0.2
    fit = fit_scaling({1: 399, 2: 214}, "tree")
    for workers, efficiency in ((2, 0.932), (4, 0.845), (8, 0.818)):
        assert fit.efficiency(workers) == pytest.approx(efficiency, rel=0.04)
    assert "+0.0%" in str(fit)


@pytest.mark.parametrize("form", FORMS)
def test_more_times_than_unknowns_are_fitted_and_a_gain_is_no_exchange(form: str) -> None:
    times = {n: (100 + 7 * FORMS[form](n)) / n for n in (1, 2, 3, 8)}
    fit = fit_scaling(times, form)
    assert (fit.compute, fit.exchange) == pytest.approx((100, 7))
    assert fit.time(64) == pytest.approx((100 + 7 * FORMS[form](64)) / 64)
    faster = fit_scaling({1: 100, 2: 45}, form)
    assert faster.exchange == 0
    assert 45 * 2 < faster.compute < 100


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({1: 3.0}, "needs times for at least two numbers of workers, got 1"),
        ({1: 3.0, 0: 2.0}, "numbers of workers to times above 0, got 0: 2.0"),
        ({1: 3.0, 2: math.nan}, "got 2: nan"),
        ({True: 3.0, 2: 2.0}, "got True: 3.0"),
        ({2: 100.0, 4: 300.0}, "'ring' does not fit the times, which go from 100 with 2 workers to 300"),
    ],
)
def test_times_that_say_nothing_are_refused(measured: dict[int, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_scaling(measured)
    with pytest.raises(ValueError, match="form must be one of"):
        fit_scaling(BERT, "star")


def test_numbers_of_a_table_are_fitted_as_plain_ones() -> None:
    """A pandas column contains NumPy numbers."""
    table = dict(zip(np.array([1, 2]), np.array([399.0, 214.0]), strict=True))
    assert str(fit_scaling(table, "tree")) == str(fit_scaling({1: 399, 2: 214}, "tree"))


def test_a_step_that_costs_more_a_row_with_more_rows_has_its_measured_time() -> None:
    """An example is a working set larger than the cache. The fixed time must not be negative."""
    plan = plan_scaling(SPEC, ROWS, [1], stepSeconds={16: 0.005, 64: 0.05}, link=LINK)
    assert plan.fixed_seconds == 0
    assert plan.of(1).step_seconds == pytest.approx(0.05)
    quicker = plan_scaling(SPEC, ROWS, [1], stepSeconds={16: 0.06, 64: 0.05}, link=LINK)
    assert (quicker.row_seconds, quicker.of(1).step_seconds) == (0, pytest.approx(0.05))
    with pytest.raises(ValueError, match="stepSeconds must map at least two numbers of rows to seconds"):
        plan_scaling(SPEC, ROWS, [1], stepSeconds={16: 0.0, 64: 0.0}, link=LINK)


def test_the_workers_sum_as_many_bytes_as_the_gradients_have() -> None:
    for dtype, width in ((torch.bfloat16, 2), (torch.float64, 8)):
        module = nn.Linear(8, 4, dtype=dtype)
        plan = plan_scaling(module, ROWS, [2], stepSeconds=STEPS, link=LINK)
        assert plan.gradient_bytes == width * (8 * 4 + 4)


def test_a_link_is_solved_from_two_sums_and_gives_them_back() -> None:
    for ranks in (2, 3, 8):
        sums = [(size, ring_seconds(ranks, size, LINK)) for size in (1024, 1 << 20)]
        found = solve_link(ranks, *sums)
        assert (found.alpha, found.beta) == pytest.approx((LINK.alpha, LINK.beta))
    # 2(n-1) messages, 2(n-1)/n of the bytes.
    assert ring_seconds(4, 8e6, LINK) == pytest.approx(6e-3 + 12.0)
    network = Link.of_network(gigabits_per_second=1, milliseconds=5)
    assert (network.alpha, network.beta) == pytest.approx((0.005, 8e-9))


def test_two_levels_send_less_between_hosts_than_one_ring_over_all() -> None:
    between = Link(alpha=1e-2, beta=1e-5)
    two = hierarchical_seconds(8, 4, 1e6, LINK, between)
    assert two == pytest.approx(ring_seconds(4, 1e6, LINK) + ring_seconds(2, 1e6, between))
    assert two < ring_seconds(8, 1e6, between)
    compressed = hierarchical_seconds(8, 4, 1e6, LINK, between, compression=10)
    assert two - compressed == pytest.approx(0.9 * 1e6 * between.beta)
    assert hierarchical_seconds(4, 4, 1e6, LINK, between) == ring_seconds(4, 1e6, LINK)


def test_a_plan_of_given_figures_is_their_arithmetic() -> None:
    given = {"stepSeconds": STEPS, "link": LINK}
    plan = plan_scaling(SPEC, ROWS, [1, 2, 4], **given)
    parameters = 8 * 16 + 16 + 16 + 1
    assert plan.gradient_bytes == 4 * parameters
    four = plan.of(4)
    exchange = 6 * 1e-3 + 1.5 * 4 * parameters * 1e-6
    assert four.step_seconds == pytest.approx(0.05 + exchange)
    assert four.efficiency == pytest.approx(0.05 / (0.05 + exchange))
    assert four.cost == pytest.approx(1e6 / 64 * (0.05 + exchange))
    # Compression reduces bytes, not messages. Overlap hides a share, and ranks share cores.
    compressed, hidden, crowded = (
        plan_scaling(SPEC, ROWS, [4], **given, **more).of(4)
        for more in ({"compression": 100}, {"overlap": 0.5}, {"coresPerHost": 2})
    )
    assert compressed.exchange_seconds == pytest.approx(6e-3 + 1.5 * 4 * parameters * 1e-8)
    assert hidden.step_seconds == pytest.approx(0.05 + exchange / 2)
    assert crowded.step_seconds == pytest.approx(2 * (0.05 + exchange))
    # One global batch: each of 4 workers has 16 of 64 rows. 17 workers are not planned, as one batch has 16
    # rows.
    shared = plan_scaling(SPEC, ROWS, [4, 17], batchSize=16, pricePerWorkerHour=3.6, **given)
    assert [p.workers for p in shared.predictions] == [4]
    assert shared.of(4).compute_seconds == pytest.approx(0.01 + 4 * 0.000625)
    assert shared.of(4).cost == pytest.approx(1e6 / 4 * shared.of(4).step_seconds * 1e-3)


def test_a_slow_link_between_hosts_is_told_in_the_verdict() -> None:
    between = Link.of_network(gigabits_per_second=0.001, milliseconds=1)
    given = {"stepSeconds": STEPS, "link": LINK, "hierarchical": True}
    plan = plan_scaling(SPEC, ROWS, hostLink=between, workersPerHost=4, **given)
    assert len(plan.predictions) == 11
    assert "up to 4 workers each keep at least 80% of one worker's speed" in plan.table()
    assert "1,024" in plan._repr_html_()
    with pytest.raises(ValueError, match="hierarchical=True needs hostLink and workersPerHost"):
        plan_scaling(SPEC, ROWS, **given)
    with pytest.raises(ValueError, match=r"overlap must be from 0 to 1, got 1\.5"):
        plan_scaling(SPEC, ROWS, overlap=1.5)


def test_work_is_counted_and_of_two_branches_the_longer_one_is_the_depth() -> None:
    long = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    module = Net(lambda self, x: self.long(x) + self.short(x), long=long, short=nn.Linear(16, 16, bias=False))
    before = [p.clone() for p in module.parameters()]
    found = count_layers(module, [torch.zeros(10, 16)])
    layers = {layer.name: layer for layer in found.layers}
    assert {name: layer.work for name, layer in layers.items()} == {
        "long.0": 2 * 10 * 16 * 32,
        "long.1": 10 * 32,
        "long.2": 2 * 10 * 32 * 16,
        "short": 2 * 10 * 16 * 16,
        "": 10 * 16,
    }
    # 1 + log2 of the terms: 16 terms, 1 for an element-wise operator, 32 terms.
    depths = {name: layer.depth for name, layer in layers.items()}
    assert depths == {"long.0": 5, "long.1": 1, "long.2": 6, "short": 5, "": 1}
    assert found.depth == 5 + 1 + 6 + 1
    assert found.work == sum(layer.work for layer in found.layers)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_gang_measures_what_is_not_given() -> None:
    batch = (np.zeros((64, 8), "f4"), np.zeros(64, "f4"))
    plan = plan_scaling(SPEC, batch, [1, 2], repeats=3)
    assert set(plan.step_seconds) == {16, 64}
    assert all(seconds > 0 for seconds in plan.step_seconds.values())
    # On a busy machine the line through the times of the all-reduces may begin at 0.
    assert plan.link.alpha + plan.link.beta > 0
    assert plan.of(2).exchange_seconds > 0
    assert plan.network is not None
    assert "trunk.0.linear" in str(plan)
