import asyncio
import errno
import os
import re
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from ringspark.pipelines import storage


def test_local_spellings_become_one_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = str(tmp_path / "a b")
    here = f"{tmp_path}/a b"
    for uri in ("a b", "./a b/", here, f"file://{here}", f"file:{here}", Path("a b")):
        assert storage.normalize(uri) == expected
    # Spark and fsspec also treat "%" literally.
    assert storage.normalize(f"file:{tmp_path}/a%20b") == str(tmp_path / "a%20b")


def test_other_schemes_are_kept() -> None:
    assert storage.normalize("s3://bucket/shards/") == "s3://bucket/shards"
    assert storage.normalize("memory://x") == "memory://x"
    with pytest.raises(ValueError, match="must not be empty"):
        storage.normalize("")


def test_join_uses_one_slash() -> None:
    assert storage.join("/data/", "a", "b") == "/data/a/b"
    assert storage.join("/", "a") == "/a"
    assert storage.join("s3://bucket", "a") == "s3://bucket/a"


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "x") if request.param == "local" else f"memory://{tmp_path.name}/x"


def test_a_removed_folder_is_not_made_again(folder: str) -> None:
    inside = storage.join(folder, "a", "b")
    storage.write_atomic(storage.join(folder, "claim"), b"mine")
    with storage.only_where(folder, "claim"):
        storage.write_atomic(storage.join(inside, "file"), b"")
        for name in ("claim", ""):
            # Without the claim, the remaining files of the folder do not matter.
            storage.remove(storage.join(folder, name), recursive=True)
            for write in (
                lambda: storage.write_atomic(storage.join(inside, "file"), b""),
                lambda: storage.make_dirs(inside),
                lambda: storage.open_file(storage.join(folder, "file"), "wb"),
            ):
                with pytest.raises(storage.UnclaimedError, match=f"{folder}' was removed"):
                    write()
        assert not storage.exists(folder)
        storage.write_atomic(f"{folder}-other/file", b"")
    storage.write_atomic(storage.join(inside, "file"), b"")


def test_a_removal_between_look_and_write_leaves_no_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    (tmp_path / "claim").touch()
    with storage.only_where(folder, "../claim"):
        with pytest.raises(storage.UnclaimedError):
            storage.write_atomic(storage.join(folder, "a", "file"), b"")
        with pytest.raises(storage.UnclaimedError):
            storage.make_dirs(storage.join(folder, "a"))
    assert not (tmp_path / "run").exists()


def test_files_come_and_go(folder: str) -> None:
    assert not storage.exists(folder)
    assert storage.list_names(folder) == []
    storage.make_dirs(folder)
    storage.write_atomic(storage.join(folder, "f"), b"one")
    storage.write_atomic(storage.join(folder, "f"), b"three")
    assert storage.read_bytes(storage.join(folder, "f")) == b"three"
    assert storage.size(storage.join(folder, "f")) == 5
    assert storage.list_names(folder) == ["f"]
    storage.remove_if_empty(folder)
    assert storage.exists(folder)
    storage.remove(storage.join(folder, "f"))
    storage.remove(storage.join(folder, "f"))
    storage.remove_if_empty(folder)
    assert not storage.exists(folder)
    storage.make_dirs(folder)
    storage.write_atomic(storage.join(folder, "g"), b"")
    storage.remove(folder, recursive=True)
    assert not storage.exists(folder)


def test_a_reader_never_sees_a_part_of_a_file(tmp_path: Path) -> None:
    uri = str(tmp_path / "f")
    contents = [bytes([digit]) * 200_000 for digit in range(4)]
    storage.write_atomic(uri, contents[0])
    done = threading.Event()

    def write() -> None:
        for index in range(40):
            storage.write_atomic(uri, contents[index % 4])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert storage.read_bytes(uri) in contents
    writer.join()
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_the_bytes_reach_the_disk_before_the_name(tmp_path, monkeypatch, overwrite):
    """Otherwise a crash of the machine could leave an empty file under the name."""
    calls: list[str] = []

    def noted(name: str) -> Any:
        call = getattr(os, name)
        return lambda *args: (calls.append(name), call(*args))[1]

    for name in ("fsync", "replace", "link"):
        monkeypatch.setattr(os, name, noted(name))
    storage.write_atomic(str(tmp_path / "file"), b"1", overwrite=overwrite)
    assert calls == ["fsync", "replace" if overwrite else "link"]


def test_check_writable_leaves_nothing_behind(tmp_path: Path) -> None:
    storage.check_writable(str(tmp_path))
    storage.check_writable(str(tmp_path / "new"))
    assert os.listdir(tmp_path) == []
    storage.check_writable("memory://probe/x")


def test_an_unknown_scheme_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="storage URI 'nope://x' cannot be written"):
        storage.check_writable("nope://x")


@pytest.mark.parametrize("uri", ["hdfs:///", "s3://"])
def test_a_uri_without_a_folder_is_refused(uri: str) -> None:
    """Without its slashes, "hdfs:" would be a local folder."""
    with pytest.raises(ValueError, match="names no folder"):
        storage.normalize(uri)


@pytest.mark.parametrize(
    ("uri", "character"),
    [
        ("s3://bucket/a*", "*"),
        ("s3://bucket/a/what?", "?"),
        ("gs://bucket/run#1", "#"),
        ("abfs://container/a\\b", "\\"),
        ("hdfs://host:8020/2026-11-30T10:00", ":"),
        ("hdfs:///x[1]", "["),
    ],
)
def test_a_character_that_a_client_misreads_is_refused(uri: str, character: str) -> None:
    """s3fs, gcsfs and adlfs remove what a pattern matches: "a*" would also remove "ab"."""
    with pytest.raises(
        ValueError, match=re.escape(f"holds {character!r}, which the store's client treats as a special")
    ):
        storage.normalize(uri)


@pytest.mark.parametrize(
    "uri", ["s3://bucket/a#1;b %20", "hdfs://host:8020/a#1;b %20", "/a*[1]?:", "a::s3://b?"]
)
def test_other_characters_stay(uri: str) -> None:
    assert storage.normalize(uri).endswith(uri)


def test_hdfs_without_a_client_says_what_to_install() -> None:
    """In a process of its own: the first attempt to load the library has another message than later ones."""
    code = """
import sys
import fsspec
sys.modules["hdfs_native"] = None  # as if it were not installed
fsspec.register_implementation("hdfs", "fsspec.implementations.arrow.HadoopFileSystem", clobber=True)
from ringspark.pipelines import storage
for call in (storage.exists, storage.check_writable, storage.list_names):
    try:
        call("hdfs://host:8020/rows")
    except ValueError as error:
        print(error)
"""
    environment = {"PATH": "/usr/bin:/bin", "JAVA_HOME": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    sentence = (
        "storage URI 'hdfs://host:8020/rows' needs a client of HDFS on driver and workers; pip install "
        "'ringspark[hdfs]', or set JAVA_HOME, HADOOP_HOME and CLASSPATH for the client of pyarrow\n"
    )
    assert (done.stdout, done.stderr) == (3 * sentence, "")


def test_what_a_client_raises_becomes_an_oserror() -> None:
    class OddError(Exception):
        pass

    for error, kind, message in (
        (OddError("gone"), ConnectionError, "memory://x: OddError: gone"),
        (asyncio.TimeoutError(), TimeoutError, "memory://x: timed out"),
        # Specific error types stay unchanged.
        *[
            (kind("why"), kind, "^'?why'?$")
            for kind in (FileNotFoundError, PermissionError, ValueError, KeyError)
        ],
    ):
        with pytest.raises(kind, match=message), storage.store_errors("memory://x"):
            raise error


def test_one_of_many_writers_gets_through(folder: str) -> None:
    uri = storage.join(folder, "commit")
    storage.write_atomic(uri, b"first", overwrite=False)
    with pytest.raises(FileExistsError):
        storage.write_atomic(uri, b"second", overwrite=False)
    assert storage.read_bytes(uri) == b"first"
    storage.remove(folder, recursive=True)


def test_where_no_links_can_be_made_one_of_many_writers_gets_through(tmp_path, monkeypatch):
    """Imitates a mounted object store."""

    monkeypatch.setattr(os, "link", _refuse)
    for turn in range(20):
        folder = tmp_path / str(turn)
        if turn % 2:  # two writers died here: one with a claim, and one while it took over the claim
            for claim in (".commit.claim", ".commit.claim.1"):
                _claim_of_a_dead_writer(folder / claim)
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(_wins, range(8), [folder] * 8))
        assert won.count(True) == 1
        assert (folder / "commit").read_bytes() == b"%d" % won.index(True) * 1000
        assert os.listdir(folder) == ["commit"]


def test_a_claim_is_respected_while_its_writer_may_live(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", _refuse)
    _claim_of_a_dead_writer(tmp_path / ".commit.claim")
    (tmp_path / ".commit.claim.1").touch()
    before = sorted(os.listdir(tmp_path))
    assert not _wins(1, tmp_path)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_rename_that_fails_removes_no_claim_of_a_dead_writer(tmp_path, monkeypatch):
    """Otherwise two later writers could both get the claim."""
    monkeypatch.setattr(os, "link", _refuse)
    monkeypatch.setattr(os, "rename", _refuse)
    _claim_of_a_dead_writer(tmp_path / ".commit.claim")
    with pytest.raises(OSError, match="no links here"):
        storage.write_atomic(str(tmp_path / "commit"), b"1", overwrite=False)
    assert os.listdir(tmp_path) == [".commit.claim"]


def _refuse(*_: Any) -> None:
    raise OSError(errno.ENOTSUP, "no links here")


def _claim_of_a_dead_writer(claim: Path) -> None:
    claim.parent.mkdir(exist_ok=True)
    claim.touch()
    an_hour_ago = claim.stat().st_mtime - 3600
    os.utime(claim, (an_hour_ago, an_hour_ago))


def _wins(number: int, folder: Path) -> bool:
    try:
        storage.write_atomic(str(folder / "commit"), b"%d" % number * 1000, overwrite=False)
    except FileExistsError:
        return False
    return True


class _NoOverwrite(LocalFileSystem):
    """Refuses to move onto an existing file, like HDFS; refuses every move while `is_broken`."""

    protocol = "nooverwrite"
    is_broken = False

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        if type(self).is_broken or os.path.exists(path2):
            raise OSError(f"{path1} cannot be moved to {path2}")
        os.rename(path1, path2)


def test_a_store_that_breaks_off_an_overwrite_keeps_the_new_bytes(tmp_path: Path) -> None:
    fsspec.register_implementation("nooverwrite", _NoOverwrite, clobber=True)
    uri = f"nooverwrite://{tmp_path}/manifest.json"
    storage.write_atomic(uri, b"old")
    storage.write_atomic(uri, b"new")
    assert storage.read_bytes(uri) == b"new"
    _NoOverwrite.is_broken = True
    try:
        with pytest.raises(
            OSError, match=r"new file could not be renamed .*; rename '.*/\.manifest\.json\.\w+' to"
        ) as told:
            storage.write_atomic(uri, b"newest")
    finally:
        _NoOverwrite.is_broken = False
    (kept,) = tmp_path.iterdir()
    assert kept.name in str(told.value)
    assert kept.read_bytes() == b"newest"


def test_a_disk_that_takes_no_more_is_told_with_the_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match=r"history\.json"):
            storage.write_atomic(str(tmp_path / "history.json"), b"{}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_check_removes_can_still_be_written(tmp_path, monkeypatch):
    """The other writer removes the empty folder between the creation of the folder and of the test file."""
    removed, real = [], storage.open_file

    def after_removal(uri: str, mode: str = "rb") -> Any:
        if len(removed) < 2:
            storage.remove_if_empty(str(tmp_path / "new"))
            removed.append(uri)
        return real(uri, mode)

    monkeypatch.setattr(storage, "open_file", after_removal)
    storage.check_writable(str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
