"""A gang whose ranks are on hosts of their own, over a network; skipped where none can be made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Network, refusal
from spark_hosts import SparkHosts

from ringspark.estimators.collectives import COLLECTIVES

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(bool(refusal()), reason=f"no hosts here: {refusal()}"),
]
GANGS = [name for name in COLLECTIVES if name != "local"]


@pytest.fixture(params=["loopback", "unknown"])
def cluster(request: Any, tmp_path: Path) -> Iterator[SparkHosts]:
    """Two hosts, by how each resolves its own name."""
    with Network(2, own_names=request.param) as network, SparkHosts(network, tmp_path) as cluster:
        yield cluster


def test_both_collectives_train_over_two_hosts_and_agree(cluster: SparkHosts) -> None:
    weights = {}
    for collective in GANGS:
        told = cluster.result(cluster.drive(collective=collective))
        assert (told["rows"], told["restarts"]) == (4000, 0)
        weights[collective] = [number for tensor in told["weights"] for number in tensor]
    first, *others = weights.values()
    for other in others:
        assert other == pytest.approx(first, abs=1e-5)
