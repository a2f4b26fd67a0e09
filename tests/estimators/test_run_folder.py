"""What a finished run's folder holds. What a given folder may hold at first: `test_resume.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringspark.estimators.run.folder import RunFolder


def test_a_finished_run_has_nothing_of_what_was_under_way(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path), is_given=True)
    (tmp_path / "checkpoints" / "step-0000000010").mkdir(parents=True)
    (tmp_path / "heartbeat").mkdir()
    for name in ("history.json", "shards.json", ".progress.json.0123abcd", "checkpoints/step-0000000010/x"):
        (tmp_path / name).write_text("{}")
    run.finish("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.json", "result.json"]


def test_a_run_of_an_older_format_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format_version": 1, "identity": {}}')
    told = (
        r"cannot be resumed: its format is 1, of before the first release, .* that wrote it, or give another"
    )
    with pytest.raises(ValueError, match=told):
        RunFolder(str(tmp_path), is_given=True).identity()
