"""Weights of a checkpoint: a round trip, and refused files."""

from pathlib import Path

import pytest
from torch import nn

from ringspark.estimators.training.checkpoint.weights import (
    WEIGHTS,
    map_checkpoint,
    read_info,
    save_checkpoint,
)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.ModuleDict:
        module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        module["b"].weight = module["a"].weight
        return module

    saved, loaded = tied(), tied()
    save_checkpoint(str(tmp_path / "c"), saved)
    map_checkpoint(str(tmp_path / "c"), loaded)
    assert loaded["a"].weight is loaded["b"].weight
    assert loaded["a"].weight.equal(saved["a"].weight)


def test_a_folder_without_checkpoint_a_damaged_one_and_a_foreign_one_are_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        read_info(uri)
    save_checkpoint(uri, nn.Linear(3, 2))
    with pytest.raises(ValueError, match="is not of this model"):
        map_checkpoint(uri, nn.Linear(4, 2))
    weights = tmp_path / "c" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ValueError, match="the file is damaged"):
        map_checkpoint(uri, nn.Linear(3, 2))


def test_weights_that_are_a_link_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 1)
    save_checkpoint(str(tmp_path / "one"), module)
    save_checkpoint(str(tmp_path / "two"), module)
    weights = tmp_path / "two" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "one" / "model.safetensors")
    with pytest.raises(ValueError, match="is a link that leads out of its folder"):
        map_checkpoint(str(tmp_path / "two"), module)
