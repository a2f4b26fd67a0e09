"""One flights training whose driver is killed at random moments and resumed by 2, 1 and 3 workers in turn.

Each kill is SIGKILL for the driver, its JVM and all Python workers at once, as when a machine loses its
power; the next driver goes on with `resume=True` and another number of workers. The final weights are those
of a training that nobody disturbed, up to the order of additions: the goal is 1e-5. Without dropout and
with plain SGD, because other numbers of ranks draw other dropout, and Adam divides the last digits by numbers
that are close to zero.

    python tests/benchmarks/random_kills.py --repeats 100 --root artifacts/flights    # kills

Ends with 1 if the weights are further away, or a kill left something behind.
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
from pathlib import Path
from statistics import median
from typing import Any

import harness

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))

import processes

SEED = 17
NUM_WORKERS = (2, 1, 3)
BATCH, EPOCHS, EVERY_STEPS = 4096, 8, 2
# So long a training that its middle is not over before the driver has been seen.
PAUSE_SECONDS = 0.01
TOLERANCE = 1e-5
LONGEST_LIFE_SECONDS = 300.0


def main() -> int:
    """Kills, resumes, compares; 1 if anything is wrong."""
    if len(sys.argv) > 1 and sys.argv[1] == "--driver":
        return drive(**json.loads(sys.argv[2]))
    # The driver that runs then ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = harness.parse(__doc__, repeats=100)
    shards = str(Path(options.root, "shards").resolve())
    draw = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="ringspark-kills-") as name:
        folder = Path(name)
        start = time.perf_counter()
        undisturbed, _, _ = live(folder, "undisturbed", shards, 2, None)
        whole = time.perf_counter() - start
        assert undisturbed is not None, "the undisturbed training failed"
        steps = undisturbed["steps"]
        print(f"undisturbed: {steps} steps, {whole:.0f} s", flush=True)
        lives, lost, wrong = [], [], []
        disturbed, at = None, 0
        while disturbed is None:
            kill = len(lives)
            workers = NUM_WORKERS[kill % len(NUM_WORKERS)]
            # Moments over the whole training; what a kill costs is trained again by the next life.
            more = round(2 * draw.random() * 0.9 * steps / options.repeats)
            target = None if kill >= options.repeats else (at + more, draw.random() * 0.1)
            disturbed, reached, left = live(folder, "disturbed", shards, workers, target)
            first, last = reached
            lives.append(last - first)
            lost.append(max(0, at - first))
            wrong += left
            print(
                f"life {kill + 1}, {workers} workers: steps {first} to {last} of {steps}"
                + (f", left over {left}" if left else ""),
                flush=True,
            )
            at = max(at, last)
    distance = max(
        abs(one - other)
        for name, values in undisturbed["weights"].items()
        for one, other in zip(values, disturbed["weights"][name], strict=True)
    )
    kills = len(lives) - 1
    harness.print_table(
        f"a flights training of {steps} steps, killed {kills} times, by {NUM_WORKERS} workers in turn",
        ("", "value"),
        [
            ["kills", str(kills)],
            ["largest difference of a weight", f"{distance:.1e}"],
            ["steps lost by a kill, median", f"{median(lost[1:] or [0]):.0f}"],
            ["steps lost by a kill, worst", str(max(lost[1:] or [0]))],
            ["processes left behind", str(len(wrong))],
        ],
    )
    return 1 if wrong or distance > TOLERANCE else 0


def live(
    folder: Path, run: str, shards: str, workers: int, target: tuple[int, float] | None
) -> tuple[dict[str, Any] | None, tuple[int, int], list[str]]:
    """One driver, from its start to its end or its death.

    Args:
        target: The step, and the seconds after it, at which it is killed; None lets it end.

    Returns:
        What it says of the finished training, or None; the first and last step of this life; processes that
        were still there some seconds after the kill.
    """
    mark = uuid.uuid4().hex
    steps = folder / f"{run}-{mark}.steps"
    command = {
        "run": str(folder / run),
        "shards": shards,
        "workers": workers,
        "steps": str(steps),
        "result": str(folder / f"{run}.json"),
    }
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, __file__, "--driver", json.dumps(command)],
        env=os.environ | {processes.MARK: mark, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr").open("w"),
    )
    try:
        end = time.monotonic() + LONGEST_LIFE_SECONDS * (1 if target else 10)
        while process.poll() is None and (target is None or steps_of(steps)[1] < target[0]):
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        if target is not None:
            time.sleep(target[1])
    finally:
        for one in processes.marked(mark):
            processes.send(one, signal.SIGKILL)
    code = process.wait()
    gone = time.monotonic() + 10.0
    while (left := processes.marked(mark)) and time.monotonic() < gone:
        time.sleep(0.1)
    told = [processes.describe(one) for one in left]
    for one in left:
        processes.send(one, signal.SIGKILL)
    result = Path(command["result"])
    if not result.exists() and code != -signal.SIGKILL:
        raise SystemExit(f"the driver ended with {code}:\n{(folder / 'stderr').read_text()[-3000:]}")
    return json.loads(result.read_text()) if result.exists() else None, steps_of(steps), told


def steps_of(path: Path) -> tuple[int, int]:
    """First and last step that rank 0 has written; zeros where there is none."""
    numbers = path.read_text().split() if path.exists() else []
    return (int(numbers[0]), int(numbers[-1])) if numbers else (0, 0)


def drive(run: str, shards: str, workers: int, steps: str, result: str) -> int:
    """The driver that is killed."""
    from ringspark.estimators import TorchClassifier
    from ringspark.estimators.training.callbacks import Callback, TrainingState
    from ringspark.jobs import cli
    from ringspark.models import ModelSpec
    from ringspark.pipelines import ShardManifest

    class Steps(Callback):
        """Writes each step of rank 0, in lines of one length: a kill leaves no half number."""

        def on_step_end(self, state: TrainingState) -> None:
            if state.rank == 0:
                with open(steps, "a") as file:
                    file.write(f"{state.step:9d}\n")
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
    with cli.spark("ringspark kills", "local[4]"):
        fitted = TorchClassifier(
            model=model,
            inputCols=["categorical", "numeric"],
            optimizer="sgd",
            learningRate=0.05,
            lrSchedule="one_cycle",
            batchSize=BATCH,
            epochs=EPOCHS,
            seed=3,
            numWorkers=workers,
            reader="arrow",
            runUri=run,
            resume=True,
            checkpointEverySteps=EVERY_STEPS,
            checkpointEverySeconds=0,
            callbacks=[Steps()],
        ).fitOnShards(shards)
        weights = {name: value.flatten().tolist() for name, value in fitted.module().state_dict().items()}
        text = json.dumps({"steps": fitted.summary.steps, "weights": weights})
        Path(f"{result}.new").write_text(text)
        os.replace(f"{result}.new", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
