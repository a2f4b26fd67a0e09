"""One training with one or more faults: injects each, waits until it trains again, then checks everything."""

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

# Steps without a fault at both ends of a training: for a checkpoint before, and training after.
FIRST_STEPS, LAST_STEPS = 5, 10
# Ratio of the duration of a part of the training to the fault's.
MARGIN = 1.3


@cache
def _commit() -> str:
    """Returns the last commit that changed the packages.

    It ends in "-dirty" for uncommitted changes, and is "" without git.
    """
    root = Path(__file__).resolve().parents[2]

    def git(*command: str) -> str:
        packages = ["--", "pipelines", "models", "estimators", "extras"]
        done = subprocess.run(["git", *command, *packages], cwd=root, capture_output=True, text=True)
        return done.stdout.strip()

    return git("log", "-1", "--format=%h") + ("-dirty" if git("status", "--porcelain") else "")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Outcome of one fault.

    Attributes:
        step: Last step of rank 0 before the fault.
        ended: First line of the error if the fit failed and was resumed, else "".
        starts: Number of starts of the ranks after it.
        repeated: Steps trained twice, counted once for all ranks.
        pause_seconds: See `rows.longest_pause`; includes `timeoutSeconds` if a hang had to be detected.
        spark_seconds: Spark's share of the pause: starting an executor, or the driver's session.
        problems: Violations; empty in a good run. Violations at a training's end are added to all of its
            moments.
        commit: Commit of the packages.
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
        return asdict(self)


def most_hits(lab: Lab, fault: Fault, hits: int) -> int:
    """Returns how many of `hits` fit into one training."""
    return min(hits, lab.epochs - 1) if fault.an_epoch_each else hits


def run(lab: Lab, fault: Fault, seeds: Sequence[int], collective: str | None = None) -> list[Moment]:
    """Runs one training with a fault per seed, at a random step in each of equal parts.

    Args:
        seeds: At most `most_hits`.
        collective: Chosen from the first seed if not given.
    """
    draws = [random.Random(f"{fault.target}, {fault.kind}, {seed}") for seed in seeds]
    drawn = draws[0].choice(["torch", "horovod"])
    if fault.mesh:
        collective = "torch"  # Horovod has no subgroups
    driver = lab.driver(fault.place)
    name = f"{fault.target}-{fault.kind}-{seeds[0]}-{time.monotonic_ns()}".replace(" ", "-")
    lab.shards()
    plan = lab.plan(name, collective or drawn, max_restarts=len(seeds) + 2, mesh=fault.mesh)
    reference = lab.reference(driver, plan, fault.place)
    if fault.an_epoch_each:
        # Early enough in each epoch for a late harness.
        steps = [int((number + 0.8 * draw.random()) * plan.epoch_steps) for number, draw in enumerate(draws)]
    else:
        part = (lab.epochs * plan.epoch_steps - FIRST_STEPS - LAST_STEPS) / len(seeds)
        steps = [FIRST_STEPS + int((number + draw.random()) * part) for number, draw in enumerate(draws)]
        # If training continues during a fault, it must not end before the last fault.
        plan = replace(plan, pause_seconds=max(plan.pause_seconds, fault.lasts * MARGIN / part))
    training = Training(lab, fault, lab.placed(plan, fault, name), driver)
    answer = training.go(list(zip(seeds, draws, steps, strict=True)))
    return training.moments(answer, reference)


@dataclass(kw_only=True)
class _Hit:
    """An injected fault; times are seconds since the epoch."""

    seed: int
    step: int
    began: float
    done: float = math.inf
    ended: str = ""
    spark_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    rank: int | None = None


class Training:
    """One fit and its resumes."""

    def __init__(self, lab: Lab, fault: Fault, plan: Plan, driver: Driver) -> None:
        self._lab = lab
        self._fault = fault
        self._plan = plan
        self._driver = driver
        self._diaries = rows.Diaries(plan.diary)
        self._hits: list[_Hit] = []
        # Repairs the permanent damage of the last fault.
        self._undo = ExitStack()

    def go(self, hits: list[tuple[int, random.Random, int]]) -> dict[str, Any]:
        """Trains to the end with a fault at each (seed, draw, step). Returns the last fit's answer."""
        with self._undo:
            self._driver.begin(self._plan)
            try:
                self._wait_for_step(1)
                self._driver.note_memory()  # takes the time of many steps
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
        """Waits until ranks that have recovered from the last fault have trained the step.

        Returns their process ids.
        """
        pids: dict[int, int] = {}

        def reached() -> bool:
            if (answer := self._answer(0.0)) is not None:
                assert not answer["ok"], f"the training ended before step {step}"
                assert self._may_resume(), f"{answer['type']}: {answer['message'][:1000]}"
                self._resume(answer)
            pids.clear()
            pids.update(self._pids_that_train(step))
            time.sleep(0.1)  # reading all lines slows the ranks down
            return bool(pids)

        wait_for(f"step {step}", reached, END_SECONDS)
        return pids

    def _pids_that_train(self, step: int) -> dict[int, int]:
        """Returns a pid per rank.

        It is empty until they have recovered from the last fault and reached the step.
        """
        lines = self._diaries.read()
        if self._hits:
            lines = [line for line in lines if line["time"] > self._hits[-1].done]
            if self._fault.restarts:
                starts = [line["time"] for line in lines if line["what"] == "start" and line["rank"] == 0]
                lines = [line for line in lines if starts and line["time"] > starts[-1]]
        size = self._plan.num_workers
        # Two, because the remaining ranks may complete the step in which one was hit.
        if any(len(rows.steps_of(lines, rank)) < 2 for rank in range(size)):
            return {}
        if max(line["step"] for line in lines) < step:
            return {}
        pids = {line["rank"]: line["pid"] for line in lines}
        return pids if all(processes.pid_lives(pid) for pid in pids.values()) else {}

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        """Returns the answer of the running fit, or None if it has not ended."""
        try:
            return self._driver.answer(seconds)
        except AssertionError as error:
            if self._driver.lives:
                if seconds:
                    raise
                return None
            return {"ok": False, "type": "DriverDied", "message": str(error).splitlines()[0]}

    def _may_resume(self) -> bool:
        """Returns whether no fit has ended since the last fault."""
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
        """Adds the time in which Spark replaced an executor after the last fault, if this driver saw it."""
        if self._hits and not self._hits[-1].spark_seconds:
            self._hits[-1].spark_seconds = self._driver.executor_seconds(self._hits[-1].began)

    def _problems_after(self, answer: dict[str, Any], reference: dict[str, Any]) -> list[str]:
        """Returns violations after the end of the training."""
        plan = self._plan
        if not answer["ok"]:
            return [f"the resumed fit failed: {answer['type']}: {answer['message'][:500]}"]
        problems = rows.check(self._diaries.read(), NUM_ROWS).problems
        # Horovod merges gradients as they arrive, so with three ranks the order of additions varies.
        allowed = 1e-5 if plan.collective == "horovod" else 0.0
        distance = difference(answer["weights"], reference)
        if not distance <= allowed:
            problems.append(f"weights differ by {distance:.1e}")
        if self._fault.place == "small disk" and not self._hits[-1].ended and not answer["checkpoint_errors"]:
            problems.append("no checkpoint met the full disk")
        problems += self._driver.left_over()
        problems += [f"left over after the driver: {line}" for line in self._lab.closed()]
        # Temporary files of this process, and files that a committed run must not contain.
        if Path(plan.run).is_absolute():
            left = names_below(Path(plan.run)) - self._lab.names(plan, self._fault.place)
            # A rank's last message and the losses of one more start are expected to remain.
            left = {name for name in left if not name.startswith(("logs/rank-", "steps/"))}
            problems += [f"left over in the finished run: {name}" for name in sorted(left)]
            # Keep the diaries, which are small, and delete the runs.
            shutil.rmtree(plan.run, ignore_errors=True)
        return problems


def _problems_of(answer: dict[str, Any], fault: Fault) -> list[str]:
    problems = []
    if fault.must_survive:
        problems.append(f"the fit did not survive: {answer['type']}: {answer['message'][:1000]}")
    elif "py4j" in answer["type"].lower() or "An error occurred while calling" in answer["message"]:
        problems.append(f"no readable error: {answer['message'][:500]}")
    return problems
