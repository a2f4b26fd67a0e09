"""Forges certified runs: only a replay of a forged interval finds the forgery."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_training import config_of
from written_shards import written

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.folders import list_steps
from ringspark.estimators.training.checkpoint.reading import read_record
from ringspark.estimators.training.checkpoint.record import FileSum, Record
from ringspark.estimators.training.checkpoint.snapshot import RECORD
from ringspark.estimators.training.checkpoint.weights import COMMIT, WEIGHTS, read_info
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.certificate.chain import Chain, Link, chain_uri, read_chain, write_chain
from ringspark.extras.certificate.claimed_run import ClaimedRun
from ringspark.extras.certificate.claims import list_claims
from ringspark.extras.certificate.replay import Interval, list_intervals, replay
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

ROWS, BETWEEN = 80, 2


def draw_rows(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "y": (x @ np.arange(1, 5) + rng.normal(size=ROWS)).astype(np.float32)}


def train_honest(
    folder: Path,
    rows: dict[str, np.ndarray],
    seed: int,
    train: Callable[[TrainConfig], object] = train_here,
    **changes: Any,
) -> Path:
    """Trains a small network with dropout by AdamW; returns the run's folder."""
    config = config_of(
        written(folder / "run" / "shards", rows, row_group_rows=16),
        folder / "run",
        model=ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 1, "dropout": 0.2}),
        optimizer="adamw",
        seed=seed,
        epochs=2,
        batch_size=20,
        checkpoint_every_steps=BETWEEN,
        checkpoint_every_seconds=0.0,
        certify=True,
    )
    train(replace(config, **changes))
    return folder / "run"


def load_run(folder: Path) -> ClaimedRun:
    return ClaimedRun(str(folder), read_chain(str(folder)))


def claim(folder: Path, objects: UserObjects | None = None, **changes: Any) -> None:
    """Claims other settings and the present shards of the run, and makes its chain consistent again."""
    run = load_run(folder)
    first, last = run.chain.links[0], run.chain.links[-1]
    config = replace(run.config(first.content), **changes)
    claims = list_claims(
        config, objects or UserObjects(), ShardManifest.load(run.shards_uri), torch.device("cpu")
    )
    write_chain(str(folder), _chain_of(folder, claims, last))


def _chain_of(folder: Path, claims: dict[str, Any], end: Link) -> Chain:
    chain = Chain().add("start", 0, claims)
    root = folder / "checkpoints"
    for step in list_steps(str(root)):
        info = read_info(str(root / f"step-{step:010d}"))
        chain = chain.add("checkpoint", step, {"epoch": info.epoch, "training_sha256": info.training_sha256})
    return chain.add("end", end.step, end.content)


def continue_from(honest: Path, folder: Path, interval: Interval, forge: Callable[[Path], None]) -> None:
    """Copies an honest run up to an interval, forges the checkpoint of its end, and trains on honestly."""
    shutil.copytree(honest, folder)
    run = load_run(honest)
    for step in list_steps(str(folder / "checkpoints")):
        if step > (interval.first or 0):
            shutil.rmtree(folder / "checkpoints" / f"step-{step:010d}")
    forge(folder / "checkpoints")
    Path(chain_uri(str(folder))).unlink()
    shutil.rmtree(folder / "checkpoint")
    config = run.config(interval.claims, str(folder))
    train_here(config)
    write_chain(str(folder), _chain_of(folder, run.chain.links[0].content, read_chain(str(folder)).links[-1]))


def change_row(honest: Path, folder: Path, rows: dict[str, np.ndarray], draw: random.Random) -> int:
    """Claims other rows than the training read: one label differs.

    Returns the number of forged intervals, as all forgers do.
    """
    shutil.copytree(honest, folder)
    changed = {name: values.copy() for name, values in rows.items()}
    changed["y"][draw.randrange(ROWS)] += 0.25
    shutil.rmtree(folder / "shards")
    written(folder / "shards", changed, row_group_rows=16)
    claim(folder)
    return int(load_run(folder).chain.links[0].content["config"]["epochs"])


def change_seed(honest: Path, folder: Path, rows: Any, draw: random.Random) -> int:
    """Claims another seed than the one of the training."""
    shutil.copytree(honest, folder)
    claim(folder, seed=draw.randrange(1000, 10**6))
    return len(list_intervals(load_run(folder)))


def edit_weight(honest: Path, folder: Path, rows: Any, draw: random.Random) -> int:
    """Changes one weight of a checkpoint, and trains on from the changed weight."""
    run = load_run(honest)
    interval = draw.choice(list_intervals(run))

    def forge(root: Path) -> None:
        target = root / f"step-{interval.last.step:010d}"
        shutil.copytree(run.checkpoint_uri(interval.last.step), target)
        weights = {name: tensor.clone() for name, tensor in tensor_file.read(target / WEIGHTS).items()}
        name = draw.choice(sorted(weights))
        numbers = weights[name].view(-1)
        place = draw.randrange(len(numbers))
        numbers[place] += 1e-3
        with (target / WEIGHTS).open("wb") as file:
            tensor_file.write(weights, file)
        reseal_checkpoint(target, read_record(run.checkpoint_uri(interval.last.step)), {WEIGHTS})

    continue_from(honest, folder, interval, forge)
    return 1


def change_rate(honest: Path, folder: Path, rows: Any, draw: random.Random) -> int:
    """Trains one to three intervals with another learning rate than claimed, and the others as claimed."""
    run = load_run(honest)
    intervals = list_intervals(run)
    number = draw.randint(1, min(3, len(intervals)))
    first = draw.randrange(len(intervals) - number + 1)
    chosen = intervals[first : first + number]

    def forge(root: Path) -> None:
        state = ClaimedRun(str(folder), run.chain)
        state.__dict__["records"] = run.records
        for interval in chosen:
            claims = dict(interval.claims)
            rate = claims["config"]["learning_rate"] * draw.uniform(1.01, 1.5)
            claims["config"] = claims["config"] | {"learning_rate": rate}
            scratch = folder.parent / f"{folder.name}-scratch"
            made = replay(state, replace(interval, claims=claims), 1, UserObjects(), str(scratch))
            shutil.copytree(made, root / f"step-{interval.last.step:010d}")
            shutil.rmtree(scratch)

    continue_from(honest, folder, chosen[0], forge)
    return number


def leave_out_step(honest: Path, folder: Path, rows: Any, draw: random.Random) -> int:
    """Leaves out the last optimizer step of an interval, and claims it."""
    run = load_run(honest)
    within = [i for i in list_intervals(run) if run.records[i.last.step].position.step_in_epoch]
    interval = draw.choice(within)
    step = interval.last.step

    def forge(root: Path) -> None:
        scratch = folder.parent / f"{folder.name}-scratch"
        state = ClaimedRun(run.uri, run.chain)
        position = run.records[step].position
        before = replace(position, step=step - 1, step_in_epoch=position.step_in_epoch - 1)
        state.__dict__["records"] = {step - 1: replace(run.records[step], position=before)}
        last = replace(interval.last, step=step - 1)
        made = replay(state, replace(interval, last=last), 1, UserObjects(), str(scratch))
        target = root / f"step-{step:010d}"
        shutil.copytree(made, target)
        shutil.rmtree(scratch)
        record = read_record(str(target))
        claimed = replace(record.position, step=step, step_in_epoch=position.step_in_epoch)
        reseal_checkpoint(target, replace(record, position=claimed), set())

    continue_from(honest, folder, interval, forge)
    return 1


def reseal_checkpoint(target: Path, record: Record, changed: set[str]) -> None:
    """Writes the hashes of a forged checkpoint's files, so that it verifies."""
    sums = dict(record.files)
    for name in changed & set(sums):
        data = (target / name).read_bytes()
        sums[name] = FileSum(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    text = replace(record, files=sums).to_json().encode()
    (target / RECORD).write_bytes(text)
    info = replace(
        read_info(str(target)), step=record.position.step, training_sha256=hashlib.sha256(text).hexdigest()
    )
    (target / COMMIT).write_text(json.dumps(asdict(info)))


FORGERS: dict[str, Callable[..., int]] = {
    "row changed in the shards": change_row,
    "another seed claimed": change_seed,
    "weight edited in a checkpoint": edit_weight,
    "another learning rate": change_rate,
    "optimizer step left out": leave_out_step,
}
