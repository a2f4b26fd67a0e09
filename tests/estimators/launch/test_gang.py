"""Rank and slot assignment, and gangs on Spark."""

from __future__ import annotations

import logging
import os
import time
import weakref
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyspark import TaskContext
from supervised_gang import run_gang

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import COLLECTIVES, Collective, Member, RendezvousInfo
from ringspark.estimators.collectives.horovod_collective import HorovodCollective, check_nccl
from ringspark.estimators.launch.gang_task import assign_ranks
from ringspark.estimators.launch.slots import check_slots, count_slots
from ringspark.estimators.training.phase import Status


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=12))
def test_ranks_are_grouped_by_host(hosts):
    members = assign_ranks(hosts)
    assert sorted(m.rank for m in members) == list(range(len(hosts)))
    assert [m.host for m in members] == hosts
    for host in set(hosts):
        here = sorted((m for m in members if m.host == host), key=lambda m: m.rank)
        assert [m.local_rank for m in here] == list(range(len(here)))
        assert {m.local_size for m in here} == {len(here)}
        # Ranks of one host are consecutive.
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
def test_a_gang_runs_in_reused_workers_again_and_again(spark, name):
    expected = ["0 of 2: 1.0 cpu []", "1 of 2: 1.0 cpu []"]
    for _ in range(2):
        assert run_gang(spark, 2, name, _sum_of_ranks) == expected


class _NeverComes:
    """Work whose second task dies while it is unpickled, so the first task waits alone in the rendezvous."""

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        return "unreachable"

    def __setstate__(self, state: object) -> None:
        if TaskContext.get().partitionId() == 1:
            os._exit(3)

    def __getstate__(self) -> object:
        return "state"


@pytest.mark.spark
@pytest.mark.slow
def test_a_rank_that_never_comes_ends_the_gang_in_the_usual_error(spark):
    with pytest.raises(WorkerError, match=r"WorkerLost: .* \(Python worker exited unexpectedly"):
        run_gang(spark, 2, "torch", _NeverComes(), max_restarts=0)
    assert len(run_gang(spark, 2, "torch", _sum_of_ranks)) == 2


def _fails(collective: Collective, device: str, status: Status) -> str:
    status.phase = "step 3"
    if collective.rank == 1:
        raise ZeroDivisionError("on purpose")
    collective.all_reduce(torch.ones(1))
    return "unreachable"


@pytest.mark.spark
@pytest.mark.modes
def test_a_failure_is_one_readable_error_and_the_next_gang_works(spark):
    with pytest.raises(WorkerError) as caught:
        run_gang(spark, 2, "horovod", _fails)
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith("rank 1 on host ")
    assert first_line.endswith("failed in phase 'step 3': ZeroDivisionError: on purpose")
    assert "py4j" not in str(caught.value)
    assert len(run_gang(spark, 2, "horovod", _sum_of_ranks)) == 2


def _fails_and_hangs(collective: Collective, device: str, status: Status) -> str:
    """Imitates NCCL: rank 1's abort waits for the device, rank 0 waits for data, and both send heartbeats."""
    if collective.rank == 1:
        collective.abort = lambda: time.sleep(3600)
        raise ZeroDivisionError("on purpose")
    while True:
        time.sleep(0.05)


@pytest.mark.spark
@pytest.mark.slow
def test_a_users_error_ends_a_gang_whose_ranks_all_hang(spark):
    with pytest.raises(WorkerError, match=r"^rank 1 .* ZeroDivisionError: on purpose"):
        run_gang(spark, 2, "torch", _fails_and_hangs, timeout_seconds=8.0)


def _leaves_a_cycle(path: str, fails: bool, collective: Collective, device: str, status: Status) -> str:
    """Keeps a tensor alive in a reference cycle; a fake CUDA records whether the tensor still exists."""
    holder: dict[str, Any] = {"tensor": torch.zeros(10)}
    holder["self"] = holder
    seen, kept = weakref.ref(holder["tensor"]), (torch.cuda.is_initialized, torch.cuda.empty_cache)

    def empty_cache() -> None:
        torch.cuda.is_initialized, torch.cuda.empty_cache = kept
        Path(path).write_text(f"held: {seen() is not None}")

    torch.cuda.is_initialized, torch.cuda.empty_cache = lambda: True, empty_cache
    if fails:
        raise ZeroDivisionError("on purpose")
    return "done"


@pytest.mark.spark
@pytest.mark.parametrize("fails", [False, True])
def test_a_task_gives_its_gpu_memory_back(spark, tmp_path, fails):
    """Spark reuses the Python worker, so torch would keep the memory."""
    path = tmp_path / "memory"
    with pytest.raises(WorkerError, match="on purpose") if fails else nullcontext():
        run_gang(spark, 1, "local", partial(_leaves_a_cycle, str(path), fails))
    assert path.read_text() == "held: False"


@pytest.mark.spark
def test_gpus_are_refused_to_a_horovod_without_nccl_before_anything_starts(spark, monkeypatch):
    """On a cluster, each worker checks too, because its Horovod may differ from the driver's."""
    sentence = "collective='horovod' needs a Horovod that is built with NCCL, .* set collective='torch'"
    with pytest.raises(ValueError, match=sentence):
        check_slots(spark, 1, use_gpu=True, collective="horovod")
    opened = HorovodCollective.open_rendezvous(Member(), b"secret")
    with closing(opened), pytest.raises(ValueError, match=sentence):
        HorovodCollective.connect(
            Member(), RendezvousInfo(address=opened.address, secret=b"secret", use_gpu=True)
        )
    monkeypatch.setattr("horovod.torch.nccl_built", lambda: 22703)
    check_nccl()


@pytest.mark.spark
@pytest.mark.modes
def test_more_workers_than_slots_is_refused_before_spark_starts_anything(spark, caplog):
    """If slots stay idle, the log reports the number of threads per worker."""
    slots = count_slots(spark)
    with caplog.at_level(logging.INFO):
        check_slots(spark, slots)
        assert not caplog.text
        check_slots(spark, 1)
    assert f"1 of {slots} task slots, each with spark.task.cpus=1 threads; raise numWorkers" in caplog.text
    refusal = rf"numWorkers \({slots + 1}\) must not exceed the {slots} task slots"
    with pytest.raises(ValueError, match=refusal):
        check_slots(spark, slots + 1)
