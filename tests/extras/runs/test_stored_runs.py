"""Cleanup removes runs of dead drivers and never touches runs that are alive."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from ringspark.extras.commands.runs import _show_settings
from ringspark.extras.runs.listing import discard_run, list_runs, remove_runs
from ringspark.pipelines import storage

HOUR = 3600.0


def make(root: Path, name: str, idle_hours: float, *files: str, shards: str = "") -> None:
    folder = root / name
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}")
    if shards:
        (folder / "config.json").write_text(json.dumps({"shards_uri": f"/elsewhere/{shards}"}))
    then = time.time() - idle_hours * HOUR
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = "owner.json", "heartbeat/rank-0.json"
    make(tmp_path, "run-00000000dead", 30, *files, shards="shards-00000000dead")
    make(tmp_path, "shards-00000000dead", 31, "manifest.json", "_shards-1/part-0.parquet")
    make(tmp_path, "run-0000000a11ve", 30, "owner.json")  # not a valid run id, so not ours
    make(tmp_path, "run-00000000a11e", 30, "owner.json", shards="shards-00000000a11e")
    make(tmp_path, "run-00000000a11e/heartbeat", 0.01, "rank-0.json")
    make(tmp_path, "shards-00000000a11e", 99, "manifest.json")
    make(tmp_path, "run-00000000b0a7", 0.01, "owner.json", shards="shards-00000000b0a7")
    make(tmp_path, "shards-00000000b0a7", 30, "manifest.json")
    make(tmp_path, "run-00000000d01e", 30, "owner.json", "result.json", "checkpoint/model.safetensors")
    make(tmp_path, "thesis", 99, "chapter.tex")
    return tmp_path


def test_runs_are_listed_with_age_size_and_state(root: Path) -> None:
    found = {Path(run.uri).name: run for run in list_runs(str(root))}
    assert {name: (run.state, round(run.idle_seconds / HOUR)) for name, run in found.items()} == {
        "run-00000000dead": ("stopped", 30),
        "shards-00000000dead": ("shards", 30),
        "run-00000000a11e": ("in use", 0),
        "shards-00000000a11e": ("shards", 0),
        "run-00000000b0a7": ("in use", 0),
        "shards-00000000b0a7": ("shards", 0),
        "run-00000000d01e": ("finished", 30),
    }
    assert found["shards-00000000dead"].num_bytes == 4


def test_only_the_dead_are_removed(root: Path) -> None:
    before = set(os.listdir(root))
    with pytest.raises(ValueError, match="without a change for 1 hours or more, got 0"):
        remove_runs(str(root), 0)
    assert not remove_runs(str(root), 40)
    assert set(os.listdir(root)) == before
    removed = {Path(run.uri).name for run in remove_runs(str(root), 24)}
    assert removed == {"run-00000000dead", "shards-00000000dead"}
    assert set(os.listdir(root)) == before - removed
    assert [Path(run.uri).name for run in remove_runs(str(root), 24, finished=True)] == ["run-00000000d01e"]
    assert set(os.listdir(root)) == before - removed - {"run-00000000d01e"}


def test_what_a_store_tells_no_time_of_is_never_removed() -> None:
    """An empty folder on such a store may belong to a write that has no file yet."""
    files = fsspec.filesystem("memory")
    files.makedirs("/stored/shards-00000000beef/_shards-1")
    files.pipe("/stored/run-00000000beef/owner.json", b"{}")
    assert [run.idle_seconds < HOUR for run in list_runs("memory://stored")] == [True, True]
    assert not remove_runs("memory://stored", 1, finished=True)
    files.rm("/stored", recursive=True)


def test_a_store_without_times_has_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    monkeypatch.setattr(type(files), "modified", fsspec.AbstractFileSystem.modified)
    files.pipe("/timeless/run-00000000beef/owner.json", b"{}")
    (run,) = list_runs("memory://timeless")
    assert (run.num_bytes, run.idle_seconds) == (2, 0.0)
    files.rm("/timeless", recursive=True)


def test_store_that_cannot_be_listed_ends_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uri: str) -> list[str]:
        raise OSError(f"no answer from {uri}")

    monkeypatch.setattr(storage, "list_names", fail)
    assert not discard_run("/searches/run-1")


def test_a_long_setting_is_cut_and_never_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    name = "weight" * 50  # a word without a place to break it
    facts: Any = SimpleNamespace(config=SimpleNamespace(weight_column=name))
    for everything in (False, True):
        _show_settings(facts, everything)
    _, cut, _, whole = capsys.readouterr().out.splitlines()
    assert cut == f"  weightCol = {name[:100]} ..."
    assert whole == f"  weightCol = {name}"
