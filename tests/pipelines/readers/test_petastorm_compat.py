"""Patches for Petastorm's missing imports are visible to Petastorm only."""

import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from ringspark.pipelines import ShardManifest

pytestmark = pytest.mark.skipif(find_spec("petastorm") is None, reason="petastorm is not installed")

LEGACY = find_spec("pyarrow.filesystem") is not None
READ = """
from ringspark.pipelines import ShardManifest, open_reader
assert sum(len(b["x"]) for b in open_reader(ShardManifest.load({uri!r}), engine="petastorm").batches(0)) == 40
"""


@pytest.fixture
def shards(ordered_shards: Any) -> ShardManifest:
    return ordered_shards({"x": np.arange(40, dtype=np.float32)}, row_group_rows=8)


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_reading_leaves_pyarrow_and_numpy_as_they_were(shards: ShardManifest) -> None:
    run(
        f"""
import sys, types
import numpy, pyarrow, pyarrow.parquet, pyarrow.fs, pyarrow.dataset
def names():
    return {{
        (module.__name__, name)
        for module in (numpy, pyarrow, pyarrow.parquet)
        for name, value in vars(module).items()
        if not isinstance(value, types.ModuleType)
    }}
before = names()
{READ.format(uri=shards.uri)}
assert names() == before, names() ^ before
for name in ("pyarrow.filesystem", "pyarrow.hdfs"):
    assert (name in sys.modules) == {LEGACY}, name
try:
    import pyarrow.filesystem
except ModuleNotFoundError:
    assert not {LEGACY}
"""
    )


@pytest.mark.skipif(not LEGACY, reason="Petastorm alone needs a pyarrow with the legacy dataset")
def test_petastorm_reads_for_its_own_users_before_and_after(shards: ShardManifest) -> None:
    run(
        f"""
import warnings; warnings.simplefilter("ignore")
from petastorm import make_batch_reader
def theirs():
    with make_batch_reader({[f"file://{path}" for path in shards.paths]}, shuffle_row_groups=False) as reader:
        return sorted(value for group in reader for value in group.x)
before = theirs()
{READ.format(uri=shards.uri)}
assert theirs() == before == list(range(40))
"""
    )


@pytest.mark.skipif(LEGACY, reason="on this pyarrow Petastorm can be imported alone")
def test_a_failed_import_of_petastorm_spoils_nothing(shards: ShardManifest) -> None:
    run(
        f"""
try:
    import petastorm
except ModuleNotFoundError as error:
    assert error.name.startswith("pyarrow."), error
else:
    raise AssertionError
{READ.format(uri=shards.uri)}
"""
    )


def test_one_thread_imports_at_a_time() -> None:
    import ringspark.pipelines.readers.petastorm_reader  # noqa: F401
    from ringspark.pipelines.readers.petastorm_compat import petastorm_importable

    second_entered, first_left = threading.Event(), threading.Event()
    seen = []

    def second() -> None:
        with petastorm_importable():
            second_entered.set()
            first_left.wait()
            seen.append("pyarrow.filesystem" in sys.modules)

    thread = threading.Thread(target=second)
    with petastorm_importable():
        thread.start()
        # Without the lock, the second thread would enter now, and the first would remove the patches.
        second_entered.wait(0.2)
    first_left.set()
    thread.join()
    assert seen == [True]
    assert ("pyarrow.filesystem" in sys.modules) == LEGACY
