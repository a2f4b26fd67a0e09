"""Takes executors from trainings on a cluster with dynamic allocation, and gives others, at random moments.

A standalone cluster has one executor slot per Spark worker, dynamic allocation starts at zero executors, and
each fit asks for `--workers` of them and continues with at least half. An event kills an executor (SIGKILL),
announces its end (Spark's decommission signal), or ends a Spark worker and starts another one.

    python tests/benchmarks/elastic.py --repeats 20 --events 10

The exit code is 1 if an epoch lacks or repeats a row, weights differ from the undisturbed training by more
than 1e-6, or an event cost a restart.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import harness
import processes
import rows
from cluster import Cluster
from trainings import NUM_ROWS, Driver, Plan, difference

SEED = 17
TOLERANCE = 1e-6
LONGEST_FIT_SECONDS = 900.0
CONF = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.executorIdleTimeout": "5s",
    "spark.decommission.enabled": "true",
    "spark.executor.cores": "1",
    "spark.executor.memory": "800m",
}


def main() -> int:
    """Disturbs `--repeats` fits. Returns 1 if anything is wrong."""
    options = harness.parse(__doc__, repeats=(20, 1), events=(10, 2), workers=(3, 2), epochs=(30, 6))
    draw, wrong, pauses, found = random.Random(SEED), [], [], []
    with tempfile.TemporaryDirectory(prefix="ringspark-elastic-") as name:
        folder, cluster = Path(name), Cluster(options.workers, cores=1)
        driver = Driver(cluster.url, keepers=cluster.pids, mark=cluster.mark, conf=CONF)
        try:
            driver.write_shards(str(folder / "shards"))
            calm = _plan(folder, "calm", options)
            calm.nothing_comes()
            expected = driver.fit(calm)
            assert expected["ok"], expected
            for number in range(options.repeats):
                collective = "horovod" if number % 2 else "torch"
                plan = replace(_plan(folder, f"fit-{number}", options), collective=collective)
                plan.nothing_comes()
                driver.begin(plan)
                events = _disturb(plan, cluster, driver, draw, options.events)
                answer = driver.answer(LONGEST_FIT_SECONDS)
                lines = plan.lines()
                problems = rows.check(lines, NUM_ROWS).problems if answer["ok"] else [answer["message"]]
                distance = (
                    difference(answer["weights"], expected["weights"]) if answer["ok"] else float("nan")
                )
                if not distance <= TOLERANCE:
                    problems.append(f"weights differ by {distance:.1e}")
                if answer.get("restart_reasons"):
                    problems.append(f"restarts: {answer['restart_reasons']}")
                ends = [*(at for _, at in events[1:]), float("inf")][: len(events)]
                own = [rows.longest_pause(lines, at, end) for (_, at), end in zip(events, ends, strict=True)]
                pauses += own
                sizes = _sizes(lines)
                joins = sum(after > before for before, after in pairwise(sizes))
                found.append((len(events), joins, len(answer.get("preemption_reasons", ())), distance))
                wrong += problems
                print(
                    f"fit {number + 1}, {collective}: {', '.join(what for what, _ in events)}; "
                    f"workers {sizes}; difference {distance:.1e}" + "".join(f"; {each}" for each in problems),
                    flush=True,
                )
        finally:
            driver.close()
            cluster.close()
    harness.print_table(
        f"{options.repeats} fits of {options.workers} workers while executors come and go",
        ("", "value"),
        [
            ["losses", str(sum(each[0] for each in found))],
            ["joins", str(sum(each[1] for each in found))],
            ["losses that Spark explained", str(sum(each[2] for each in found))],
            ["largest weight difference", f"{max(each[3] for each in found):.1e}"],
            ["seconds without a step per loss, median", f"{median(pauses or [0.0]):.1f}"],
            ["seconds without a step per loss, worst", f"{max(pauses, default=0.0):.1f}"],
            ["problems", str(len(wrong))],
        ],
    )
    return 1 if wrong else 0


def _plan(folder: Path, name: str, options: Any) -> Plan:
    more = {
        "minWorkers": max(1, options.workers // 2),
        "checkpointEverySeconds": 2.0,
        "checkpointEverySteps": None,
        "batchSize": 48,
    }
    return Plan(
        run=str(folder / name / "run"),
        shards=str(folder / "shards"),
        diary=folder / name / "diary",
        num_workers=options.workers,
        collective="torch",
        epochs=options.epochs,
        dropout=0.0,
        max_restarts=3,
        timeout_seconds=120.0,
        more=more,
    )


def _disturb(
    plan: Plan, cluster: Cluster, driver: Driver, draw: random.Random, number: int
) -> list[tuple[str, float]]:
    """Runs the events, each while ranks train; returns what was done and when."""
    events: list[tuple[str, float]] = []
    diaries, end = rows.Diaries(plan.diary), time.monotonic() + LONGEST_FIT_SECONDS
    last_step = plan.epochs * plan.epoch_steps
    while len(events) < number and time.monotonic() < end and not driver.has_answered:
        time.sleep(0.2)
        steps = rows.steps_of(diaries.read())
        if not steps or (events and steps[-1]["time"] < events[-1][1] + 0.5):
            continue
        if steps[-1]["step"] > 0.9 * last_step:
            break
        time.sleep(draw.random() * 1.5)
        lines = diaries.read()
        pids = {line["rank"]: line["pid"] for line in lines if line["time"] > time.time() - 1.0}
        living = [pid for pid in pids.values() if processes.pid_lives(pid)]
        if not living:
            continue
        jvm = processes.executor_jvm(draw.choice(living))
        what = draw.choice(("kill", "decommission", "worker"))
        if what == "worker":
            worker = jvm.parent()
            assert worker is not None
            processes.send(worker, signal.SIGKILL)
            processes.send(jvm, signal.SIGKILL)
            events.append((what, time.time()))
            cluster.heal()
        else:
            processes.send(jvm, signal.SIGKILL if what == "kill" else signal.SIGPWR)
            events.append((what, time.time()))
    return events


def _sizes(lines: list[rows.Line]) -> list[int]:
    """Returns the number of workers of each start, in order."""
    starts = [line for line in lines if line["what"] == "start" and line["rank"] == 0]
    return [line["size"] for line in starts]


if __name__ == "__main__":
    sys.exit(main())
