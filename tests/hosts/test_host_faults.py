"""Lost hosts and broken or slow links in a training with its only store on one host.

The first host has the master, the driver and the store; each of three other hosts has a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import disturbed
import pytest
from namespaces import Host, Network, refusal
from ranks import GANGS
from spark_hosts import SparkHosts

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(bool(refusal()), reason=f"no hosts here: {refusal()}"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkHosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with (
        Network(num_hosts=4) as network,
        SparkHosts(network, folder, is_first_a_worker=False, has_bucket=True) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: SparkHosts) -> list[float]:
    """Weights of an undisturbed training."""
    (told,) = cluster.results(cluster.drive(disturbed.SETTINGS | {"collective": "torch"}, **disturbed.DATA))
    return told["weights"]


@pytest.fixture
def revived(cluster: SparkHosts) -> Iterator[Callable[[Host], None]]:
    """Makes a host vanish, and restarts it after the test."""
    vanished = []

    def vanish(host: Host) -> None:
        cluster.network.vanish(host)
        vanished.append(host)

    yield vanish
    for host in vanished:
        cluster.revive(host)


@pytest.mark.parametrize("collective", GANGS)
def test_a_link_that_drops_for_5_s_costs_no_start(collective, cluster, undisturbed):
    outcome = disturbed.train(cluster, disturbed.drop(cluster, 5.0), collective=collective)
    assert outcome.told["restarts"] == []
    assert outcome.told["weights"] == pytest.approx(undisturbed, abs=1e-5)


@pytest.mark.parametrize(("collective", "rank"), list(zip(GANGS, (0, 1), strict=True)))
def test_a_link_that_drops_for_60_s_costs_one_start_elsewhere(collective, rank, cluster, undisturbed):
    outcome = disturbed.train(cluster, disturbed.drop(cluster, 60.0), rank=rank, collective=collective)
    assert len(outcome.told["restarts"]) == 1
    assert outcome.told["weights"] == pytest.approx(undisturbed, abs=1e-5)


@pytest.mark.parametrize("collective", GANGS)
def test_after_a_host_vanished_the_training_goes_on_at_another(collective, cluster, undisturbed, revived):
    outcome = disturbed.train(cluster, revived, collective=collective)
    assert len(outcome.told["restarts"]) == 1
    assert outcome.told["weights"] == pytest.approx(undisturbed, abs=1e-5)


def test_without_a_host_to_spare_fewer_go_on_or_an_error_names_both_numbers(cluster, undisturbed, revived):
    fewer = disturbed.train(cluster, revived, numWorkers=3, minWorkers=2, collective="torch")
    assert fewer.told["weights"] == pytest.approx(undisturbed, abs=1e-5)
    too_few = disturbed.train(cluster, revived, numWorkers=2, collective="torch")
    assert "1 task slots left for the 2 workers" in too_few.told["error"]


def test_200_ms_of_delay_change_no_weight(cluster: SparkHosts, undisturbed: list[float]) -> None:
    fits = [disturbed.SETTINGS | {"collective": name, "numWorkers": 3} for name in GANGS]
    with cluster.network.slowed_down(cluster.workers[0], 0.2):
        told = cluster.results(cluster.drive(*fits, **disturbed.DATA))
    for fit in told:
        assert fit["restarts"] == []
        assert fit["weights"] == pytest.approx(undisturbed, abs=1e-5)
