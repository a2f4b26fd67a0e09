"""Sharded checkpoints: several ranks write them, one commit completes them, damaged shards are refused."""

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from peak_memory import memory_use
from ranks import run_ranks
from refusing_disk import RefusingDisk
from small_training import Runs

from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.shard_spec import CheckpointShards, ShardSpec
from ringspark.estimators.training.checkpoint.folders import (
    copy_checkpoint,
    find_newest_good,
    is_committed,
    list_steps,
    step_uri,
)
from ringspark.estimators.training.checkpoint.rank_state import GatheredRanks
from ringspark.estimators.training.checkpoint.reading import verify
from ringspark.estimators.training.checkpoint.record import Position, Record
from ringspark.estimators.training.checkpoint.shards import CheckpointShard, locate_tensors, map_shards
from ringspark.estimators.training.checkpoint.snapshot import OPTIMIZER, Snapshot, take_snapshot
from ringspark.estimators.training.checkpoint.weights import WEIGHTS, read_info
from ringspark.estimators.training.checkpoint.writer import BackgroundWriter
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import train_worker
from ringspark.models import ModelSpec

WHOLE = torch.arange(20.0).reshape(5, 4)
SPREAD = CheckpointShards(ShardSpec("tensor", 0), (5, 4), (0, 1))
NAMES = [f"{kind}-0000{part}-of-00002.abc.safetensors" for part in (0, 1) for kind in ("model", "optimizer")]
FILES = sorted([*NAMES, "ranks.safetensors", "training.json", "checkpoint.json"])


def _snapshots(step: int, seconds: float = 60.0) -> list[Snapshot]:
    """Returns two snapshots: a split matrix, a bias in the first shard, and one in the second."""
    position, spreads = Position(epoch=1, step=step), {"model.safetensors": {"w": SPREAD}}
    record = Record(position=position, num_parts=2, spreads=spreads)
    return [
        Snapshot(
            contents={WEIGHTS: {"w": half + step, name: own}, OPTIMIZER: {f"{name}/m": own}},
            ranks=GatheredRanks(),
            record=record,
            num_tensors=3,
            shard=CheckpointShard(number, 2, "abc", seconds),
        )
        for number, (half, name, own) in enumerate(
            [(WHOLE[:3], "a", torch.ones(2)), (WHOLE[3:], "b", torch.ones(3))]
        )
    ]


def _write(root: Path | str, snapshots: list[Snapshot], keep: int = 2) -> list[list[str]]:
    """Writes each shard with a separate writer; returns their errors."""
    writers = [BackgroundWriter(str(root), keep) for _ in snapshots]
    assert writers[0].clear(snapshots[0].record.position.step) == ""
    for writer, snapshot in zip(writers, snapshots, strict=True):
        writer.start(snapshot)
    assert all(writer.wait(60) for writer in writers)
    return [writer.errors for writer in writers]


def test_parts_are_one_checkpoint_that_is_counted_copied_and_pruned_whole(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        assert _write(root, _snapshots(step)) == [[], []]
    assert list_steps(str(root)) == [2, 3]
    folder = Path(step_uri(str(root), 3))
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert read_info(str(folder)).num_bytes == sum(path.stat().st_size for path in folder.glob("model-*"))
    copy_checkpoint(str(root), str(tmp_path / "copy"), 3)
    copied = step_uri(str(tmp_path / "copy"), 3)
    assert verify(copied).num_parts == 2
    files = sorted(str(path) for path in Path(copied).glob("model-*"))
    joined = map_shards(files, {"w": SPREAD})
    assert sorted(joined) == ["a", "b", "w"]
    assert joined["w"].equal(WHOLE + 3)


def test_an_interrupted_copy_is_no_checkpoint(tmp_path: Path) -> None:
    assert _write(tmp_path / "a", _snapshots(3)) == [[], []]
    copied = Path(step_uri(str(tmp_path / "b"), 3))
    (copied / FILES[-1]).mkdir(parents=True)  # a folder blocks the file
    with pytest.raises(IsADirectoryError):
        copy_checkpoint(str(tmp_path / "a"), str(tmp_path / "b"), 3)
    assert not is_committed(str(tmp_path / "b"), 3)


def _flip(folder: Path) -> None:
    file = folder / NAMES[2]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _signed(change: Callable[[dict[str, Any]], None], folder: Path) -> None:
    """Changes the record and updates its digest."""
    record = json.loads((folder / "training.json").read_text())
    change(record)
    text = json.dumps(record).encode()
    (folder / "training.json").write_bytes(text)
    info = replace(read_info(str(folder)), training_sha256=hashlib.sha256(text).hexdigest())
    (folder / "checkpoint.json").write_text(json.dumps(asdict(info)))


def _cut(**changes: Any) -> Callable[[Path], None]:
    return partial(_signed, lambda r: r["spreads"]["model.safetensors"]["w"].update(changes))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "digest": (_flip, "another SHA-256"),
    "missing": (lambda folder: (folder / NAMES[3]).unlink(), f"holds no {NAMES[3]};"),
    "more parts": (partial(_signed, lambda r: r.update(num_parts=3)), "file of none of its 3 shards"),
    "countless parts": (
        partial(_signed, lambda r: r.update(num_parts=10**12)),
        "it has 1000000000000 shards",
    ),
    "path": (partial(_signed, lambda r: r.update(token="/../abc")), "must be up to 16 hexadecimal digits"),
    "no parts": (partial(_signed, lambda r: r.update(num_parts=0)), "it has 0 shards"),
    "overlap": (partial(_signed, lambda r: r.update(spreads={})), r"shards .0, 1., but must be in only one"),
    "hole": (_cut(shape=[6, 4]), "do not make up"),
    "order": (_cut(parts=[1, 0]), "do not make up"),
    "other parts": (_cut(parts=[0]), "but must be in shards .0."),
    **{
        name: (_cut(cut={"axis": "tensor", "dim": dim, "blocks": blocks, "grid": grid}), "do not make up")
        for name, dim, blocks, grid in (
            ("other dimension", 1, 1, None),
            ("no dimension", 7, 1, None),
            ("no blocks", 0, 0, None),
            ("grid", 0, 1, [-1, -2]),
        )
    },
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_of_no_whole_never_count(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        _write(tmp_path, _snapshots(step))
    change, words = DAMAGES[damage]
    folder = Path(step_uri(str(tmp_path), 2))
    change(folder)
    with pytest.raises(ValueError, match=words):
        verify(str(folder))
    assert find_newest_good(str(tmp_path)) == 1
    assert "the checkpoint of step 2 is skipped" in caplog.text


def test_blocks_that_leave_a_rest_make_up_no_whole() -> None:
    with pytest.raises(ValueError, match=r"shapes \[\[3, 1\], \[0, 1\]\], which do not make up \[4, 1\]"):
        CheckpointShards(ShardSpec("tensor", 0, blocks=3), (4, 1), (0, 1)).check("w", [[3, 1], [0, 1]])


@pytest.mark.parametrize("shard", [0, 1])
def test_a_part_that_cannot_be_written_costs_the_checkpoint_and_no_wait(tmp_path: Path, shard: int) -> None:
    _write(tmp_path, _snapshots(1))
    snapshots = _snapshots(2)
    weights = snapshots[shard].contents[WEIGHTS]
    weights["w"] = weights["w"].to(torch.complex128)
    errors = _write(tmp_path, snapshots)
    assert "the checkpoint of step 2 was not written (" in errors[0][0]
    assert "complex128" in errors[0][0]
    assert find_newest_good(str(tmp_path)) == 1
    # The other shard may have created the folder again. It is no checkpoint; the next write removes it.
    assert not (Path(step_uri(str(tmp_path), 2)) / "checkpoint.json").exists()
    assert _write(tmp_path, _snapshots(3)) == [[], []]
    assert list_steps(str(tmp_path)) == [1, 3]


def test_a_part_that_never_comes_or_is_of_another_attempt_is_not_taken(tmp_path: Path) -> None:
    _write(tmp_path, _snapshots(1))
    first, second = _snapshots(2, seconds=1.0)
    errors = _write(tmp_path, [first, replace(second, shard=CheckpointShard(1, 2, "def"))])
    assert "shard 1 of 2 was not written within 1 s" in errors[0][0]
    assert list_steps(str(tmp_path)) == [1]


def test_a_part_of_an_attempt_before_that_comes_late_takes_no_place(tmp_path: Path) -> None:
    """A rank of the earlier attempt still writes its shard, with different bytes of the same length."""
    first, second = _snapshots(2)
    changed = second.contents | {WEIGHTS: {"w": WHOLE[3:] - 1, "b": torch.ones(3)}}
    late = replace(second, contents=changed, shard=CheckpointShard(1, 2, "fed"))
    for snapshot in (second, late, first):
        writer = BackgroundWriter(str(tmp_path), 2)
        writer.start(snapshot)
        assert writer.wait(60)
        assert writer.errors == []
    assert find_newest_good(str(tmp_path)) == 2


class HeldDisk(LocalFileSystem):
    """File system that blocks `ls` until `may_list` is set."""

    protocol = "held"
    may_list = threading.Event()

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        assert self.may_list.wait(60)
        return super().ls(path, detail, **options)


def test_a_store_that_does_not_answer_costs_the_checkpoint_and_no_others_patience(tmp_path: Path) -> None:
    """One rank clears the folder for a checkpoint while all other ranks wait."""
    fsspec.register_implementation("held", HeldDisk, clobber=True)
    left = tmp_path / "step-0000000001"
    left.mkdir()
    writer = BackgroundWriter(f"held://{tmp_path}", 2)
    try:
        assert "the store does not answer" in writer.clear(2, seconds=0.1)
        assert not writer.wait(0.0)
    finally:
        HeldDisk.may_list.set()
    assert writer.wait(60)
    assert writer.clear(2) == ""
    assert not left.exists()


class KeepingDisk(LocalFileSystem):
    protocol = "keeping"

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        raise PermissionError(f"{path} may not be removed")


def test_a_store_that_lets_nothing_be_removed_takes_checkpoints(tmp_path: Path) -> None:
    """The store keeps all checkpoints and the shard reports, which are never read again."""
    fsspec.register_implementation("keeping", KeepingDisk, clobber=True)
    for step in (1, 2):
        assert _write(f"keeping://{tmp_path}", _snapshots(step), keep=1) == [[], []]
    assert find_newest_good(str(tmp_path)) == 2
    assert list_steps(str(tmp_path)) == [1, 2]


def test_a_tensor_that_no_part_has_is_missed() -> None:
    with pytest.raises(ValueError, match="no shard has 'w'"):
        locate_tensors([{}, {}], {"w": SPREAD})


def _refused(config: TrainConfig, collective: Collective) -> Any:
    """The second rank cannot even write a file with the reason for its missing shard."""
    fsspec.register_implementation("refusing", RefusingDisk, clobber=True)
    RefusingDisk.refuses = collective.rank == 1
    return train_worker(config, collective, UserObjects()).checkpoint_errors


@pytest.mark.extras
@pytest.mark.distributed
def test_nobody_waits_for_a_part_whose_rank_can_write_nothing(runs: Runs) -> None:
    config = runs.check(
        64,
        model=ModelSpec("mlp", {"in_features": 4, "hidden": [8, 8], "out_features": 1}),
        batch_size=16,
        num_workers=2,
        parallelism={"tensor": 2},
        collective="torch",
        checkpoint_every_steps=3,
    )
    config = replace(config, run_uri=f"refusing://{runs.folder}/run")
    errors = run_ranks(2, "torch", partial(_refused, config))[0]
    assert [error.split(" (")[0] for error in errors] == [
        f"the checkpoint of step {step} was not written" for step in (3, 6)
    ]
    assert all("rank 1 could neither write its shard nor report why" in error for error in errors)
    assert list_steps(f"{runs.folder}/run/checkpoints") == []


# Six matrices including the head: the mesh shards them in pairs and replicates an odd one.
WIDTH, LAYERS = 256, 5


def _peak(collective: Collective) -> Any:
    """Returns the bytes of this rank's weights and moments, and the peak of a copy of its shard."""
    from ringspark.extras.model_parallel.shard_network import shard_network

    spec = ModelSpec("mlp", {"in_features": WIDTH, "hidden": [WIDTH] * LAYERS, "out_features": WIDTH})
    module = spec.build()
    mesh = RankMesh.of(collective, {"tensor": 2})
    shard_network(module, mesh, Mesh(tensor=2))
    sync = GradientSync(module, torch.optim.AdamW(module.parameters()))
    for parameter in module.parameters():
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        sync.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    own = 3 * sum(p.nbytes for p in module.parameters())
    use = memory_use(lambda: take_snapshot(sync, Position(step=1), mesh=mesh))
    return [own, use.peak, use.kept]


@pytest.mark.extras
@pytest.mark.distributed
@pytest.mark.slow
def test_each_rank_copies_its_own_part_and_one_tensor_at_most() -> None:
    one = WIDTH * WIDTH * 4
    whole = 3 * (LAYERS + 1) * one
    for own, peak, kept in run_ranks(2, "torch", _peak):
        assert own < 0.6 * whole
        # Step counts and scalars are not part of the tensor bytes.
        assert 0.9 * own < kept <= own + 4096
        assert peak <= own + one + 4096
