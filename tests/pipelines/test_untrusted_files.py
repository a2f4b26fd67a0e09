"""Manifests, folders and URIs from untrusted sources: paths outside the folder, wrong types, passwords."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.column_stats import ColumnStats
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Scalar
from ringspark.pipelines.manifest import ShardFile


def manifest() -> dict[str, Any]:
    made = ShardManifest(
        uri="/shards",
        columns=(Column(name="x", kind=Scalar(dtype="int64"), source="bigint"),),
        files=tuple(
            ShardFile(path=f"part-{i}.parquet", split="train", num_bytes=1, sha256="", row_groups=(1,))
            for i in range(2)
        ),
        stats={"train": {"x": ColumnStats(rows=2)}},
    )
    return json.loads(made.to_json())


NAMES = ["", "..", "../x", "a/../../x", "a//x", "./x", "/etc/passwd", "s3://b/x", "a::b", "memory::x"]
NAMES += ["a\\b", "a\0b", "a\nb"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    values = manifest()
    values["files"][1]["path"] = name
    with pytest.raises(ValueError, match="a manifest may only name files in its folder, got"):
        ShardManifest.from_json(json.dumps(values), "/shards")


STATS = manifest()["stats"]["train"]["x"]
BROKEN: list[tuple[str, Any, str]] = [
    ("files", [], "names no files"),
    ("files", None, "cannot be used"),
    ("files", [manifest()["files"][0]] * 2, "names 'part-0.parquet' twice"),
    ("files", [manifest()["files"][0] | {"path": 7}], "'path' must be str, got 7"),
    ("files", [manifest()["files"][0] | {"num_bytes": "1"}], "'num_bytes' must be int, got '1'"),
    ("files", [manifest()["files"][0] | {"num_bytes": -1}], "negative size"),
    ("files", [manifest()["files"][0] | {"more": 1}], "unknown entry 'more'"),
    ("columns", [manifest()["columns"][0]] * 2, "two columns are named 'x'"),
    ("columns", [manifest()["columns"][0] | {"kind": ["scalar"]}], "has unknown type"),
    ("stats", {"train": {"y": STATS}}, "have no column 'y'"),
    ("stats", {"train": {"x": STATS | {"rows": "5"}}}, "'rows' must be int, got '5'"),
    ("stats", {"test": {}}, "unknown split 'test'"),
    ("format_version", True, "must be a whole number"),
]


@pytest.mark.parametrize(("key", "value", "message"), BROKEN)
def test_a_manifest_of_wrong_values_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardManifest.from_json(json.dumps(manifest() | {key: value}), "/shards")


PLACES: list[tuple[str | int, ...]] = [(), ("files", 0), ("columns", 0), ("stats", "train", "x")]


@pytest.mark.parametrize("place", PLACES)
def test_a_manifest_that_lacks_an_entry_is_refused(place: tuple[str | int, ...]) -> None:
    """This includes entries with a default, because defaults must not fill gaps in a damaged file."""

    def entry(values: Any) -> Any:
        for step in place:
            values = values[step]
        return values

    for name in entry(manifest()):
        values = manifest()
        del entry(values)[name]
        with pytest.raises(ValueError, match=rf"'{name}' is missing|a column has unknown type None"):
            ShardManifest.from_json(json.dumps(values), "/shards")


@pytest.mark.parametrize("text", ["[]", "NaN", '{"format_version": NaN}', "[" * 100_000, "\ufeff{}", ""])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"the manifest in '/shards' cannot be used"):
        ShardManifest.from_json(text, "/shards")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(manifest()))
    for name in ("part-0.parquet", "inside"):
        (folder / name).write_bytes(b"x")
    (folder / "part-1.parquet").symlink_to("inside")
    assert len(ShardManifest.load(folder).files) == 2
    (tmp_path / "outside").write_bytes(b"x")
    (folder / "part-1.parquet").unlink()
    (folder / "part-1.parquet").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=r"part-1.parquet' is a link that leads out of its folder; put"):
        ShardManifest.load(folder)
    # The folder itself may be a link.
    (folder / "part-1.parquet").unlink()
    os.symlink(folder, tmp_path / "alias")
    assert len(ShardManifest.load(tmp_path / "alias").files) == 2


SECRETS = [
    ("s3://KEY:hunter2@bucket/a", "s3://***:***@bucket/a"),
    ("https://user:hunter2@host:8080/a?x=1", "https://***:***@host:8080/a?x=1"),
    ("https://host/a?sv=1&sig=hunter2&se=2", "https://host/a?sv=1&sig=***&se=2"),
    ("https://host/a?X-Amz-Signature=hunter2", "https://host/a?X-Amz-Signature=***"),
    ("https://host/a?access_token=hunter2#x", "https://host/a?access_token=***#x"),
    ("simplecache::s3://KEY:hunter2@bucket/a", "simplecache::s3://***:***@bucket/a"),
    ("s3://KEY:hunter2/hunter2@bucket/a", "s3://***:***@bucket/a"),
    ("s3://KEY:/hunter2+/x@bucket/a", "s3://***:***@bucket/a"),
    ("s3://me@corp.com:hunter2@bucket/a", "s3://***:***@bucket/a"),
    # The end of the password is ambiguous here.
    ("s3://KEY:/hunter2+/x@bucket/a@b", "s3://***"),
    ("s3://KEY:x@hunter2/hunter2@bucket/a", "s3://***"),
    ("zip://a.csv::s3://KEY:x@hunter2\n/hunter2@bucket", "zip://a.csv::s3://***"),
    ("s3://KEY:hunter2@hunter2@bucket/a", "s3://***:***@bucket/a"),
    ("zip://a.csv::s3://KEY:hun/hunter2@bucket/a", "zip://a.csv::s3://***:***@bucket/a"),
]


@pytest.mark.parametrize(("uri", "shown"), SECRETS)
def test_a_uri_with_a_password_is_refused_without_showing_it(uri: str, shown: str) -> None:
    assert storage.redact(uri) == shown
    with pytest.raises(ValueError, match="must not hold a password or token") as caught:
        storage.normalize(uri)
    assert shown in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/a:b@c",
        "s3://bucket/a:b/c@d",
        "hdfs://host:8020/a@b",
        "http://[::1]:8080/a@b",
        "hdfs://user@host:8020/a@b",
        "http://host:8080?u=a@b",
        "http://host?u=a:b@c",
        "alluxio://h1:19998,h2:19998/x@y",
        "zip://a.csv::s3://bucket/a@b",
        "hdfs://user@host:8020/a",
        "abfs://container@account.dfs.core.windows.net/a",
        "gs://bucket/design=1/a",
        "/data/user:pw@x",
    ],
)
def test_other_uris_stay_as_they_are(uri: str) -> None:
    assert storage.redact(uri) == uri
    assert storage.normalize(uri) == uri
