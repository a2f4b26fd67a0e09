"""A killed writer leaves no partial dataset that a reader accepts, and blocks no later writer.

A process forks the writers, because a fork takes milliseconds and a Spark application takes seconds.
"""

import json
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringspark.pipelines import ShardManifest, open_reader, write_shards

ROWS = 16_000
NUM_KILLS = 20

# Reads one JSON command per line. "after": seconds until the kill, None to let the writer finish. "at": a
# function of `os`; the writer kills itself before its first call or after its first return.
_FORKER = """
    import json, os, signal, sys, time, traceback
    from dataclasses import replace
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet
    from ringspark.pipelines import Column, ShardFile
    from ringspark.pipelines.kinds import Scalar
    from ringspark.pipelines.typed_json import record
    from ringspark.pipelines.writing.shard_writer import WritePlan, write_partition
    from ringspark.pipelines.writing.task_reports import join_reports

    def write(uri, folder, version, rows, overwrite):
        os.makedirs(os.path.join(uri, folder), exist_ok=True)
        plan = WritePlan(uri=uri, folder=folder, columns=(Column(name="id", kind=Scalar("int64")),),
                         handle_invalid=("error",), row_group_rows=2_000)
        reports = []
        for part in np.array_split(np.arange(rows) + (version << 32), 4):
            batches = (pa.record_batch([pa.array(piece)], ["id"]) for piece in np.array_split(part, 8))
            (report,) = write_partition(plan, batches)
            reports.append(json.loads(report.to_pydict()["report"][0]))
        files = [record(ShardFile, file) for report in reports for file in report["files"]]
        join_reports(plan, reports, files).save(overwrite=overwrite)

    def kill_myself_at(name, when):
        original = getattr(os, name)
        def killing(*args, **kwargs):
            if when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(os, name, killing)

    for line in sys.stdin:
        command = json.loads(line)
        start = time.perf_counter()
        child = os.fork()
        if not child:
            code = 1
            try:
                if command["at"] is not None:
                    kill_myself_at(*command["at"])
                write(*command["write"])
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if command["after"] is not None:
            time.sleep(max(0.0, command["after"] - (time.perf_counter() - start)))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), time.perf_counter() - start]), flush=True)
"""


class _Forker:
    """Starts writers in their own processes and kills them."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_FORKER)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._number = 0

    def write(
        self,
        uri: Path,
        version: int,
        *,
        overwrite: bool = False,
        after: float | None = None,
        at: tuple[str, str] | None = None,
    ) -> tuple[int, float]:
        """Runs one writer; returns its exit code, negative for a signal, and its lifetime in seconds."""
        self._number += 1
        write = [str(uri), f"_shards-{self._number}", version, ROWS, overwrite]
        self.process.stdin.write(json.dumps({"write": write, "after": after, "at": at}) + "\n")
        self.process.stdin.flush()
        code, seconds = json.loads(self.process.stdout.readline())
        return code, seconds


@pytest.fixture(scope="module")
def forker() -> Any:
    forker = _Forker()
    yield forker
    forker.process.communicate(timeout=300)


def _version_of(uri: Path) -> int | None:
    """Returns the version of the complete rows that a reader finds, without repeats; None for no shards."""
    try:
        manifest = ShardManifest.load(uri)
    except ValueError as error:
        if "holds no shards" not in str(error):
            raise
        return None
    manifest.verify()
    batches = open_reader(manifest, engine="arrow", shuffle=False).batches(0)
    ids = np.sort(np.concatenate([batch["id"] for batch in batches]))
    version = int(ids[0]) >> 32
    assert np.array_equal(ids, (version << 32) + np.arange(ROWS))
    return version


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fresh", "overwrite"])
def test_a_reader_finds_all_rows_or_none_whenever_a_writer_is_killed(forker, tmp_path, case):
    forker.write(tmp_path / "warm", 0)
    code, duration = forker.write(tmp_path / "measured", 0)
    assert code == 0
    # One kill in each of equal intervals of a write, and a few after its end.
    draw, outcomes = random.Random(7), []
    for part in range(NUM_KILLS):
        uri = tmp_path / f"s{part}"
        if case == "overwrite":
            assert forker.write(uri, 1)[0] == 0
        code, _ = forker.write(
            uri, 2, overwrite=case == "overwrite", after=1.1 * duration * (part + draw.random()) / NUM_KILLS
        )
        assert code in (-9, 0)
        outcomes.append(_version_of(uri))
        assert outcomes[-1] in ((None, 2) if case == "fresh" else (1, 2))
        assert code == -9 or outcomes[-1] == 2
        # Files of dead writers do not block a later writer.
        assert forker.write(uri, 3, overwrite=outcomes[-1] is not None)[0] == 0
        assert _version_of(uri) == 3
    assert outcomes[0] != 2, "the first kill comes before any commit"


@pytest.mark.parametrize("case", ["fresh", "overwrite"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["fsync", "commit"])
def test_a_kill_beside_the_commit_leaves_the_old_or_the_new(forker, tmp_path, case, when, step):
    overwrite = case == "overwrite"
    uri = tmp_path / "s"
    if overwrite:
        assert forker.write(uri, 1)[0] == 0
    # A new manifest is hard-linked into place, which fails if one exists; an existing manifest is replaced.
    function = step if step == "fsync" else ("replace" if overwrite else "link")
    assert forker.write(uri, 2, overwrite=overwrite, at=(function, when))[0] == -9
    committed = (step, when) == ("commit", "after")
    assert _version_of(uri) == (2 if committed else 1 if overwrite else None)
    assert forker.write(uri, 3, overwrite=overwrite or committed)[0] == 0
    assert _version_of(uri) == 3


@pytest.mark.spark
def test_files_that_a_killed_writer_was_about_to_rename_are_removed_a_day_later(spark, tmp_path):
    old = [".manifest.json.0a1b", ".ringspark-probe-0a1b", "..ringspark-probe-0a1b.2c3d"]
    others = [".manifest.json.4e5f", ".mine", "notes.txt"]
    for name in [*old, *others]:
        (tmp_path / name).write_text("half")
    for name in [*old, ".mine", "notes.txt"]:
        when = time.time() - 25 * 3600
        os.utime(tmp_path / name, (when, when))
    manifest = write_shards(spark.range(5), str(tmp_path))
    (data,) = {file.path.split("/")[0] for file in manifest.files}
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "manifest.json", data])
