"""Hidden communication: the arithmetic, the records of ranks, and the report of a training."""

import json
import os
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_spans import one_step
from ranks import TORCH_AND_SLOW_OTHERS, run_ranks
from small_training import columns_of, config_of, train_gang
from torch import nn
from waiting import wait_for

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import Collective, CollectiveError
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.operation_times import OperationTime
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.training.observation import overlap as intervals
from ringspark.estimators.training.observation.timeline import Timeline, now_ns
from ringspark.extras.timeline.span_file import read_spans
from ringspark.extras.timeline.trace import chrome_trace, make_slices, time_shares
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

WATCHER = "ringspark-operations"
SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16, 16], "out_features": 1})
GANG: dict[str, Any] = {"model": SPEC, "num_workers": 2, "collective": "torch"}


@pytest.fixture
def manifest(make_shards: Any) -> ShardManifest:
    """26 steps of at most 32 rows per epoch."""
    return make_shards(columns_of(803))


INTERVAL = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))


def _points(some: list[tuple[int, int]]) -> set[int]:
    return {point for begin, end in some for point in range(begin, end)}


def _operation(begin: int, end: int, *blocked: tuple[int, int]) -> OperationTime:
    return OperationTime(name="sum", ready_ns=begin, begin_ns=begin, end_ns=end, blocked=blocked)


OPERATIONS = st.lists(st.tuples(INTERVAL, st.lists(INTERVAL, max_size=2)), max_size=6)


@given(OPERATIONS, st.lists(INTERVAL, max_size=8))
def test_sets_of_intervals_are_sets_of_points(sums: Any, computing: list[tuple[int, int]]) -> None:
    operations = [_operation(*own, *blocked) for own, blocked in sums]
    hidden, total = intervals.hidden_and_total(operations, computing)
    communicated = _points([own for own, _ in sums])
    waited = _points([interval for _, blocked in sums for interval in blocked])
    assert (hidden, total) == (len(communicated & _points(computing) - waited), len(communicated))


@pytest.mark.parametrize(
    ("operations", "computing", "expected"),
    [
        # Two concurrent all-reduces count once. Half of their time overlaps with the backward pass.
        ([_operation(10, 30), _operation(20, 50)], [(0, 30)], (20, 40)),
        # Waiting within the backward pass is not hidden.
        ([_operation(10, 40, (25, 40))], [(0, 60)], (15, 30)),
        # A second all-reduce that is waited for does not hide the first one.
        ([_operation(10, 40), _operation(20, 30, (20, 30))], [(0, 40)], (20, 30)),
        ([], [(0, 40)], (0, 0)),
    ],
)
def test_what_a_rank_waits_for_is_not_hidden(operations: Any, computing: Any, expected: Any) -> None:
    assert intervals.hidden_and_total(operations, computing) == expected


@pytest.mark.parametrize(("num_steps", "expected"), [(1, 1), (2, 1), (13, 1), (40, 3)])
def test_measured_steps_are_spread_over_an_epoch_a_short_one_has_one(num_steps: int, expected: int) -> None:
    """If ranks synchronize rarely, all steps are measured. If a library bypasses the records, none is."""
    for in_every_step, sees_all in ((True, True), (False, True), (True, False)):
        operations = (collective := LocalCollective()).operations
        operations.in_every_step, operations.sees_all = in_every_step, sees_all
        overlap = intervals.StepOverlap(collective, Timeline())
        for number in range(num_steps):
            with overlap.step(number, num_steps):
                pass
        assert (overlap.read() is None) != sees_all
        measured = expected if in_every_step else num_steps
        assert (overlap.num_steps, overlap.num_measured) == (num_steps, measured if sees_all else 0)


BucketBytes = int | Literal["chosen"] | None
WIDTH = 300
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
# Six layers have a little more than 2 MiB, so over a network they form buckets of a little more than 1 MiB.
CASES: dict[str, BucketBytes] = {"buckets": 2 * LAYER_BYTES, "flat": None, "chosen": "chosen"}


class Training:
    """A network whose gradients are sent in buckets or in one message."""

    def __init__(self, collective: Collective, bucket_bytes: BucketBytes) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        self._sync = GradientAllReduce(self.network, optimizer, collective, bucket_bytes=bucket_bytes)
        self._x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(collective.rank))

    def step(self) -> list[tuple[int, int]]:
        """Takes a step; returns when its kernels have finished."""
        begin = now_ns()
        with self._sync.micro_batch(last=True):
            self._sync.module(self._x).square().mean().backward()
        end = now_ns()
        self._sync.reduce()
        self._sync.optimizer.step()
        return [(begin, end)]


def _noted_steps(collective: Collective) -> Any:
    """Returns records of trainings with and without buckets, and whether weights equal unmeasured ones."""
    told: dict[str, Any] = {}
    for name, bucket_bytes in CASES.items():
        watched, alone = Training(collective, bucket_bytes), Training(collective, bucket_bytes)
        operations: tuple[OperationTime, ...] = ()
        shares = []
        for _ in range(3):
            alone.step()
            assert collective.operations.take() == ()
            collective.operations.start()
            computing = watched.step()
            operations = collective.operations.take()
            shares.append(intervals.hidden_and_total(operations, computing))
        told[name] = {
            "names": [o.name for o in operations],
            "ordered": all(o.ready_ns <= o.begin_ns <= o.end_ns <= now_ns() for o in operations),
            "in turn": all(a.begin_ns <= b.begin_ns for a, b in pairwise(operations)),
            "backward": computing[-1],
            "ready": [o.ready_ns for o in operations],
            "hidden": [hidden for hidden, _ in shares],
            "total": [total for _, total in shares],
            "same": all(map(torch.equal, watched.network.parameters(), alone.network.parameters())),
        }
    collective.operations.start()
    part = collective.start_reduce_scatter(torch.arange(8.0), [4, 4])()
    (scattered,) = collective.operations.take()
    told["part"] = part.tolist()
    told["scattered"] = [scattered.name, scattered.begin_ns <= scattered.end_ns, len(scattered.blocked)]
    return told


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_ranks_note_each_bucket_and_sum_the_same_bits(collective: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("RINGSPARK_SHARED_MEMORY", "0")
    for rank, told in enumerate(run_ranks(2, collective, _noted_steps)):
        buckets, flat = told["buckets"], told["flat"]
        assert buckets["names"] == ["gradients.0", "gradients.1", "gradients.2"]
        assert flat["names"] == ["gradients.0"]
        assert told["chosen"]["names"] == ["gradients.0", "gradients.1"]
        for case in (buckets, flat, told["chosen"]):
            assert (case["ordered"], case["in turn"], case["same"]) == (True, True, True)
            for hidden, total in zip(case["hidden"], case["total"], strict=True):
                assert 0 <= hidden <= total > 0
        # The first bucket's gradients are complete during the backward pass.
        assert buckets["ready"][0] < buckets["backward"][1]
        # On a busy machine, the all-reduces of one step may begin after its backward pass.
        assert max(buckets["hidden"]) > 0
        assert flat["hidden"] == [0, 0, 0]
        assert told["part"] == (2 * torch.arange(8.0))[4 * rank : 4 * rank + 4].tolist()
        assert told["scattered"] == ["reduce_scatter", True, 2]


@pytest.mark.distributed
def test_through_shared_memory_nothing_is_hidden() -> None:
    """Through shared memory an all-reduce only runs while it is waited for."""
    for told in run_ranks(2, "torch", _noted_steps):
        assert told["buckets"]["hidden"] == told["flat"]["hidden"] == [0, 0, 0]
        assert told["chosen"]["names"] == ["gradients.0"]
        assert min(told["buckets"]["total"]) > 0


def _sockets() -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum("socket:" in os.readlink(link) for link in links if os.path.islink(link))


def _leaves_a_sum(path: str, notes: bool, collective: Collective) -> str:
    """Rank 0 leaves during an all-reduce that rank 1 never starts, and writes its threads and sockets."""
    collective.barrier()
    if collective.rank == 1:
        # Any call would match the all-reduce that rank 0 has started. Gloo blocks the leaving rank until a
        # peer leaves, too.
        wait_for("rank 0 to leave", Path(f"{path}-leaves").exists, 60)
        raise CollectiveError("rank 0 leaves")
    if notes:
        collective.operations.start()
    wait = collective.start_sum(torch.ones(1_000), "alone")
    looked = WATCHER in {thread.name for thread in threading.enumerate()}
    del wait
    Path(f"{path}-leaves").touch()
    collective.abort()
    left = WATCHER in {thread.name for thread in threading.enumerate()}
    Path(path).write_text(json.dumps({"looked": looked, "left": left, "sockets": _sockets()}))
    raise CollectiveError("this rank has left")


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_a_rank_leaves_no_thread_and_no_connection(collective: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RINGSPARK_SHARED_MEMORY", "0")
    told = {}
    for notes in (False, True):
        path = tmp_path / f"told-{notes}"
        with pytest.raises(WorkerError):
            run_ranks(2, collective, partial(_leaves_a_sum, str(path), notes), timeout_seconds=20)
        told[notes] = json.loads(path.read_text())
    assert not told[False]["looked"]
    assert told[True]["looked"]
    assert not told[True]["left"]
    assert told[True]["sockets"] == told[False]["sockets"]


@pytest.mark.distributed
def test_a_training_and_its_timeline_show_the_sums(manifest: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RINGSPARK_SHARED_MEMORY", "0")
    config = config_of(manifest, tmp_path / "run", timeline_every_steps=4, **GANG)
    result = train_gang(config)
    for row in TrainingSummary.of(result).history.itertuples():
        # A sample of the steps is extrapolated. On a loaded machine the result may exceed the epoch's time.
        assert row.communication_seconds > 0
        assert 0 <= row.communication_hidden <= 1
    ranks = read_spans(result.run_uri)
    for spans in ranks:
        for step in spans.steps:
            assert "gradients.0" in {name for name, *_ in step.operations}
            backward = max(end for kind, _, end in step.spans if kind == "backward")
            for name, ready, begin, end in step.operations:
                assert step.begin_ns <= ready <= begin <= end <= step.end_ns
                # Everything is sent in one message after the backward pass.
                assert name != "gradients.0" or begin >= backward
    pieces = make_slices(ranks)
    assert {piece.kind for piece in pieces if piece.lane} >= {"gradients.0"}
    for own in time_shares(result.run_uri).values():
        assert sum(own.values()) == pytest.approx(1)
        assert "gradients.0" not in own
    events = chrome_trace(result.run_uri)["traceEvents"]
    named = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {f"rank {rank}{row}" for rank in (0, 1) for row in ("", ", communication")}


@pytest.mark.distributed
def test_a_pipeline_does_not_pass_for_a_training_without_communication(manifest: Any, tmp_path: Path) -> None:
    """Its stages send without all-reduces. An earlier version reported 0 seconds for this."""
    stages = {"parallelism": {"pipeline": 2}, "gradient_accumulation": 2}
    config = config_of(manifest, tmp_path / "run", **stages, **GANG)
    for row in TrainingSummary.of(train_gang(config)).history.itertuples():
        assert row.bytes_sent > 0
        assert row.communication_seconds is None
        assert row.communication_hidden is None


def test_sums_at_a_time_have_threads_of_their_own_in_the_trace() -> None:
    """Perfetto drops a slice that partly overlaps another slice of its thread."""
    sums = ("a", 0, 10, 40), ("b", 5, 20, 50), ("c", 30, 40, 60), ("d", 45, 45, 70)
    lanes = {piece.kind: piece.lane for piece in make_slices([one_step(operations=sums)]) if piece.lane}
    assert lanes == {"a": 1, "b": 2, "c": 1, "d": 3}
