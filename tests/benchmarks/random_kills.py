"""Kills one flights training at random moments and resumes it with 2, 1 and 3 workers alternately.

One kill in `--whole-every` is SIGKILL for the driver, its JVM and all Python workers at once, as in a power
failure. The other kills are SIGKILL for one rank, and the fit, which has no restarts, fails. The next fit
uses `resume=True` and another number of workers. The final weights must equal an undisturbed training up to
the order of additions, within 1e-5. There is no dropout, because the masks depend on the number of ranks. The
optimizer is plain SGD, because Adam divides the last digits by numbers close to zero.

    python tests/benchmarks/random_kills.py --repeats 100    # kills

The exit code is 1 if the weights differ more, or a kill left something behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import harness
import processes

SEED = 17
NUM_WORKERS = (2, 1, 3)
EVERY_STEPS = 2
DAEMON = "ringspark.estimators.launch.python_daemon"
# Long enough that the middle of the training comes after the first look at the driver.
PAUSE_SECONDS = 0.01
TOLERANCE = 1e-5
LONGEST_LIFE_SECONDS = 300.0


def main() -> int:
    """Kills, resumes and compares. Returns 1 if anything is wrong."""
    if len(sys.argv) > 1 and sys.argv[1] == "--driver":
        return drive(sys.argv[2], sys.argv[3], batch_size=int(sys.argv[4]), epochs=int(sys.argv[5]))
    # The driver that runs at this time also ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = harness.parse(
        __doc__, repeats=(100, 2), whole_every=(5, 2), batch_size=(4096, 128), epochs=(8, 4)
    )
    shards = str(harness.flights_root(options) / "shards")
    job = (shards, str(options.batch_size), str(options.epochs))
    draw = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="ringspark-kills-") as name:
        folder = Path(name)
        start = time.perf_counter()
        with Driver(folder, *job) as driver:
            undisturbed = driver.live("undisturbed", 2, None)
            wrong = driver.leave()
        assert undisturbed is not None, "the undisturbed training failed"
        steps = undisturbed["steps"]
        print(f"undisturbed: {steps} steps, {time.perf_counter() - start:.0f} s", flush=True)
        driver, disturbed, lost, at = Driver(folder, *job), None, [], 0
        try:
            for life in range(options.repeats + 1):
                workers = NUM_WORKERS[life % len(NUM_WORKERS)]
                whole = (life + 1) % options.whole_every == 0
                # Moments over the whole training. The next life repeats the steps that a kill lost.
                more = round(2 * draw.random() * 0.9 * steps / options.repeats)
                kill = Kill(
                    step=at + more, seconds=draw.random() * 0.1, rank=draw.randrange(workers), whole=whole
                )
                disturbed = driver.live("disturbed", workers, kill if life < options.repeats else None)
                first, last = driver.reached
                lost.append(max(0, at - first))
                left = []
                if whole and disturbed is None:
                    left = driver.leave()
                    driver = Driver(folder, *job)
                wrong += left
                hit = "" if disturbed else ", killed: " + ("all" if whole else f"rank {kill.rank}")
                print(
                    f"life {life + 1}, {workers} workers: steps {first} to {last} of {steps}{hit}"
                    + (f", left over {left}" if left else ""),
                    flush=True,
                )
                at = max(at, last)
                if disturbed is not None:
                    break
        finally:
            wrong += driver.leave()
    assert disturbed is not None
    distance = max(
        abs(one - other)
        for name, values in undisturbed["weights"].items()
        for one, other in zip(values, disturbed["weights"][name], strict=True)
    )
    harness.print_table(
        f"a flights training of {steps} steps, killed {life} times, alternately by {NUM_WORKERS} workers",
        ("", "value"),
        [
            ["kills", str(life)],
            ["kills of the driver and all its processes", str(life // options.whole_every)],
            ["largest weight difference", f"{distance:.1e}"],
            ["steps lost per kill, median", f"{median(lost[1:] or [0]):.0f}"],
            ["steps lost per kill, worst", str(max(lost[1:] or [0]))],
            ["leftover processes", str(len(wrong))],
        ],
    )
    return 1 if wrong or distance > TOLERANCE or life < options.repeats else 0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A kill of one rank or of everything, some seconds after rank 0 has trained a step."""

    step: int
    seconds: float
    rank: int
    whole: bool


class Driver:
    """A driver process that runs fits on command; a context manager.

    Attributes:
        reached: First and last step of rank 0 in the last fit.
    """

    def __init__(self, folder: Path, *job: str) -> None:
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._errors = folder / "stderr"
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        self.reached = (0, 0)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--driver", str(folder), *job],
            env=os.environ | {processes.MARK: self._mark, "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors.open("w"),
            text=True,
        )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()

    def live(self, run: str, workers: int, kill: Kill | None) -> dict[str, Any] | None:
        """Runs one fit until it ends or is killed. Returns the result of a finished training, or None."""
        for old in self._folder.glob("rank-*"):
            old.unlink()
        answer = self._folder / "answer.json"
        answer.unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"run": run, "workers": workers}) + "\n")
        self._process.stdin.flush()
        end = time.monotonic() + LONGEST_LIFE_SECONDS * (1 if kill else 10)
        while not answer.exists() and (kill is None or self._look()[1] < max(1, kill.step)):
            self._check(end)
            time.sleep(0.01)
        if kill is not None and not answer.exists():
            time.sleep(kill.seconds)
            if kill.whole:
                for one in processes.marked(self._mark):
                    processes.send(one, signal.SIGKILL)
                self._process.wait()
                self._look()
                return None
            processes.send(self._pid_of(kill.rank, end), signal.SIGKILL)
        while not answer.exists():
            self._check(end)
            time.sleep(0.01)
        self._look()
        told: dict[str, Any] = json.loads(answer.read_text())
        assert told["ok"] or kill is not None, told
        return told if told["ok"] else None

    def leave(self) -> list[str]:
        """Ends the driver. Returns the processes that still exist some seconds later."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=60)
        gone = time.monotonic() + 10.0
        while (left := processes.marked(self._mark)) and time.monotonic() < gone:
            time.sleep(0.1)
        told = [processes.describe(one) for one in left]
        for one in left:
            processes.send(one, signal.SIGKILL)
        return told

    def _check(self, end: float) -> None:
        assert time.monotonic() < end, "the training stands still"
        if (code := self._process.poll()) is not None:
            raise SystemExit(f"the driver ended with {code}:\n{self._errors.read_text()[-3000:]}")

    def _look(self) -> tuple[int, int]:
        """Returns the first and last step that rank 0 has written; zeros if there is none."""
        path = self._folder / "rank-0"
        numbers = path.read_text().split()[1:] if path.exists() else []
        self.reached = (int(numbers[0]), int(numbers[-1])) if numbers else (0, 0)
        return self.reached

    def _pid_of(self, rank: int, end: float) -> int:
        path = self._folder / f"rank-{rank}"
        while not path.exists() or not path.read_text().endswith("\n"):
            self._check(end)
            time.sleep(0.01)
        return int(path.read_text().split()[0])


def drive(folder: str, shards: str, *, batch_size: int, epochs: int) -> int:
    """Runs in the killed driver: reads a line of JSON per fit from standard input."""
    from ringspark.estimators import TorchClassifier, WorkerError
    from ringspark.estimators.training.callbacks import Callback, TrainingState
    from ringspark.jobs import cli
    from ringspark.models import ModelSpec
    from ringspark.pipelines import ShardManifest

    class Steps(Callback):
        """Writes the rank's process and its steps, in lines of equal length.

        So a kill leaves no partial line.
        """

        def _write(self, state: TrainingState, number: int) -> None:
            with open(os.path.join(folder, f"rank-{state.rank}"), "a") as file:
                file.write(f"{number:9d}\n")

        def on_train_start(self, state: TrainingState) -> None:
            self._write(state, os.getpid())

        def on_step_end(self, state: TrainingState) -> None:
            self._write(state, state.step)
            time.sleep(PAUSE_SECONDS)

    manifest = ShardManifest.load(shards)
    (numeric,) = manifest.column("numeric").kind.shape
    (categories,) = manifest.column("categorical").kind.shape
    highest = manifest.range_of("categorical")
    assert highest is not None
    model = ModelSpec(
        "tabular",
        {
            "cardinalities": [int(highest[1]) + 1] * categories,
            "num_numeric": numeric,
            "hidden": [64, 32],
            "out_features": 1,
        },
    )
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--conf spark.python.daemon.module={DAEMON} pyspark-shell"
    with cli.spark("ringspark kills", "local[4]"):
        for line in sys.stdin:
            command = json.loads(line)
            estimator = TorchClassifier(
                model=model,
                inputCols=["categorical", "numeric"],
                optimizer="sgd",
                learningRate=0.05,
                lrSchedule="one_cycle",
                batchSize=batch_size,
                epochs=epochs,
                seed=3,
                numWorkers=command["workers"],
                reader="arrow",
                runUri=os.path.join(folder, command["run"]),
                resume=True,
                maxRestarts=0,
                checkpointEverySteps=EVERY_STEPS,
                checkpointEverySeconds=0,
                callbacks=[Steps()],
                showProgress=False,
            )
            answer: dict[str, Any] = {"ok": False}
            try:
                fitted = estimator.fitOnShards(shards)
                state = fitted.module().state_dict()
                weights = {name: value.flatten().tolist() for name, value in state.items()}
                answer = {"ok": True, "steps": fitted.summary.steps, "weights": weights}
            except WorkerError as error:
                print(error, file=sys.stderr)
            text = os.path.join(folder, "answer")
            Path(f"{text}.new").write_text(json.dumps(answer))
            os.replace(f"{text}.new", f"{text}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
