"""Changes in a run's shards that a restart detects. `test_resume.py` uses files of a real training."""

from pathlib import Path

import numpy as np
import pytest

from ringspark.estimators.run.shards import ShardStates


@pytest.fixture
def manifest(make_shards):
    """A manifest with a NaN statistic."""
    return make_shards({"x": np.array([[1.0, 2.0]] * 70, np.float32), "y": np.full(70, np.nan)})


@pytest.fixture
def states(manifest, tmp_path):
    states = ShardStates(manifest, str(tmp_path / "run"))
    states.record()
    return states


def test_what_nobody_changed_is_as_it_was(states, manifest):
    states.check()
    for path in map(Path, manifest.paths):
        path.touch()
    states.check()


@pytest.mark.parametrize(("old", "new"), [('"float32"', '"float64"'), ("64", "65")])
def test_another_manifest_is_refused(states, manifest, old, new):
    path = Path(manifest.uri, "manifest.json")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"manifest\.json' changed during the training; restore"):
        states.check()
    path.write_text(text)
    states.check()


def test_a_missing_manifest_is_named(states, manifest):
    Path(manifest.uri, "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"holds no shards \(no manifest\.json"):
        states.check()
