"""A gang over a network of hosts; skipped if no hosts can be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from namespaces import Network, refusal
from ranks import GANGS
from spark_hosts import SparkHosts

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(bool(refusal()), reason=f"no hosts here: {refusal()}"),
]
# Cases by their difference: options of the network and of Spark on it.
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "own names mean 127.0.1.1": ({"num_hosts": 2}, {}),
    "own names mean nothing": ({"num_hosts": 2, "own_names": "unknown"}, {}),
    "IPv6 only": ({"num_hosts": 2, "version": 6}, {}),
    "subnets, decoys, a driver elsewhere, a secret": (
        {"num_hosts": 3, "is_routed": True, "has_decoys": True},
        {"is_first_a_worker": False, "secret": "untold"},
    ),
    "no shared folder, a clock ahead": (
        {"num_hosts": 3},
        {"is_first_a_worker": False, "has_bucket": True, "clocks": {"host-b": 3600}},
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_both_collectives_train_over_several_hosts_and_agree(place: str, tmp_path: Path) -> None:
    options, spark = PLACES[place]
    with Network(**options) as network, SparkHosts(network, tmp_path, **spark) as cluster:
        told = cluster.results(cluster.drive(*({"collective": name} for name in GANGS)))
    assert [(fit["rows"], fit["restarts"]) for fit in told] == [(4000, [])] * len(GANGS)
    first, *others = (fit["weights"] for fit in told)
    for other in others:
        assert other == pytest.approx(first, abs=1e-5)
