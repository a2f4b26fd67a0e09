"""Ranks and slots, and the gang itself on Spark."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from supervised_gang import run_gang

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import COLLECTIVES, Collective
from ringspark.estimators.launch.gang_task import assign_ranks
from ringspark.estimators.launch.slots import check_slots, count_slots
from ringspark.estimators.training.phase import Status


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=12))
def test_ranks_are_grouped_by_host(hosts: list[str]) -> None:
    members = assign_ranks(hosts)
    assert sorted(m.rank for m in members) == list(range(len(hosts)))
    assert [m.host for m in members] == hosts
    for host in set(hosts):
        here = sorted((m for m in members if m.host == host), key=lambda m: m.rank)
        assert [m.local_rank for m in here] == list(range(len(here)))
        assert {m.local_size for m in here} == {len(here)}
        # Neighbours: no rank of another host in between.
        assert here[-1].rank - here[0].rank == len(here) - 1
    for local_rank in {m.local_rank for m in members}:
        cross = [m for m in members if m.local_rank == local_rank]
        assert sorted(m.cross_rank for m in cross) == list(range(len(cross)))
        assert {m.cross_size for m in cross} == {len(cross)}


def _sum_of_ranks(collective: Collective, device: str, status: Status) -> str:
    total = collective.all_reduce(torch.tensor([float(collective.rank)]))
    left = [k for k in os.environ if k.startswith(("HOROVOD_", "GLOO_SOCKET"))]
    return f"{collective.rank} of {collective.size}: {total.item()} {device} {left}"


@pytest.mark.spark
@pytest.mark.modes
@pytest.mark.parametrize("name", [n for n in COLLECTIVES if n != "local"])
def test_a_gang_runs_in_reused_workers_again_and_again(spark: Any, name: str) -> None:
    expected = ["0 of 2: 1.0 cpu []", "1 of 2: 1.0 cpu []"]
    for _ in range(2):
        assert run_gang(spark, 2, name, _sum_of_ranks) == expected


def _fails(collective: Collective, device: str, status: Status) -> str:
    status.phase = "step 3"
    if collective.rank == 1:
        raise ZeroDivisionError("on purpose")
    collective.all_reduce(torch.ones(1))
    return "unreachable"


@pytest.mark.spark
@pytest.mark.modes
def test_a_failure_is_one_readable_error_and_the_next_gang_works(spark: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        run_gang(spark, 2, "horovod", _fails)
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith("rank 1 on host ")
    assert first_line.endswith("failed in phase 'step 3': ZeroDivisionError: on purpose")
    assert "py4j" not in str(caught.value)
    assert len(run_gang(spark, 2, "horovod", _sum_of_ranks)) == 2


@pytest.mark.spark
@pytest.mark.modes
def test_more_workers_than_slots_is_refused_before_spark_starts_anything(
    spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And where slots stay idle, the log says how many threads a worker has."""
    slots = count_slots(spark)
    assert slots is not None
    with caplog.at_level(logging.INFO):
        check_slots(spark, slots)
        assert not caplog.text
        check_slots(spark, 1)
    assert f"1 of {slots} task slots, each with spark.task.cpus=1 threads; raise numWorkers" in caplog.text
    with pytest.raises(
        ValueError, match=rf"numWorkers \({slots + 1}\) must not exceed the {slots} task slots"
    ):
        check_slots(spark, slots + 1)
