"""Contents of a finished run's folder. `test_resume.py` tests the allowed contents before a run."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ringspark.estimators.run.folder import Begun, RunFolder
from ringspark.estimators.run.identity import list_differences
from ringspark.estimators.training.settings.config import TrainConfig

PLAIN = TrainConfig(shards_uri="", run_uri="", input_columns=("x",), label_columns=("y",))


def test_a_finished_run_has_nothing_of_what_was_under_way(tmp_path):
    run = RunFolder(str(tmp_path), is_given=True)
    (tmp_path / "checkpoints" / "step-0000000010").mkdir(parents=True)
    (tmp_path / "heartbeat").mkdir()
    for name in ("history.json", "shards.json", ".progress.json.0123abcd", "checkpoints/step-0000000010/x"):
        (tmp_path / name).write_text("{}")
    run.finish("{}", PLAIN)
    run.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.json", "result.json"]


def test_a_run_of_an_older_format_is_not_called_damaged(tmp_path):
    (tmp_path / "run.json").write_text('{"format_version": 1, "identity": {}}')
    told = r"cannot be resumed: its format is 1, from before the first release, .* that wrote it, or"
    with pytest.raises(ValueError, match=told):
        RunFolder(str(tmp_path), is_given=True).identity()


def _fill(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["journal.log", "shards-0123456789ab"])
def test_the_folder_of_a_search_is_no_run_to_resume(tmp_path, name, resume):
    # A search writes "journal.log" and trials; population-based training writes only shards.
    others = ["journal.log", "trials/3/result.json"] if name == "journal.log" else []
    before = _fill(tmp_path, "owner.json", "shards-0123456789ab/manifest.json", *others)
    with pytest.raises(ValueError, match=f"holds '{name}', which no training writes; give another"):
        RunFolder.given(str(tmp_path), resume)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_dies_early_leaves_the_folder_and_the_files_that_were_there(tmp_path):
    _fill(tmp_path / "resumed", "owner.json", "notes.txt")
    (tmp_path / "resumed" / "run.json").write_text(json.dumps(asdict(Begun(identity={}))))
    (tmp_path / "empty").mkdir()
    for name, left in (("resumed", ["notes.txt"]), ("empty", []), ("new", None)):
        folder = tmp_path / name
        run = RunFolder.given(str(folder), resume=True)
        run._is_mine = True
        _fill(folder, "shards/manifest.json", ".config.json.0123456789abcdef", "best-3/weights")
        with pytest.raises(KeyError), run.guarded():
            raise KeyError("on purpose")
        assert left == ([path.name for path in folder.iterdir()] if folder.exists() else None)


def test_a_setting_of_one_run_alone_is_a_difference():
    found = list_differences({"settings": {"a": 1}}, {"settings": {"b": 2}})
    assert found == ["a: 1 -> null", "b: null -> 2"]
