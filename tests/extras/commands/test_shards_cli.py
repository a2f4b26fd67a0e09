"""The shards job: its output, and one clear error per mistake."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from programs import run_program

from ringspark.extras.reuse.cache_entries import folder_of, mark
from ringspark.jobs import command
from ringspark.pipelines import ShardManifest

DIGEST = "0123456789abcdef" * 4


def run(*options: str) -> int:
    return command.main(["shards", *options])


@pytest.fixture
def cache(tmp_path: Path, make_shards) -> tuple[Path, ShardManifest]:
    made = make_shards({"x": np.arange(64, dtype=np.float32), "y": np.arange(64)})
    root = tmp_path / "cache"
    root.mkdir()
    folder = Path(made.uri).rename(folder_of(root, DIGEST))
    mark(str(folder), "v1")
    return root, ShardManifest.load(folder)


def test_list_shows_every_entry(cache, capsys: pytest.CaptureFixture[str]) -> None:
    root, manifest = cache
    assert run("list", str(root)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("v1  20")
    assert "64 rows" in lines[0]
    assert lines[0].endswith("x, y")
    assert lines[1] == f"  {manifest.uri}"
    assert lines[2].startswith("shards: 1 entries, ")
    assert run("list", str(root / "nothing")) == 0
    assert "0 entries, 0 B" in capsys.readouterr().out


def test_describe_and_verify(cache, capsys: pytest.CaptureFixture[str]) -> None:
    _, manifest = cache
    assert run("describe", manifest.uri) == 0
    assert capsys.readouterr().out == manifest.describe() + "\n"
    assert run("verify", manifest.uri) == 0
    assert capsys.readouterr().out == f"shards: 64 rows in {len(manifest.files)} files, all there\n"


def test_remove_takes_a_key_or_all(cache, capsys: pytest.CaptureFixture[str]) -> None:
    root, _ = cache
    assert run("remove", str(root), "v1") == 0
    assert " freed in " in capsys.readouterr().out
    assert list(root.iterdir()) == []
    assert run("remove", str(root), "--all") == 0
    assert "0 B freed" in capsys.readouterr().out


def test_runs_are_listed_and_the_dead_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run-0123456789ab", "run-ba9876543210"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner.json").write_text("{}")
    os.utime(tmp_path / "run-0123456789ab" / "owner.json", (0, 0))
    assert run("runs", str(tmp_path)) == 0
    first, second, total = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"run-0123456789ab  stopped       0 epochs  +\d+ days ago  2 B", first)
    assert re.fullmatch(r"run-ba9876543210  in use        0 epochs  +0 min ago  2 B", second)
    assert total == f"shards: 2 runs and shards, 4 B found in {tmp_path}"
    assert run("runs", str(tmp_path), "--remove-older-than", "24") == 0
    assert f"shards: 1 runs and shards, 2 B removed in {tmp_path}\n" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["run-ba9876543210"]
    for path in (tmp_path / "run-ba9876543210" / name for name in ("owner.json", "result.json")):
        path.write_text("{}")
        os.utime(path, (0, 0))
    for options, left in (([], 1), (["--finished"], 0)):
        assert run("runs", str(tmp_path), "--remove-older-than", "24", *options) == 0
        assert len(list(tmp_path.iterdir())) == left
    assert run("runs", str(tmp_path), "--remove-older-than", "0.5") == 2
    assert "without a change for 1 hours or more, got 0.5" in capsys.readouterr().err
    assert run("runs", str(tmp_path), "--finished") == 2
    assert "--finished needs --remove-older-than HOURS" in capsys.readouterr().err


def test_no_spark_is_imported() -> None:
    found = "[m for m in ('pyspark', 'torch') if m in sys.modules]"
    code = f"import sys, ringspark.extras.commands.shards; print({found})"
    assert json.loads(run_program(code).stdout) == []
