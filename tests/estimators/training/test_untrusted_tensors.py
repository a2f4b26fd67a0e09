"""Untrusted safetensors files: a bad header raises ValueError and allocates no memory."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.weights import load_checkpoint, save_checkpoint

GOOD: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def name_file(header: object, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


HOSTILE = {
    "empty": b"",
    "huge header length": name_file({"a": GOOD}, length=2**63),
    "header length past the end": name_file({"a": GOOD}, length=10_000),
    "out of the file": name_file({"a": GOOD | {"shape": [2**40], "data_offsets": [0, 2**42]}}),
    "overlapping": name_file({"a": GOOD, "b": GOOD}),
    "backwards": name_file({"a": GOOD | {"data_offsets": [8, 0]}}),
    "negative": name_file({"a": GOOD | {"shape": [-2]}}),
    "overflowing shape": name_file({"a": GOOD | {"shape": [2**62, 2**62]}}),
    "shape against offsets": name_file({"a": GOOD | {"shape": [1]}}),
    "unknown dtype": name_file({"a": GOOD | {"dtype": "F99"}}),
    "dtype of another type": name_file({"a": GOOD | {"dtype": 7}}),
    "no object": name_file([1, 2]),
    "not a number": name_file(b'{"a": NaN}'),
    "deep": name_file(b'{"a":' * 50_000),
    "data behind": name_file({"a": GOOD}, data=b"\0" * 64),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="is no readable safetensors file"):
        tensor_file.read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_weights_that_are_a_link_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 1)
    save_checkpoint(str(tmp_path / "one"), module)
    save_checkpoint(str(tmp_path / "two"), module)
    weights = tmp_path / "two" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "one" / "model.safetensors")
    with pytest.raises(ValueError, match="is a link that leads out of its folder"):
        load_checkpoint(str(tmp_path / "two"), module)
