"""Which checkpoints of a run stay."""

from pathlib import Path

import pytest

from ringspark.estimators.training.checkpoint.folders import keep_newest, step_uri, steps_in
from ringspark.estimators.training.checkpoint.weights import COMMIT


@pytest.mark.parametrize(("number", "kept"), [(1, [6]), (2, [3, 6]), (9, [1, 3, 6])])
def test_the_checkpoint_just_written_is_kept_and_later_ones_are_removed(
    tmp_path: Path, number: int, kept: list[int]
) -> None:
    """A training resumed before damaged checkpoints, or rolled back before good ones."""
    for step in (1, 3, 6, 9, 12):
        Path(step_uri(str(tmp_path), step)).mkdir()
        Path(step_uri(str(tmp_path), step), COMMIT).write_text("{}")
    keep_newest(str(tmp_path), 6, number)
    assert steps_in(str(tmp_path)) == kept
