"""Forges certified runs, and counts how many are found by how many replays; honest runs must hold.

    make bench ARGS="forgeries"                 # 200 forgeries in five kinds
    make bench ARGS="forgeries --honest"        # honest runs of many settings

Every forger makes the hash chain consistent and trains on from the forged state, so all checks without a
replay hold. "expected" is the sum of the stated probabilities.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from forged_runs import FORGERS, ROWS, draw_rows, load_run, train_honest
from small_training import train_gang

from ringspark.estimators import DiLoCo, LocalSGD, LoRA, PowerSGD, Zero
from ringspark.estimators.failures import WorkerError
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.extras.certificate import verify_run
from ringspark.extras.certificate.claimed_run import check_claims
from ringspark.extras.certificate.replay import list_intervals
from ringspark.extras.certificate.verification import check_interval, find_probability

# Four epochs of ten steps, with a checkpoint after every second step.
SIZES = {"epochs": 4, "batch_size": ROWS // 10}
INTERVALS = 20
REPLAYS = (1, 2, 5, 10, 15, INTERVALS)


def count_replays(folder: Path, draw: random.Random) -> int:
    """Returns the number of replays, in random order, until one does not hold; 0 if all hold."""
    run, objects = load_run(folder), UserObjects()
    problems = [check.problem for check in check_claims(run, objects, None) if check.problem]
    assert not problems, problems  # the forger made everything else consistent
    intervals = list_intervals(run)
    for number, interval in enumerate(draw.sample(intervals, len(intervals)), 1):
        if check_interval(run, interval, objects).problem:
            return number
    return 0


def show_forgeries(number: int, seed: int) -> None:
    """Prints how many forgeries of each kind are found by how many replays."""
    found: dict[str, list[tuple[int, int]]] = {}
    for kind, forge in FORGERS.items():
        found[kind] = []
        draw = random.Random(f"{seed} {kind}")
        for repetition in range(number):
            with tempfile.TemporaryDirectory() as scratch:
                folder, rows = Path(scratch), draw_rows(repetition)
                honest = train_honest(folder / "honest", rows, seed=repetition, **SIZES)
                forged = forge(honest, folder / "forged", rows, draw)
                found[kind].append((count_replays(folder / "forged", draw), forged))
    found["all"] = [run for runs in found.values() for run in runs]
    harness.print_table(
        f"forgeries of {ROWS} rows in {INTERVALS} intervals",
        ["forgery", "runs", "forged intervals", *(f"m={m}" for m in REPLAYS)],
        [line_of(kind, runs) for kind, runs in found.items()],
    )


def line_of(kind: str, runs: Sequence[tuple[int, int]]) -> list[str]:
    """Returns the row of a kind; each run has the replay that found it, and its forged intervals."""
    cells = []
    for m in REPLAYS:
        hits = sum(0 < at <= m for at, _ in runs)
        expected = sum(find_probability(INTERVALS, forged, m) for _, forged in runs)
        cells.append(f"{hits} (expected {expected:.1f})")
    forged = [number for _, number in runs]
    words = str(forged[0]) if len(set(forged)) == 1 else f"{min(forged)} to {max(forged)}"
    return [kind, str(len(runs)), words, *cells]


class KilledOnce(Callback):
    """Kills the process after a step, if `mark` is there, and removes it."""

    def __init__(self, mark: str, step: int) -> None:
        self.mark, self.step = mark, step

    def on_step_end(self, state: TrainingState) -> None:
        if state.step == self.step and state.rank == 0 and os.path.exists(self.mark):
            os.unlink(self.mark)
            os.kill(os.getpid(), signal.SIGKILL)


# Name -> changes of the settings in `train_honest`.
HONEST: dict[str, dict[str, Any]] = {
    "dropout, AdamW": {},
    "SGD with momentum": {"optimizer": "momentum"},
    "LAMB": {"optimizer": "lamb"},
    "Adafactor": {"optimizer": "adafactor"},
    "8-bit Adam": {"optimizer": "adam8bit"},
    "bf16": {"precision": "bf16"},
    "fp16 with loss scaling": {"precision": "fp16", "learning_rate": 0.001},
    "gradient accumulation": {"gradient_accumulation": 2},
    "gradient clipping": {"max_grad_norm": 0.1},
    "cosine schedule with warm-up": {"lr_schedule": "cosine", "warmup_steps": 5},
    "growing batch": {"batch_size_schedule": ((3, 16),)},
    "moving average of the weights": {"ema_decay": 0.9},
    "non-finite steps skipped": {"on_non_finite": "skip"},
    "no shuffle": {"shuffle": False},
    "activations in int8": {"activation_compression": "int8"},
    "checkpoints by epochs": {"checkpoint_every_steps": None, "checkpoint_every_epochs": 1},
    "checkpoints every 7 steps": {"checkpoint_every_steps": 7},
    "LoRA": {"lora": LoRA(rank=2, targets=("*",))},
    "2 workers": {"num_workers": 2},
    "2 workers, ZeRO 2": {"num_workers": 2, "sync": Zero(stage=2)},
    "2 workers, PowerSGD": {"num_workers": 2, "sync": AllReduce(compression=PowerSGD(rank=1))},
    "2 workers, local SGD": {"num_workers": 2, "sync": LocalSGD(steps=3)},
    "2 workers, DiLoCo": {"num_workers": 2, "sync": DiLoCo(steps=4)},
    "killed and resumed": {},
    "2 workers, killed and resumed": {"num_workers": 2},
}


def show_honest(names: Sequence[str]) -> None:
    """Prints what the verification of honest runs finds."""
    lines = []
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            found = verify_honest(name, HONEST[name], Path(scratch))
        result = "holds" if found.holds else " ".join(found.problems)
        equal = sum(check.note == "equal to the bit" for check in found.replays)
        lines.append([name, *map(str, (found.num_intervals + 1, len(found.replays), equal)), result])
    header = ["honest run", "checkpoints", "replays", "equal to the bit", "result"]
    harness.print_table(f"honest runs of {ROWS} rows", header, lines)


def verify_honest(name: str, changes: dict[str, Any], folder: Path) -> Any:
    """Trains an honest run, and replays all of its intervals."""
    objects = UserObjects()
    if "killed" in name:
        mark = folder / "once"
        mark.touch()
        objects = UserObjects(callbacks=(KilledOnce(str(mark), 13),))
    if changes.get("num_workers", 1) > 1:
        changes = {"collective": "torch", "checkpoint_every_steps": 8, **changes}

    def train(config: Any) -> None:
        config = replace(config, collective="torch")
        if "killed" in name:
            try:
                train_gang(config, objects)
            except WorkerError:
                pass
            else:
                raise AssertionError("the worker was not killed")
        train_gang(config, objects)

    run = train_honest(folder, draw_rows(len(name)), seed=len(name), train=train, **(SIZES | changes))
    return verify_run(run, objects, intervals=None)


def main() -> None:
    parser = harness.parser(__doc__, forgeries=(40, 1), settings=(len(HONEST), 2))
    parser.add_argument("--seed", type=int, default=0, help="seed of the forgeries and of the draws")
    parser.add_argument("--honest", action="store_true", help="train honest runs instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.honest:
        show_honest(list(HONEST)[: options.settings])
    else:
        show_forgeries(options.forgeries, options.seed)


if __name__ == "__main__":
    main()
