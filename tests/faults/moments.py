"""One fault at one moment: train, hit, let it end, resume where it must be, and look at everything."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import rows
import sockets
import stores
from cluster import Cluster
from scenarios import Fault, Place, Scene
from trainings import (
    END_SECONDS,
    EPOCH_STEPS,
    EPOCHS,
    LOCAL_CLUSTER,
    NUM_ROWS,
    NUM_WORKERS,
    TIMEOUT_SECONDS,
    Driver,
    Plan,
    difference,
    wait_for_step,
)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What became of one training.

    Attributes:
        step: After which the fault came.
        ended: The error's first line where the fit failed and was resumed, "" where it went through.
        repeated: Steps trained twice, of all ranks together once.
        pause_seconds: See `rows.longest_pause`; includes the wait for `timeoutSeconds` where a hang had to
            be noticed.
        spark_seconds: Of these, Spark's own: starting an executor, or the driver's session.
        problems: What must not be; empty in a good run.
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

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class Lab:
    """Drivers, clusters, stores and reference runs, made when they are needed first; a context manager.

    Args:
        epochs: Of every training.
        timeout_seconds: Of every training; a busy machine takes longer to start a rank than a quiet one may
            be silent.
    """

    def __init__(self, epochs: int = EPOCHS, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._epochs = epochs
        self._timeout_seconds = timeout_seconds
        self._dead: list[Driver] = []
        self._stack = ExitStack()
        self._drivers: dict[str, Driver] = {}
        self._references: dict[str, dict[str, Any]] = {}
        self._cluster: Cluster | None = None
        self._bucket: stores.Bucket | None = None
        self._disk: Path | None = None
        self.problems: list[str] = []

    def __enter__(self) -> Lab:
        folder = tempfile.TemporaryDirectory(prefix="ringspark-lab-")
        self.root = Path(self._stack.enter_context(folder))
        return self

    def __exit__(self, *exc: object) -> None:
        for name in list(self._drivers):
            self._end(name)
        for driver in self._dead:
            driver.close()
        if self._cluster is not None:
            self._cluster.close()
        if self._bucket is not None:
            self._bucket.close()
        self._stack.close()

    def start_anew(self) -> None:
        """Ends all drivers, whatever they do."""
        for name in list(self._drivers):
            self._drivers[name].kill()
            self._end(name)

    def reason_not_to(self, fault: Fault) -> str | None:
        """Why this machine cannot do it; None where it can."""
        if fault.target.startswith("network"):
            return sockets.reason_not_to()
        if fault.place == "small disk":
            try:
                self.disk()
            except OSError as error:
                return str(error)
        return None

    def driver(self, place: Place = "local-cluster") -> Driver:
        """The living driver of a place, with all its executors."""
        name = "standalone" if place == "standalone" else "s3" if place.startswith("s3") else "local"
        if name in self._drivers and not self._drivers[name].lives:
            if name == "standalone":
                self._end(name)  # the next one will bear the same mark
            else:
                # The next one does not wait until everything of the last one is gone.
                self._dead.append(self._drivers.pop(name))
        if name == "standalone":
            self._cluster = self._cluster or Cluster(NUM_WORKERS)
            self._cluster.heal()
        if name not in self._drivers:
            # One at a time: each has four JVMs.
            for other in list(self._drivers):
                self._end(other)
            self._drivers[name] = self._start(name)
        driver = self._drivers[name]
        driver.wait_for_executors(NUM_WORKERS)
        return driver

    def bucket(self) -> stores.Bucket:
        """The S3 server."""
        self._bucket = self._bucket or stores.Bucket()
        return self._bucket

    def disk(self) -> Path:
        """A folder of 4 MiB."""
        if self._disk is None:
            self._disk = self._stack.enter_context(stores.small_disk(self.root / "disk", 4 << 20))
        return self._disk

    def shards(self) -> Path:
        """The data of all trainings, on the local disk; they may be copied, not changed."""
        folder = self.root / "shards"
        if not folder.exists():
            next(iter(self._drivers.values())).write_shards(str(folder))
        return folder

    def reference(self, driver: Driver, collective: str) -> dict[str, Any]:
        """The weights of the undisturbed training."""
        key = f"reference-{collective}"
        if key not in self._references:
            plan = self._plan(key, collective)
            plan.nothing_comes()
            answer = driver.fit(plan)
            assert answer["ok"], answer
            problems = rows.check(plan.lines(), NUM_ROWS).problems
            assert not problems, problems
            self._references[key] = answer["weights"]
        return self._references[key]

    def run(self, fault: Fault, seed: int) -> Moment:
        """One moment of one fault."""
        draw = random.Random(f"{fault.target}, {fault.kind}, {seed}")
        driver = self.driver(fault.place)
        # Where ranks are killed at any moment both collectives must do; which one is drawn too.
        collective = draw.choice(["torch", "horovod"])
        name = f"{fault.target}-{fault.kind}-{seed}-{time.monotonic_ns()}".replace(" ", "-")
        self.shards()
        reference = self.reference(driver, collective)
        plan = self._placed(self._plan(name, collective), fault, name)
        step = draw.randrange(5, self._epochs * EPOCH_STEPS - 10)
        with ExitStack() as undo:
            bucket = self.bucket() if fault.place.startswith("s3") else None
            scene = Scene(driver=driver, plan=plan, pids={}, draw=draw, undo=undo, bucket=bucket)
            struck = time.time()
            if fault.before:
                fault.act(scene)
                plan.nothing_comes()
            driver.begin(plan)
            if not fault.before:
                scene.pids = wait_for_step(plan, step)
                driver.note_memory()
                time.sleep(draw.random() * 0.05)
                struck = time.time()
                try:
                    fault.act(scene)
                finally:
                    plan.nothing_comes()
            answer = self._answer(driver)
        problems, spark_seconds, ended = [], driver.executor_seconds(struck), ""
        if not answer["ok"]:
            ended = f"{answer['type']}: {answer['message']}".splitlines()[0]
            problems += _problems_of(answer, fault)
            driver, answer = self._resume(driver, fault, plan)
            spark_seconds += driver.spark_seconds if ended.startswith("DriverDied") else 0.0
        problems += self._problems_after(driver, plan, answer, reference)
        lines = plan.lines()
        pause = 0.0 if fault.before else rows.longest_pause(lines, struck)
        return Moment(
            target=fault.target,
            kind=fault.kind,
            seed=seed,
            step=0 if fault.before else step,
            ended=ended,
            repeated=rows.check(lines, NUM_ROWS).repeated,
            pause_seconds=pause,
            spark_seconds=min(pause, spark_seconds),
            problems=tuple(problems),
        )

    def _resume(self, driver: Driver, fault: Fault, plan: Plan) -> tuple[Driver, dict[str, Any]]:
        driver = self.driver(fault.place)
        return driver, driver.fit(plan, resume=True)

    def _answer(self, driver: Driver) -> dict[str, Any]:
        try:
            return driver.answer(END_SECONDS)
        except AssertionError as error:
            if driver.lives:
                raise
            return {"ok": False, "type": "DriverDied", "message": str(error).splitlines()[0]}

    def _problems_after(
        self, driver: Driver, plan: Plan, answer: dict[str, Any], reference: dict[str, Any]
    ) -> list[str]:
        """What is wrong with a training that has ended."""
        if not answer["ok"]:
            return [f"the resumed fit failed: {answer['type']}: {answer['message'][:500]}"]
        problems = rows.check(plan.lines(), NUM_ROWS).problems
        # Horovod joins gradients as they come: with three ranks the order of additions varies by itself.
        allowed = 1e-5 if plan.collective == "horovod" else 0.0
        if (distance := difference(answer["weights"], reference)) > allowed:
            problems.append(f"weights differ by {distance:.1e}")
        problems += driver.left_over()
        while self._dead:
            problems += [f"left over after the driver: {line}" for line in self._dead.pop().close()]
        # The temporary files of this process's own, and what a committed run must not hold.
        if (Path(plan.run) / "checkpoints").exists():
            left = sorted(str(path.relative_to(plan.run)) for path in Path(plan.run).rglob("*"))
            problems.append(f"the finished run still has its checkpoints: {left}")
        # The diaries are small, the runs are not needed any more.
        if Path(plan.run).is_absolute():
            shutil.rmtree(plan.run, ignore_errors=True)
        return problems

    def _plan(self, name: str, collective: str) -> Plan:
        folder = self.root / name
        return Plan(
            run=str(folder / "run"),
            shards=str(self.root / "shards"),
            diary=folder / "diary",
            collective=collective,
            epochs=self._epochs,
            timeout_seconds=self._timeout_seconds,
        )

    def _placed(self, plan: Plan, fault: Fault, name: str) -> Plan:
        """The plan with the files where the fault wants them."""
        if fault.place == "s3 run":
            return replace(plan, run=f"s3://bucket/{name}")
        if fault.place == "s3 shards":
            return replace(plan, shards=self.bucket().upload(self.shards(), "shards"))
        if fault.place == "small disk":
            return replace(plan, run=str(self.disk() / name))
        if fault.target in ("manifest", "shard"):
            own = plan.diary.parent / "shards"
            shutil.copytree(self.shards(), own)
            return replace(plan, shards=str(own))
        return plan

    def _start(self, name: str) -> Driver:
        if name == "standalone":
            assert self._cluster is not None
            return Driver(self._cluster.url, keepers=self._cluster.pids, mark=self._cluster.mark)
        return Driver(LOCAL_CLUSTER, self.bucket().environment if name == "s3" else None)

    def _end(self, name: str) -> None:
        left = self._drivers.pop(name).close()
        self.problems += [f"left over after the driver: {line}" for line in left]


def _problems_of(answer: dict[str, Any], fault: Fault) -> list[str]:
    """What is wrong with the way in which a fit failed."""
    problems = []
    if fault.must_survive:
        problems.append(f"the fit did not survive: {answer['type']}: {answer['message'][:1000]}")
    elif "py4j" in answer["type"].lower() or "An error occurred while calling" in answer["message"]:
        problems.append(f"no readable error: {answer['message'][:500]}")
    return problems
