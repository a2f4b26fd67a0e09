import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringspark.pipelines import ShardManifest
from ringspark.pipelines.manifest import FORMAT_VERSION


@pytest.fixture
def shards(ordered_shards: Any) -> ShardManifest:
    return ordered_shards({"x": np.arange(25), "v": np.ones((25, 2), dtype=np.float32)})


def test_load_gives_what_was_saved(shards: ShardManifest) -> None:
    assert ShardManifest.load(shards.uri) == shards
    # Spark may resolve a path without a scheme differently.
    on_disk = ShardManifest.load(f"file:{shards.uri}/")
    assert on_disk == ShardManifest.load(on_disk.uri) == replace(shards, uri=f"file://{shards.uri}")
    on_disk.verify()
    assert (shards.num_rows, shards.row_groups) == (25, (10, 3, 10, 2))
    assert [(column.name, column.row_shape) for column in shards.columns] == [("x", ()), ("v", (2,))]
    assert shards.locate()[2] == (shards.files[1], 0)
    shards.verify_files()


def test_a_moved_folder_still_loads(shards: ShardManifest, tmp_path: Path) -> None:
    shutil.move(shards.uri, tmp_path / "moved")
    moved = ShardManifest.load(tmp_path / "moved")
    assert moved.uri == str(tmp_path / "moved")
    moved.verify_files()


def test_select_is_a_view_of_one_split(shards: ShardManifest) -> None:
    assert shards.select("train") == shards
    empty = shards.select("validation")
    assert (empty.num_rows, empty.row_groups, empty.files, empty.stats) == (0, (), (), {})
    assert empty.columns == shards.columns
    empty.verify_files()


def _edit(manifest: ShardManifest, change: Any) -> None:
    path = Path(manifest.uri) / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_full_check_names_every_damaged_file(shards: ShardManifest) -> None:
    shards.verify()
    path = Path(shards.uri) / shards.files[1].path
    data = bytearray(path.read_bytes())
    data[10] ^= 1  # size and footer stay the same
    path.write_bytes(data)
    shards.verify_files()
    with pytest.raises(
        ValueError, match=f"{shards.files[1].path}' differs from the bytes that were written; write"
    ):
        shards.verify()
    (Path(shards.uri) / shards.files[0].path).unlink()
    with pytest.raises(ValueError, match=rf"{shards.files[0].path}' is missing; .*{shards.files[1].path}"):
        shards.verify()


def test_an_older_format_is_refused(shards: ShardManifest) -> None:
    _edit(shards, lambda data: data.update(format_version=FORMAT_VERSION - 1))
    with pytest.raises(ValueError, match=r"before the first release, but this ringspark reads \d; write"):
        ShardManifest.load(shards.uri)


def test_bytes_that_are_no_text_are_refused(shards: ShardManifest) -> None:
    (Path(shards.uri) / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be used"):
        ShardManifest.load(shards.uri)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data + b"x", r"has \d+ bytes, but the manifest says \d+; write"),
        (lambda data: data[:-4] + b"XXXX", "cannot be read"),
    ],
)
def test_a_changed_file_is_named(shards: ShardManifest, change: Any, message: str) -> None:
    path = Path(shards.uri) / shards.files[1].path
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{shards.files[1].path}' {message}"):
        shards.verify_files()


def test_other_row_groups_are_refused(shards: ShardManifest) -> None:
    _edit(shards, lambda data: data["files"][0].update(row_groups=[5, 8]))
    with pytest.raises(ValueError, match=r"has row groups \(10, 3\), but the manifest says \(5, 8\)"):
        ShardManifest.load(shards.uri).verify_files()
