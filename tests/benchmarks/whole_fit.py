"""Seconds of a whole `fit` of a cached DataFrame: the first of its session, warm fits, and small fits.

The lower bound is Spark's Parquet write of the same frame, followed by a plain loop: one process per core,
each over its share of the rows in memory, without communication. Every round of a pair of collective and
reader is a session in a new process. The second table breaks the time down.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import harness
import torch
from torch.nn import functional

from ringspark.estimators import Callback, TorchRegressor
from ringspark.estimators.launch.supervisor import Supervisor
from ringspark.estimators.stages import fit_data
from ringspark.jobs import cli

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PAIRS = ("horovod-petastorm", "torch-arrow")
FIRST, WARM, SMALL, SPARK, BARE, FLOOR = (
    "first fit",
    "warm fit",
    "warm fit, small",
    "Spark's Parquet write",
    "bare loops",
    "write + bare loops",
)
PARTS = ("checks", "shards", "more checks", "gang until training", "training", "gang after", "model")
SMALL_ROWS = 1_000

Seconds = dict[str, float]


class Clock(Callback):
    """Records when the training began and ended, on rank 0."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_train_start(self, state: Any) -> None:
        self._note(state.rank, "began")

    def on_train_end(self, state: Any) -> None:
        self._note(state.rank, "ended")

    def _note(self, rank: int, name: str) -> None:
        if rank == 0:
            Path(self._folder, name).write_text(str(time.time()))


@contextmanager
def noted(marks: list[float], owner: Any, name: str) -> Iterator[None]:
    """Appends the times before and after each call of a function to `marks`."""
    function = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        marks.append(time.time())
        result = function(*args, **kwargs)
        marks.append(time.time())
        return result

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, function)


def fit_parts(frame: DataFrame, pair: str, folder: str, **settings: Any) -> Seconds:
    """Fits once; returns part -> seconds."""
    collective, reader = pair.split("-")
    estimator = TorchRegressor(
        model=harness.MLP,
        numWorkers=harness.NUM_WORKERS,
        collective=collective,
        reader=reader,
        optimizer="sgd",
        learningRate=0.01,
        callbacks=[Clock(folder)],
        storageUri=folder,
        showProgress=False,
        **settings,
    )
    marks = [time.time()]
    with noted(marks, fit_data, "write_shards"), noted(marks, Supervisor, "run"):
        estimator.fit(frame)
    began, ended = (float(Path(folder, name).read_text()) for name in ("began", "ended"))
    marks[4:4] = [began, ended]
    marks.append(time.time())
    return {part: end - start for part, start, end in zip(PARTS, marks[:-1], marks[1:], strict=True)}


def bare_loop(rows: int, epochs: int, batch_size: int, turns: Any) -> None:
    """Trains on command over rows in memory for the given epochs. Runs in a new process."""
    torch.set_num_threads(1)
    features, label = torch.rand(rows, harness.DIM), torch.rand(rows)
    while turns.recv():
        module = harness.MLP.build()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for _ in range(epochs):
            for x, y in zip(features.split(batch_size), label.split(batch_size), strict=True):
                optimizer.zero_grad()
                loss = functional.mse_loss(module(x).squeeze(-1), y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        turns.send(True)


@contextmanager
def bare_loops(rows: int, epochs: int, batch_size: int) -> Iterator[Callable[[], float]]:
    """Yields a function that runs the loops in parallel and returns the seconds of the slowest loop."""
    context = multiprocessing.get_context("spawn")
    share = harness.NUM_WORKERS
    pipes = [context.Pipe() for _ in range(share)]
    processes = [
        context.Process(target=bare_loop, args=(rows // share, epochs, batch_size // share, end))
        for _, end in pipes
    ]
    for process in processes:
        process.start()

    def run() -> float:
        start = time.perf_counter()
        for pipe, _ in pipes:
            pipe.send(True)
        for pipe, _ in pipes:
            pipe.recv()
        return time.perf_counter() - start

    run()  # imports, and creates the rows
    yield run
    for (pipe, _), process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join()


def one_session(options: argparse.Namespace) -> dict[str, Any]:
    """Measures one pair in a fresh session; returns name -> seconds, or seconds by part."""
    whole = {"batchSize": options.batch_size, "epochs": options.epochs}
    small = {"batchSize": 256, "epochs": 1}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, cli.spark("ringspark whole fit", harness.MASTER) as spark:
        frame = harness.random_frame(spark, options.rows).cache()
        few = harness.random_frame(spark, min(SMALL_ROWS, options.rows), seed=1).cache()
        frame.count(), few.count()
        found[FIRST] = fit_parts(frame, options.pair, folder, **whole)
        found[WARM] = fit_parts(frame, options.pair, folder, **whole)
        fit_parts(few, options.pair, folder, **small)
        found[SMALL] = fit_parts(few, options.pair, folder, **small)
        written = str(Path(folder, "spark.parquet"))
        write = lambda: harness.seconds_of(lambda: frame.write.mode("overwrite").parquet(written))  # noqa: E731
        write()
        found[SPARK] = write()
    with bare_loops(options.rows, options.epochs, options.batch_size) as run:
        found[BARE] = run()
    return found


def fresh(pair: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs `one_session` in a new process."""
    sizes = [f"--rows={options.rows}", f"--epochs={options.epochs}", f"--batch-size={options.batch_size}"]
    done = subprocess.run(
        [sys.executable, __file__, f"--pair={pair}", *sizes], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_tables(pair: str, rounds: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Prints the seconds of one pair, and their parts."""
    fits = (FIRST, WARM, SMALL)
    seconds = {name: [sum(found[name].values()) for found in rounds] for name in fits}
    seconds |= {name: [found[name] for found in rounds] for name in (SPARK, BARE)}
    seconds[FLOOR] = [found[SPARK] + found[BARE] for found in rounds]
    title = (
        f"whole_fit: seconds, {pair}, {options.rows:,} rows x {harness.DIM} fp32 in a cached DataFrame, MLP "
        f"32-128-128-1, SGD, {options.epochs} epochs, global batch {options.batch_size}; small: "
        f"{SMALL_ROWS:,} rows, one epoch; {len(rounds)} sessions"
    )
    rows = [
        [
            name,
            *(f"{value:.2f}" for value in (median(values), min(values), max(values))),
            f"{harness.median_ratio(values, seconds[FLOOR]):.2f}",
        ]
        for name, values in seconds.items()
    ]
    harness.print_table(title, ["", "median", "min", "max", "ratio to write + bare"], rows)
    parts = [[p, *(f"{median(found[f][p] for found in rounds):.2f}" for f in fits)] for p in PARTS]
    harness.print_table(f"whole_fit: {pair}, seconds by part", ["", *fits], parts)


def main() -> None:
    """Measures both pairs in interleaved rounds, or one pair once with `--pair`, and prints JSON."""
    parser = harness.parser(__doc__, rows=(1_000_000, 2_000), epochs=(3, 1), batch_size=(16_384, 512))
    parser.add_argument("--pair", choices=PAIRS, help="measure one session of this pair, and print JSON")
    options = parser.parse_args()
    if options.pair is not None:
        print(json.dumps(one_session(options)))
        return
    rounds: dict[str, list[dict[str, Any]]] = {pair: [] for pair in PAIRS}
    for _ in range(options.repeats):
        for pair in PAIRS:
            rounds[pair].append(fresh(pair, options))
    for pair, found in rounds.items():
        print_tables(pair, found, options)


if __name__ == "__main__":
    main()
