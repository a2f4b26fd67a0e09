from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringspark.pipelines import ShardFile, ShardManifest
from ringspark.pipelines.manifest import FORMAT_VERSION


@pytest.fixture
def shards(ordered_shards: Any) -> ShardManifest:
    manifest: ShardManifest = ordered_shards({"x": np.arange(25), "v": np.ones((25, 2), dtype=np.float32)})
    return manifest


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
    with pytest.raises(ValueError, match="split must be one of train, validation, got 'test'"):
        shards.select("test")  # type: ignore[arg-type]


def test_describe_names_every_column(shards: ShardManifest) -> None:
    text = shards.describe()
    title, header, x, v = text.splitlines()
    assert "25 rows, 2 files, 4 row groups" in title
    assert header.split()[-4:] == ["min", "max", "mean", "std"]
    assert x.split() == ["train", "x", "int64", "25", "0", "0", "24", "12", "7.3598"]
    assert v.split()[:4] == ["train", "v", "float32[2]", "25"]


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=rf"'{folder}' holds no shards .*; write them with write_shards"):
            ShardManifest.load(folder)


def _edit(manifest: ShardManifest, change: Any) -> None:
    path = Path(manifest.uri) / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_newer_format_is_refused(shards: ShardManifest) -> None:
    _edit(shards, lambda data: data.update(format_version=FORMAT_VERSION + 1))
    with pytest.raises(ValueError, match=r"its format is \d, but this ringspark reads \d; upgrade ringspark"):
        ShardManifest.load(shards.uri)
    _edit(shards, lambda data: data.update(format_version=FORMAT_VERSION - 1))
    with pytest.raises(ValueError, match=r"before the first release, but this ringspark reads \d; write"):
        ShardManifest.load(shards.uri)


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


@pytest.mark.parametrize(
    "path", ["../other.parquet", "/etc/passwd", "a/../../b", "s3://bucket/x", "..", "", "a\\b", "memory::x"]
)
def test_paths_out_of_the_folder_are_refused(shards: ShardManifest, path: str) -> None:
    with pytest.raises(ValueError, match="may only name files in its folder"):
        ShardFile(path=path, split="train", num_bytes=1, sha256="", row_groups=(1,))
    _edit(shards, lambda data: data["files"][0].update(path=path))
    with pytest.raises(ValueError, match="cannot be used: a manifest may only name files in its folder"):
        ShardManifest.load(shards.uri)


def test_a_damaged_manifest_is_one_sentence(shards: ShardManifest) -> None:
    _edit(shards, lambda data: data.pop("columns"))
    with pytest.raises(ValueError, match="cannot be used: 'columns' is missing"):
        ShardManifest.load(shards.uri)
    (Path(shards.uri) / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be used"):
        ShardManifest.load(shards.uri)
    (Path(shards.uri) / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be used"):
        ShardManifest.load(shards.uri)


def test_an_unknown_column_names_the_known_ones(shards: ShardManifest) -> None:
    assert shards.column("v").row_shape == (2,)
    with pytest.raises(ValueError, match="have no column 'y'; known: x, v"):
        shards.column("y")


def test_a_missing_file_is_named(shards: ShardManifest) -> None:
    (Path(shards.uri) / shards.files[1].path).unlink()
    with pytest.raises(ValueError, match=rf"{shards.files[1].path}' is missing; write the shards again"):
        shards.verify_files()


def test_a_file_of_another_size_is_named(shards: ShardManifest) -> None:
    path = Path(shards.uri) / shards.files[0].path
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match=rf"{path.name}' has \d+ bytes, but the manifest says \d+; write"):
        shards.verify_files()


def test_a_damaged_footer_is_named(shards: ShardManifest) -> None:
    path = Path(shards.uri) / shards.files[0].path
    path.write_bytes(path.read_bytes()[:-4] + b"XXXX")
    with pytest.raises(ValueError, match=rf"{path.name}' cannot be read"):
        shards.verify_files()


def test_other_row_groups_are_refused(shards: ShardManifest) -> None:
    _edit(shards, lambda data: data["files"][0].update(row_groups=[5, 8]))
    with pytest.raises(ValueError, match=r"has row groups \(10, 3\), but the manifest says \(5, 8\)"):
        ShardManifest.load(shards.uri).verify_files()
