"""Removal of old checkpoints of a run."""

from pathlib import Path

import pytest

from ringspark.estimators.training.checkpoint.folders import keep_newest, list_steps, step_uri
from ringspark.estimators.training.checkpoint.weights import COMMIT, WEIGHTS
from ringspark.pipelines import storage


@pytest.mark.parametrize(("number", "kept"), [(1, [6]), (2, [3, 6]), (9, [1, 3, 6])])
def test_the_newest_is_kept_and_later_ones_are_removed(tmp_path: Path, number: int, kept: list[int]) -> None:
    """Later ones exist if a training resumed before damaged checkpoints or rolled back."""
    for step in (1, 3, 6, 9, 12):
        Path(step_uri(str(tmp_path), step)).mkdir()
        Path(step_uri(str(tmp_path), step), COMMIT).write_text("{}")
    keep_newest(str(tmp_path), 6, number)
    assert list_steps(str(tmp_path)) == kept


def test_an_interrupted_removal_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(step_uri(str(tmp_path), 3))
    folder.mkdir()
    for name in (COMMIT, WEIGHTS):
        (folder / name).write_text("{}")
    remove = storage.remove

    def remove_one(uri: str, *, recursive: bool = False) -> None:
        if recursive:
            raise OSError("the store does not answer")
        remove(uri)

    monkeypatch.setattr(storage, "remove", remove_one)
    with pytest.raises(OSError, match="does not answer"):
        keep_newest(str(tmp_path), 2, 1)
    assert [path.name for path in folder.iterdir()] == [WEIGHTS]
