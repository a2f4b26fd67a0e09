"""Fault matrix: whether training survives each fault, and how soon it continues.

Runs real drivers, executors, ranks, disks and servers, see tests/faults. A training has `--hits` equal parts,
and a fault hits a random step of each part. torch and Horovod alternate. Reads happen at the start of an
epoch, so read faults hit once in every epoch except the last. A problem at the end of a training counts for
all of its hits. A cell of the matrix contains

- the hits that the fit survived without help, e.g. `18/20`. `+2` counts the hits that ended the fit with one
  error, after which `resume=True` continued. `WRONG` counts hits with lost or wrong results or leftovers,
  which the list below the table explains;
- the number of steps trained twice, median and worst;
- the seconds until it trained again, median and worst: the longest time without a step of rank 0 since the
  fault, without the time in which Spark starts an executor or the session; then the median with that time. A
  hang is detected after `--timeout-seconds`, which is included. A busy machine needs a larger value.

    python tests/benchmarks/fault_matrix.py --repeats 20
    python tests/benchmarks/fault_matrix.py --repeats 3 --hits 1 --only "rank 0" "executor JVM"

The whole matrix takes hours; `--cells` limits it to the first cells. With `--output`, moments in the folder's
faults.json are not run again, so a run can be stopped and resumed. Each moment contains its commit.

The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections import defaultdict
from itertools import chain
from pathlib import Path
from statistics import median

import harness
import moments as trials
from lab import Lab
from moments import Moment
from scenarios import FAULTS, KINDS, TARGETS, Fault
from trainings import TIMEOUT_SECONDS

# Long enough for ten hits and for the time of the harness between them.
EPOCHS = 5
Cells = dict[tuple[str, str], list[Moment]]


def main() -> int:
    """Runs the moments and prints the matrix. Returns 1 if anything was wrong."""
    parser = harness.parser(
        __doc__,
        repeats=(20, 1),
        hits=(10, 1),
        epochs=(EPOCHS, 2),
        cells=(len(FAULTS), 1),
        timeout_seconds=(round(TIMEOUT_SECONDS), 30),
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first moment of each cell")
    parser.add_argument("--launch", choices=("barrier", "tasks"), default="barrier")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="rows, cells as 'row/column', columns, or meshes"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="of faults.json, to which moments are added"
    )
    args = parser.parse_args()
    # All child processes end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    faults = [f for f in FAULTS if not args.only or names_of(f) & set(args.only)]
    faults = faults[: args.cells]
    if not faults:
        parser.error(f"--only names no row; rows are {', '.join(TARGETS)}")
    # Group faults by location, because each change of location restarts Spark.
    faults.sort(key=lambda f: ("standalone" in f.place, "s3" in f.place, bool(f.mesh), f.mesh))
    cells = load(args.output)
    skipped: dict[tuple[str, str], str] = {}
    with Lab(epochs=args.epochs, timeout_seconds=args.timeout_seconds, launch=args.launch) as lab:
        for fault in faults:
            if reason := lab.reason_not_to(fault):
                skipped[fault.target, fault.kind] = reason
                continue
            known = {moment.seed for moment in cells[fault.target, fault.kind]}
            seeds = [seed for seed in range(args.seed, args.seed + args.repeats) if seed not in known]
            for number, chunk in enumerate(chunks(seeds, trials.most_hits(lab, fault, args.hits))):
                hits = run(lab, fault, chunk, ("torch", "horovod")[number % 2])
                cells[fault.target, fault.kind] += hits
                print(*(line_of(moment, fault) for moment in hits), sep="\n", flush=True)
                save(args.output, cells)
    report(cells, skipped, lab.problems)
    wrong = [problem for moments in cells.values() for m in moments for problem in m.problems]
    return 1 if wrong or lab.problems else 0


def names_of(fault: Fault) -> set[str]:
    """Returns the names that `--only` accepts."""
    names = {fault.target, f"{fault.target}/{fault.kind}", fault.kind}
    return names | ({fault.mesh, f"{fault.mesh}/{fault.kind}"} if fault.mesh else set())


def chunks(seeds: list[int], size: int) -> list[list[int]]:
    """Returns chunks of one training each."""
    return [seeds[first : first + size] for first in range(0, len(seeds), size)]


def run(lab: Lab, fault: Fault, seeds: list[int], collective: str) -> list[Moment]:
    """Runs one training. An unexpected error of the harness is a problem of this training only."""
    try:
        return trials.run(lab, fault, seeds, collective)
    except Exception as error:
        traceback.print_exc()
        lab.start_anew()
        problem = f"{type(error).__name__}: {str(error)[:500]}"
        return [
            Moment(
                target=fault.target,
                kind=fault.kind,
                seed=seed,
                step=0,
                ended="",
                repeated=0,
                pause_seconds=0.0,
                spark_seconds=0.0,
                problems=(problem,),
            )
            for seed in seeds
        ]


def line_of(moment: Moment, fault: Fault) -> str:
    """Returns a progress line."""
    became = "WRONG" if moment.problems else "resumed" if moment.ended else "survived"
    return (
        f"{moment.target}/{moment.kind} ({fault.what}), seed {moment.seed}, step {moment.step}: {became}, "
        f"{moment.repeated} steps twice, {moment.pause_seconds:.1f} s, Spark's {moment.spark_seconds:.1f} s"
        + (f", started {moment.starts} times" if moment.starts > 1 else "")
        + "".join(f"\n    {text}" for text in (moment.ended, *moment.problems) if text)
    )


def report(cells: Cells, skipped: dict[tuple[str, str], str], left: list[str]) -> None:
    """Prints three tables with the same rows and columns, and the problems."""
    rows = [target for target in TARGETS if any(key[0] == target for key in [*cells, *skipped])]
    for title, text_of in (
        ("survived + after resume", outcome),
        ("steps trained twice: median, worst", steps),
        ("seconds until training again: median, worst", seconds),
    ):
        table = [
            [
                target,
                *(
                    "skipped" if (target, kind) in skipped else text_of(cells.get((target, kind), []))
                    for kind in KINDS
                ),
            ]
            for target in rows
        ]
        harness.print_table(title, ("hit", *KINDS), table)
    for (target, kind), reason in skipped.items():
        print(f"skipped {target}/{kind}: {reason}")
    for moments in cells.values():
        for m in moments:
            for problem in m.problems:
                print(f"WRONG {m.target}/{m.kind}, seed {m.seed}, step {m.step}: {problem}")
    for line in left:
        print(f"WRONG {line}")


def outcome(moments: list[Moment]) -> str:
    """Returns the survived hits such as `18/20 +2`, and the number of wrong ones."""
    if not moments:
        return "-"
    good = [m for m in moments if not m.problems]
    resumed = sum(bool(m.ended) for m in good)
    text = f"{len(good) - resumed}/{len(moments)}"
    text += f" +{resumed}" if resumed else ""
    return text + (f" WRONG {len(moments) - len(good)}" if len(good) < len(moments) else "")


def steps(moments: list[Moment]) -> str:
    """Returns the median and the worst number of steps trained twice."""
    values = [m.repeated for m in moments if not m.problems]
    return f"{median(values):.0f}, {max(values)}" if values else "-"


def seconds(moments: list[Moment]) -> str:
    """Returns the median and worst pause without Spark's time, and the median with it."""
    good = [m for m in moments if not m.problems]
    values = [m.pause_seconds - m.spark_seconds for m in good]
    if not values:
        return "-"
    text = f"{median(values):.1f}, {max(values):.1f} s"
    whole = median(m.pause_seconds for m in good)
    return text + (f" ({whole:.1f} with Spark's)" if any(m.spark_seconds for m in good) else "")


def load(folder: Path | None) -> Cells:
    """Loads the moments of earlier runs."""
    cells: Cells = defaultdict(list)
    if folder is not None and (folder / "faults.json").exists():
        for values in chain(*json.loads((folder / "faults.json").read_text())):
            moment = Moment(**values | {"problems": tuple(values["problems"])})
            cells[moment.target, moment.kind].append(moment)
    return cells


def save(folder: Path | None, cells: Cells) -> None:
    """Writes the moments as JSON, a cell per line."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps([moment.to_json() for moment in group]) for group in cells.values() if group]
    fresh = folder / "faults.json.new"
    fresh.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    fresh.replace(folder / "faults.json")


if __name__ == "__main__":
    sys.exit(main())
