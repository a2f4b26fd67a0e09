"""Reading a safetensors file tensor by tensor equals reading all of it, and both refuse damaged files."""

import json
import os
import resource
import struct
from collections.abc import Callable, Iterator
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


GOOD: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def hostile(header: object, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)  # tensors begin at a multiple of their numbers' width
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def of_one(**changes: Any) -> bytes:
    return hostile({"a": GOOD | changes})


# Content, and what reading by tensor says about it.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", ""),
    "short": (b"\0" * 7, ""),
    "header length of all bits": (b"\xff" * 16, ""),
    "huge header length": (hostile({"a": GOOD}, length=2**63), ""),
    "header length past the end": (hostile({"a": GOOD}, length=10_000), ""),
    "out of the file": (of_one(shape=[2**40], data_offsets=[0, 2**42]), ""),
    "overlapping": (hostile({"a": GOOD, "b": GOOD}), "begins at byte"),
    "gap": (hostile({"a": GOOD, "b": GOOD | {"data_offsets": [12, 20]}}, b"\0" * 20), "begins at byte"),
    "more bytes": (hostile({"a": GOOD | {"data_offsets": [0, 12]}}, b"\0" * 12), "has 12 bytes"),
    "backwards": (of_one(data_offsets=[8, 0]), ""),
    "negative": (of_one(shape=[-2]), ""),
    "negative twice": (of_one(shape=[-1, -2]), "no number of bytes"),
    "fraction": (of_one(shape=[2.0]), "no number of bytes"),
    "overflowing shape": (of_one(shape=[2**62, 2**62]), ""),
    "shape against offsets": (of_one(shape=[1]), "has 8 bytes"),
    "unknown dtype": (of_one(dtype="F99"), "F99"),
    "dtype of another type": (of_one(dtype=7), ""),
    "no object": (hostile([1, 2]), "list"),
    "not a number": (hostile(b'{"a": NaN}'), ""),
    "deep": (hostile(b'{"a":' * 50_000), ""),
    "data behind": (hostile({"a": GOOD}, b"\0" * 64), "end at byte"),
    "data behind nothing": (hostile({}, b"!"), ""),
}


@pytest.mark.parametrize("read", [tensor_file.read, StreamedFile])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_takes_no_memory(tmp_path: Path, name: str, read: Callable[[str], object]) -> None:
    path = tmp_path / "model.safetensors"
    content, told = HOSTILE[name]
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = rf"is no readable safetensors file \(.*{told if read is StreamedFile else ''}"
    with pytest.raises(ValueError, match=words):
        read(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
