"""Reading a safetensors file tensor by tensor equals reading all of it."""

from __future__ import annotations

import io
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.streamed_file import KEPT_BYTES, StreamedFile
from ringspark.estimators.training.checkpoint.weights import save_checkpoint, stream_checkpoint
from ringspark.models.meta_device import copy_to_meta

MIB = 1 << 20
# Larger tensors are memory-mapped, at an offset that is not page-aligned.
WIDE = KEPT_BYTES // 4 + 1


def written(folder: Path, state: dict[str, torch.Tensor]) -> str:
    path = folder / "model.safetensors"
    with open(path, "wb") as file:
        tensor_file.write(state, file)
    return str(path)


@contextmanager
def address_space_left(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_every_dtype_and_shape_comes_as_from_the_whole_file(tmp_path: Path) -> None:
    state: dict[str, torch.Tensor] = {
        str(dtype): torch.randint(0, 2, (WIDE,)).to(dtype) for dtype in tensor_file.DTYPES.values()
    }
    state |= {"empty": torch.empty(0, 3), "number": torch.tensor(2.5), "table": torch.randn(3, WIDE)}
    path = written(tmp_path, state)
    file, whole = StreamedFile(path), tensor_file.read(path)
    os.remove(path)
    assert file.slices.keys() == whole.keys()
    for name, expected in whole.items():
        found = file.read(name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.view(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name
        # Kernels depend on memory alignment.
        assert not found.numel() or found.data_ptr() % 64 == expected.data_ptr() % 64, name
        if found.dtype == torch.float32:
            found.fill_(7)  # a copy: the next read must not change
            assert torch.equal(file.read(name), expected)


@pytest.mark.extras
def test_only_the_tensor_that_is_used_needs_room(tmp_path: Path) -> None:
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32))).eval()
    save_checkpoint(str(tmp_path), layers)
    rows = torch.randn(2, 1024)
    with torch.inference_mode():
        expected = layers(rows)
        streamed = copy_to_meta(layers)
        # The weights need 128 MiB.
        with address_space_left(64 * MIB):
            with pytest.raises((RuntimeError, ValueError, MemoryError)):
                tensor_file.read(tmp_path / "model.safetensors")
            stream_checkpoint(str(tmp_path), streamed)
            assert torch.equal(streamed(rows), expected)


def test_a_tensor_without_room_is_one_sentence(tmp_path: Path) -> None:
    file = StreamedFile(written(tmp_path, {"wide": torch.zeros(64, MIB)}))
    with (
        address_space_left(64 * MIB),
        pytest.raises(MemoryError, match=r"'wide' have 268,435,456 bytes, which this process may not map"),
    ):
        file.read("wide")


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    save_checkpoint(str(tmp_path), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"is not of this model: .*size mismatch"):
        stream_checkpoint(str(tmp_path), copy_to_meta(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="now has the weights of another model"):
        stream_checkpoint(str(tmp_path), copy_to_meta(nn.Linear(4, 3)), expected_id="other")


def changed(header: dict[str, Any], **tensor: Any) -> dict[str, Any]:
    return header | {"b": header["b"] | tensor}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda h: changed(h, data_offsets=[12, 24]), "begins at byte"),
        (lambda h: changed(h, data_offsets=[8, 28]), "has 20 bytes"),
        (lambda h: changed(h, shape=[2]), "has 12 bytes"),
        (lambda h: changed(h, shape=[-1, -3]), "no number of bytes"),
        (lambda h: changed(h, shape=[3.0]), "no number of bytes"),
        (lambda h: changed(h, dtype="I9"), "I9"),
        (lambda h: {"a": h["a"]}, "end at byte"),
        (lambda h: [h], "list"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, change: Any, told: str) -> None:
    file = io.BytesIO()
    tensor_file.write({"a": torch.ones(4), "b": torch.ones(3)}, file)
    data = file.getvalue()
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match=f"is no readable safetensors file .*({told})"):
        StreamedFile(str(path))


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, b"\xff" * 16, b"\x02\x00\x00\x00\x00\x00\x00\x00{}!"])
def test_what_is_no_such_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match="is no readable safetensors file"):
        StreamedFile(str(tmp_path / "x"))
