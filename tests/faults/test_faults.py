"""A seeded selection of the fault matrix, which `make faults` runs as a whole, and tests of the harness."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import meshes
import moments
import processes
import pytest
import rows
from cluster import Cluster
from lab import Lab
from scenarios import FAULTS, KINDS, find
from trainings import END_SECONDS, NUM_ROWS, Driver, Plan, difference
from waiting import wait_for

from ringspark.estimators import DiLoCo, ParameterServer

# Each seed's moment comes after several checkpoints; torch and Horovod alternate.
SELECTION = [
    ("another rank", "kill", 1),
    ("another rank", "hang", 0),
    ("network between ranks", "kill", 0),
    ("checkpoint file", "corruption", 0),
    ("driver", "kill", 2),
    ("pipeline2 x data2: first stage", "kill", 0),
]
# `make test` kills a rank in test_resume.py, and a rank of a pipeline in test_lost_ranks.py.
ALSO_IN_CORE = ("another rank", "pipeline2 x data2: first stage")
CASES = [
    pytest.param(
        target,
        kind,
        seed,
        id=f"{target}-{kind}",
        marks=[] if kind == "kill" and target in ALSO_IN_CORE else [pytest.mark.telling],
    )
    for target, kind, seed in SELECTION
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One driver for the scenarios that leave it alive; its leftovers are checked, too."""
    # Two epochs: the fault comes in either, and the training stays short.
    with Lab(epochs=2, timeout_seconds=20.0) as made:
        yield made
    assert not made.problems, made.problems


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("target", "kind", "seed"), CASES)
def test_a_fault_costs_steps_and_nothing_else(lab: Lab, target: str, kind: str, seed: int) -> None:
    fault = find(target, kind)
    if reason := lab.reason_not_to(fault):
        pytest.skip(reason)
    (moment,) = moments.run(lab, fault, [seed])
    assert not moment.problems, moment
    # It must not restart from the first step.
    assert moment.repeated < moment.step, moment


class TwoMachines:
    """A cluster of two machines with two slots each, and a driver; nothing replaces a lost machine."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.cluster = folder, Cluster(2)
        stack.callback(self.cluster.close)
        self.driver = Driver(self.cluster.url, keepers=self.cluster.pids, mark=self.cluster.mark)
        stack.callback(self.driver.close)
        self.driver.write_shards(str(folder / "shards"))

    def plan(self, name: str, collective: str, network: Any = None, **more: Any) -> Plan:
        # Dropout depends on the number of ranks.
        return Plan(
            run=str(self.folder / name / "run"),
            shards=str(self.folder / "shards"),
            diary=self.folder / name,
            num_workers=4,
            collective=collective,
            epochs=2,
            dropout=0.0,
            timeout_seconds=20.0,
            more={"minWorkers": 2, **more},
            network=network,
        )

    def lose_one(self, plan: Plan) -> dict[str, Any]:
        """Trains, kills a machine after 30 steps, and checks that the other one trains to the end."""
        self.driver.wait_for_executors(2)
        self.driver.begin(plan)
        wait_for("step 30", lambda: len(rows.steps_of(plan.lines())) >= 30, END_SECONDS)
        worker = processes.executor_jvm(plan.lines()[-1]["pid"]).parent()
        assert worker is not None
        processes.send(worker, signal.SIGKILL)
        plan.nothing_comes()
        answer = self.driver.answer(END_SECONDS)
        assert answer["ok"], answer
        assert not answer["checkpoint_errors"]
        assert rows.check(plan.lines(), NUM_ROWS).problems == []
        assert {line["size"] for line in plan.lines()} == {2, 4}
        assert self.driver.left_over() == []
        return answer


@pytest.fixture
def two_machines(tmp_path: Path) -> Iterator[TwoMachines]:
    with ExitStack() as stack:
        yield TwoMachines(tmp_path, stack)


@pytest.mark.spark
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["", "data2 x tensor2"])
def test_fewer_workers_go_on_where_a_machine_is_gone(two_machines: TwoMachines, mesh: str) -> None:
    """Of a mesh, one replica of two workers remains."""
    # Adam would divide by numbers close to zero.
    given: dict[str, Any] = {"collective": "horovod", "optimizer": "sgd"}
    if mesh:
        network = {**meshes.MESHES[mesh].network(), "dropout": 0.0}
        given |= {"collective": "torch", "network": network, **meshes.MESHES[mesh].settings()}
    undisturbed = two_machines.plan("undisturbed", **given)
    undisturbed.nothing_comes()
    two_machines.driver.wait_for_executors(2)
    reference = two_machines.driver.fit(undisturbed)
    assert reference["ok"], reference
    answer = two_machines.lose_one(two_machines.plan("disturbed", **given))
    assert difference(answer["weights"], reference["weights"]) <= 1e-5


@pytest.mark.spark
@pytest.mark.distributed
@pytest.mark.slow
def test_fewer_workers_that_run_apart_go_on_where_a_machine_is_gone(two_machines: TwoMachines) -> None:
    for name, sync in (
        ("ssp", ParameterServer(staleness=2)),
        ("streaming", DiLoCo(steps=4, fragments=2, delay=1, outer_momentum=0.5)),
    ):
        two_machines.lose_one(two_machines.plan(name, "torch", sync=sync, optimizer="momentum"))
        two_machines.cluster.heal()


def test_every_cell_is_one_fault() -> None:
    cells = [(fault.target, fault.kind) for fault in FAULTS]
    assert len(set(cells)) == len(cells)
    assert {kind for _, kind in cells} == set(KINDS)
    assert {(target, kind) for target, kind, _ in SELECTION} <= set(cells)


def _lines(ids: list[list[int]], rank: int = 0, size: int = 1, first: float = 0.0) -> list[rows.Line]:
    common = {"what": "step", "rank": rank, "size": size, "epoch": 1}
    return [common | {"step": n + 1, "ids": some, "time": first + n} for n, some in enumerate(ids)]


def test_the_diaries_tell_lost_and_repeated_rows() -> None:
    good = _lines([[0, 2], [1, 3]])
    assert rows.check(good, 4) == rows.Trained(problems=[], steps=2, repeated=0)
    again = [*good, *_lines([[0, 2], [1, 3]], first=10.0)]
    assert rows.check(again, 4) == rows.Trained(problems=[], steps=2, repeated=2)
    assert rows.longest_pause(again, fault=1.0) == pytest.approx(9.0)
    assert rows.longest_pause(again, fault=1.0, end=9.0) == 0.0
    repeated = [rows.repeated(again, 5.0), rows.repeated(again, 5.0, 10.0), rows.repeated(again, 0.5)]
    assert repeated == [2, 1, 2]
    other = rows.check([*good, *_lines([[0, 1], [2, 3]], first=10.0)], 4)
    assert other.problems == [f"rank 0 saw other rows in the repetition of step {step}" for step in (1, 2)]
    assert rows.check(_lines([[0, 2], [1, 1]]), 4).problems == ["epoch 1 saw 1 rows twice and 1 not at all"]
    # Only rank 0 had completed step 2 when its gang ended; the next gang repeats it on all ranks.
    starts = [{"what": "start", "rank": rank, "time": 9.5} for rank in (0, 1)]
    next_gang = [*_lines([[0], [2]], 1, 2, 10.0), *_lines([[1], [3]], 0, 2, 10.1)]
    both = [*_lines([[1], [3]], 0, 2), *_lines([[0]], 1, 2), *starts, *next_gang]
    assert rows.check(sorted(both, key=lambda line: line["time"]), 4).problems == []
    # With local SGD, one rank has completed two steps before the other one starts.
    early = [{"what": "start", "rank": 1, "time": 9.0}, *_lines([[1], [3]], 1, 2, 9.1)]
    apart = [*early, {"what": "start", "rank": 0, "time": 11.0}, *_lines([[0], [2]], 0, 2, 11.1)]
    assert rows.check(apart, 4).problems == []
    after = [*_lines([[0]], 0, 2), *_lines([[1]], 1, 2, 0.5), *apart]
    assert rows.check(after, 4) == rows.Trained(problems=[], steps=2, repeated=1)
    # With two replicas of two ranks, each replica reads its rows once, the same on all its ranks.
    copies = [
        {**line, "share": rank // 2}
        for rank in range(4)
        for line in _lines([[[0], [1]], [[2], [3]]][rank // 2], rank, 4, rank / 10)
    ]
    assert rows.check(copies, 4).problems == []
    copies[-1]["ids"] = [0]
    assert rows.check(copies, 4).problems == ["rank 3 saw other rows in step 2 than others of its copy"]
    lonely = rows.check(_lines([[0, 2], [1, 3]], size=2), 4)
    assert lonely.problems == [f"step {step} was trained last by the ranks [0] only" for step in (1, 2)]


def test_a_line_that_a_kill_cut_is_no_line(tmp_path: Path) -> None:
    diaries, file = rows.Diaries(tmp_path), tmp_path / "rank-0-1.jsonl"
    assert diaries.read() == []
    file.write_text('{"what": "step", "time": 1.0}\n{"what": "st')
    assert diaries.read() == diaries.read() == [{"what": "step", "time": 1.0}]
    file.write_text(file.read_text() + 'art", "time": 0.5}\n')
    assert diaries.read() == [{"what": "start", "time": 0.5}, {"what": "step", "time": 1.0}]
