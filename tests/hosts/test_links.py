"""The shaped links between hosts have the specified rate and delay; skipped if none can be made."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch
from links import link_refusal, shaped_hosts, wire_bytes

pytestmark = pytest.mark.skipif(bool(link_refusal()), reason=f"no shaped links here: {link_refusal()}")


def test_a_transfer_takes_the_rate_and_the_delay_that_were_asked_for() -> None:
    with shaped_hosts(2, mbit=20, delay_ms=5) as hosts:
        assert 16 < hosts.mbit < 25
        assert hosts.round_trip_ms >= 5
        left = {host.space for host in hosts.hosts}
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not {space for space in left if space in listed}


def summed(collective: Any, length: int) -> dict[str, Any]:
    """All-reduces a tensor, and returns the bytes on the wire."""
    before = wire_bytes()
    total = collective.all_reduce(torch.full((length,), collective.rank + 1.0))
    collective.barrier()
    member = collective.member
    return {
        "sum": total[0].item(), "bytes": wire_bytes() - before,
        "place": [member.rank, member.local_rank, member.local_size, member.cross_rank, member.cross_size],
    }  # fmt: skip


def failing(collective: Any) -> None:
    """Fails on the last rank."""
    if collective.rank == collective.size - 1:
        raise ValueError("this rank fails")
    collective.barrier()


@pytest.mark.slow
def test_a_gang_on_two_hosts_sums_and_sends_its_bytes_over_their_link() -> None:
    length = 1_000_000
    with shaped_hosts(2) as hosts:
        for name in ("torch", "horovod"):
            told = hosts.run(summed, length, ranks_per_host=2, collective=name)
            assert [rank["sum"] for rank in told] == [10.0] * 4
            assert [rank["place"] for rank in told] == [
                [0, 0, 2, 0, 2], [1, 1, 2, 0, 2], [2, 0, 2, 1, 2], [3, 1, 2, 1, 2],
            ]  # fmt: skip
            # In a ring, each host sends as much as one of its ranks: 2 (N - 1) / N of the tensor.
            assert all(rank["bytes"] >= 1.5 * 4 * length for rank in told)
        with pytest.raises(RuntimeError, match="this rank fails"):
            hosts.run(failing)
