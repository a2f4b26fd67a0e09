"""One training, hit once or many times: hit, see that it trains again, hit again; then look at everything."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import processes
import rows
from lab import Lab, names_below
from scenarios import Fault, Scene
from trainings import END_SECONDS, NUM_ROWS, Driver, Plan, difference
from waiting import wait_for

# Steps without a fault at either end of a training: a checkpoint before, and room to train on after.
FIRST_STEPS, LAST_STEPS = 5, 10
# By how much longer than a fault a part of the training lasts.
MARGIN = 1.3


@cache
def _commit() -> str:
    """The last that changed the packages; ends in "-dirty" where they were changed since, "" without git."""
    root = Path(__file__).resolve().parents[2]

    def git(*command: str) -> str:
        packages = ["--", "pipelines", "models", "estimators", "extras"]
        done = subprocess.run(["git", *command, *packages], cwd=root, capture_output=True, text=True)
        return done.stdout.strip()

    return git("log", "-1", "--format=%h") + ("-dirty" if git("status", "--porcelain") else "")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What became of one fault.

    Attributes:
        step: The last of rank 0 when the fault came.
        ended: The error's first line where the fit failed and was resumed, "" where it went through.
        starts: How often the ranks were started after it.
        repeated: Steps trained twice, of all ranks together once.
        pause_seconds: See `rows.longest_pause`; includes the wait for `timeoutSeconds` where a hang had to
            be noticed.
        spark_seconds: Of these, Spark's own: starting an executor, or the driver's session.
        problems: What must not be; empty in a good run. What is wrong at a training's end stands with all
            of its moments.
        commit: Of the packages.
    """

    target: str
    kind: str
    seed: int
    step: int
    ended: str
    repeated: int
    pause_seconds: float
    spark_seconds: float
    problems: tuple[str, ...]
    starts: int = 0
    commit: str = field(default_factory=_commit)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def most_hits(lab: Lab, fault: Fault, hits: int) -> int:
    """How many of `hits` one training can take."""
    return min(hits, lab.epochs - 1) if fault.an_epoch_each else hits


def run(lab: Lab, fault: Fault, seeds: Sequence[int], collective: str | None = None) -> list[Moment]:
    """One training that is hit once for each seed, at a random step of as many equal parts.

    Args:
        seeds: No more than `most_hits`.
        collective: Drawn from the first seed if not given.
    """
    draws = [random.Random(f"{fault.target}, {fault.kind}, {seed}") for seed in seeds]
    drawn = draws[0].choice(["torch", "horovod"])
    if fault.mesh:
        collective = "torch"  # Horovod has no parts of a gang
    driver = lab.driver(fault.place)
    name = f"{fault.target}-{fault.kind}-{seeds[0]}-{time.monotonic_ns()}".replace(" ", "-")
    lab.shards()
    plan = lab.plan(name, collective or drawn, max_restarts=len(seeds) + 2, mesh=fault.mesh)
    reference = lab.reference(driver, plan, fault.place)
    if fault.an_epoch_each:
        # Early enough in each for the harness to be late.
        steps = [int((number + 0.8 * draw.random()) * plan.epoch_steps) for number, draw in enumerate(draws)]
    else:
        part = (lab.epochs * plan.epoch_steps - FIRST_STEPS - LAST_STEPS) / len(seeds)
        steps = [FIRST_STEPS + int((number + draw.random()) * part) for number, draw in enumerate(draws)]
        # Where training goes on meanwhile, its end must not come before the last fault has.
        plan = replace(plan, pause_seconds=max(plan.pause_seconds, fault.lasts * MARGIN / part))
    training = Training(lab, fault, lab.placed(plan, fault, name), driver)
    answer = training.go(list(zip(seeds, draws, steps, strict=True)))
    return training.moments(answer, reference)


@dataclass(kw_only=True)
class _Hit:
    """A fault that has come; times are seconds since the epoch."""

    seed: int
    step: int
    began: float
    done: float = math.inf
    ended: str = ""
    spark_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    rank: int | None = None


class Training:
    """One fit and its resumptions."""

    def __init__(self, lab: Lab, fault: Fault, plan: Plan, driver: Driver) -> None:
        self._lab = lab
        self._fault = fault
        self._plan = plan
        self._driver = driver
        self._diaries = rows.Diaries(plan.diary)
        self._hits: list[_Hit] = []
        # Repairs what the last hit broke for good.
        self._undo = ExitStack()

    def go(self, hits: list[tuple[int, random.Random, int]]) -> dict[str, Any]:
        """Trains, hit at each (seed, draw, step), to the end; the last fit's answer."""
        with self._undo:
            self._driver.begin(self._plan)
            try:
                self._wait_for_step(1)
                self._driver.note_memory()  # takes as long as many steps
                for seed, draw, step in hits:
                    self._hit(seed, draw, self._wait_for_step(step))
            finally:
                self._plan.nothing_comes()
            while True:
                answer = self._answer(END_SECONDS)
                assert answer is not None
                if answer["ok"] or not self._may_resume():
                    self._note_executors()
                    return answer
                self._resume(answer)

    def moments(self, answer: dict[str, Any], reference: dict[str, Any]) -> list[Moment]:
        """What became of each hit."""
        problems = self._problems_after(answer, reference)
        lines = self._diaries.read()
        moments = []
        for number, hit in enumerate(self._hits):
            end = self._hits[number + 1].began if number + 1 < len(self._hits) else math.inf
            starts = [line for line in lines if line["what"] == "start" and hit.began < line["time"] <= end]
            starts = [line for line in starts if line["rank"] == 0]
            if self._fault.restarts and not starts:
                hit.problems.append("nobody was started after it: the fault did nothing")
            if self._fault.blamed not in hit.ended:
                hit.problems.append(f"no error named {self._fault.blamed}: {hit.ended!r}")
            if hit.step >= self._lab.epochs * self._plan.epoch_steps - 1:
                hit.problems.append("it came after the last step but one: nothing was left to train")
            reasons = answer.get("restart_reasons", [])
            named = f"rank {hit.rank} on host "
            if hit.rank is not None and not any(named in r and "no heartbeat" in r for r in reasons):
                hit.problems.append(f"rank {hit.rank} was stopped, and the restarts name others: {reasons}")
            pause = rows.longest_pause(lines, hit.began, end)
            moments.append(
                Moment(
                    target=self._fault.target,
                    kind=self._fault.kind,
                    seed=hit.seed,
                    step=hit.step,
                    ended=hit.ended,
                    repeated=rows.repeated(lines, hit.began, end),
                    pause_seconds=pause,
                    spark_seconds=min(pause, hit.spark_seconds),
                    starts=len(starts),
                    problems=(*hit.problems, *problems),
                )
            )
        return moments

    def _hit(self, seed: int, draw: random.Random, pids: dict[int, int]) -> None:
        self._undo.close()
        self._note_executors()
        self._lab.heal(self._fault.place)
        time.sleep(draw.random() * 0.05)
        last = rows.steps_of(self._diaries.read())[-1]["step"]
        hit = _Hit(seed=seed, step=last, began=time.time())
        self._hits.append(hit)
        bucket = self._lab.bucket() if self._fault.place.startswith("s3") else None
        scene = Scene(
            driver=self._driver, plan=self._plan, pids=pids, draw=draw, undo=self._undo, bucket=bucket
        )
        self._fault.act(scene)
        hit.done, hit.rank = time.time(), scene.stopped

    def _wait_for_step(self, step: int) -> dict[int, int]:
        """Until that step is trained, by ranks that have got over the last hit; their process ids."""
        pids: dict[int, int] = {}

        def reached() -> bool:
            if (answer := self._answer(0.0)) is not None:
                assert not answer["ok"], f"the training ended before step {step}"
                assert self._may_resume(), f"{answer['type']}: {answer['message'][:1000]}"
                self._resume(answer)
            pids.clear()
            pids.update(self._pids_that_train(step))
            time.sleep(0.1)  # reading all lines costs the ranks' time
            return bool(pids)

        wait_for(f"step {step}", reached, END_SECONDS)
        return pids

    def _pids_that_train(self, step: int) -> dict[int, int]:
        """Of each rank; empty while they have not got over the last hit or not come to that step."""
        lines = self._diaries.read()
        if self._hits:
            lines = [line for line in lines if line["time"] > self._hits[-1].done]
            if self._fault.restarts:
                starts = [line["time"] for line in lines if line["what"] == "start" and line["rank"] == 0]
                lines = [line for line in lines if starts and line["time"] > starts[-1]]
        size = self._plan.num_workers
        # Two: the ranks that are left may still end the step in which one was hit.
        if any(len(rows.steps_of(lines, rank)) < 2 for rank in range(size)):
            return {}
        if max(line["step"] for line in lines) < step:
            return {}
        pids = {line["rank"]: line["pid"] for line in lines}
        return pids if all(processes.pid_lives(pid) for pid in pids.values()) else {}

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        """Of the fit that runs; None where it has not ended."""
        try:
            return self._driver.answer(seconds)
        except AssertionError as error:
            if self._driver.lives:
                if seconds:
                    raise
                return None
            return {"ok": False, "type": "DriverDied", "message": str(error).splitlines()[0]}

    def _may_resume(self) -> bool:
        """Whether no fit has ended since the last hit."""
        return bool(self._hits) and not self._hits[-1].ended

    def _resume(self, answer: dict[str, Any]) -> None:
        hit = self._hits[-1]
        message = str(answer["message"]).replace(f"{self._lab.root}/", "")
        hit.ended = f"{answer['type']}: {message}".splitlines()[0]
        hit.problems += _problems_of(answer, self._fault)
        self._undo.close()
        self._note_executors()
        self._driver = self._lab.driver(self._fault.place)
        if answer["type"] == "DriverDied":
            hit.spark_seconds += self._driver.spark_seconds
        self._driver.begin(self._plan, resume=True)

    def _note_executors(self) -> None:
        """Counts what Spark took to replace an executor after the last hit, if this driver saw it."""
        if self._hits and not self._hits[-1].spark_seconds:
            self._hits[-1].spark_seconds = self._driver.executor_seconds(self._hits[-1].began)

    def _problems_after(self, answer: dict[str, Any], reference: dict[str, Any]) -> list[str]:
        """What is wrong with the training, now that it has ended."""
        plan = self._plan
        if not answer["ok"]:
            return [f"the resumed fit failed: {answer['type']}: {answer['message'][:500]}"]
        problems = rows.check(self._diaries.read(), NUM_ROWS).problems
        # Horovod joins gradients as they come: with three ranks the order of additions varies by itself.
        allowed = 1e-5 if plan.collective == "horovod" else 0.0
        distance = difference(answer["weights"], reference)
        if not distance <= allowed:
            problems.append(f"weights differ by {distance:.1e}")
        if self._fault.place == "small disk" and not self._hits[-1].ended and not answer["checkpoint_errors"]:
            problems.append("no checkpoint met the full disk")
        problems += self._driver.left_over()
        problems += [f"left over after the driver: {line}" for line in self._lab.closed()]
        # The temporary files of this process's own, and what a committed run must not hold.
        if Path(plan.run).is_absolute():
            left = names_below(Path(plan.run)) - self._lab.names(plan, self._fault.place)
            # What a rank said of its end, and the losses of one more start, are to stay.
            left = {name for name in left if not name.startswith(("logs/rank-", "steps/"))}
            problems += [f"left over in the finished run: {name}" for name in sorted(left)]
            # The diaries are small, the runs are not needed any more.
            shutil.rmtree(plan.run, ignore_errors=True)
        return problems


def _problems_of(answer: dict[str, Any], fault: Fault) -> list[str]:
    """What is wrong with the way in which a fit failed."""
    problems = []
    if fault.must_survive:
        problems.append(f"the fit did not survive: {answer['type']}: {answer['message'][:1000]}")
    elif "py4j" in answer["type"].lower() or "An error occurred while calling" in answer["message"]:
        problems.append(f"no readable error: {answer['message'][:500]}")
    return problems
