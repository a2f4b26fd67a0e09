"""What ringspark needs of every store, on the local disk, S3, GCS, ABFS and HDFS."""

from __future__ import annotations

import gc
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest
import torch
from command_line import run_ringspark
from failing_callback import Fails
from small_networks import linear
from spark_tables import quiet, waves

from ringspark.estimators import TorchRegressionModel, TorchRegressor, WorkerError
from ringspark.estimators.training.checkpoint.weights import replacing
from ringspark.pipelines import ShardManifest, open_reader, storage, write_shards
from ringspark.pipelines.folder_removal import list_paths
from ringspark.pipelines.table_files import path_states

# aiohttp says so of every block that gcsfs and adlfs upload.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
# "#" is the version of an object in gcsfs, which is refused there.
NAMES = ("a b", "k=1", "a%20b", "a;b", "a&b+c'd", "ä", "a#1")


def test_a_file_comes_and_goes_under_any_name(root: str) -> None:
    for name in NAMES:
        folder = f"{root}/{name}"
        if root.startswith("gs:") and "#" in name:
            continue
        assert storage.normalize(folder).endswith(folder)
        assert not storage.exists(folder)
        assert storage.list_names(folder) == []
        uri = f"{folder}/{name}.bin"
        storage.write_atomic(uri, b"one")
        old = path_states([uri])
        storage.write_atomic(uri, b"three")
        assert path_states([uri]) != old
        assert storage.read_bytes(uri) == b"three"
        assert storage.size(uri) == 5
        assert storage.list_names(folder) == [f"{name}.bin"]
        assert list(list_paths(root)) == [f"{name}/{name}.bin"]
        assert storage.exists(folder)
        assert abs((storage.newest_change(folder) or 0) - time.time()) < 600
        with storage.open_file(uri) as file:
            assert file.read(2) == b"th"
            file.seek(-2, 2)
            assert file.read() == b"ee"
        storage.remove(folder, recursive=True)
        storage.remove(folder, recursive=True)
        assert not storage.exists(uri)
        storage.check_writable(folder)
        storage.remove(folder, recursive=True)
    assert list(list_paths(root)) == []


@pytest.mark.parametrize("num_bytes", [100, 12 << 20], ids=["one request", "several"])
def test_a_write_that_breaks_off_leaves_the_old_file(root: str, num_bytes: int) -> None:
    def write(data: bytes, error: Exception | None = None) -> None:
        with replacing(root, "weights") as file:
            file.write(data)
            if error is not None:
                raise error

    write(b"old")
    with pytest.raises(MemoryError):
        write(bytes(num_bytes), MemoryError())
    gc.collect()
    assert storage.read_bytes(f"{root}/weights") == b"old"
    assert storage.list_names(root) == ["weights"]
    write(bytes(num_bytes))
    assert storage.size(f"{root}/weights") == num_bytes
    storage.remove(root, recursive=True)


def test_of_many_writers_exactly_one_commits(root: str) -> None:
    uri = f"{root}/manifest.json"

    def write(number: int) -> bool:
        try:
            storage.write_atomic(uri, b"%d" % number, overwrite=False)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(write, range(8)))
    assert won.count(True) == 1
    assert storage.read_bytes(uri) == b"%d" % won.index(True)
    with pytest.raises(FileExistsError):
        storage.write_atomic(uri, b"late", overwrite=False)
    assert storage.list_names(root) == ["manifest.json"]
    storage.remove(root, recursive=True)


@pytest.mark.slow
def test_a_folder_of_many_pages_is_listed_and_removed(root: str) -> None:
    names = [f"{number:05d}" for number in range(10_010)]
    storage.make_dirs(root)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: storage.write_atomic(f"{root}/{name}", b"", durable=False), names))
    assert storage.list_names(root) == names
    storage.remove(root, recursive=True)
    assert storage.list_names(root) == []


@pytest.fixture(scope="module")
def calm(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """The weights of the same training on the local disk, without a failure."""
    folder = tmp_path_factory.mktemp("calm")
    return list(_estimator(str(folder), None).fit(waves(spark)).module().state_dict().values())


def _estimator(folder: str, mark: Path | None, **changes: Any) -> Any:
    params: dict[str, Any] = {"model": linear(), "epochs": 3, "batchSize": 16, "numWorkers": 2}
    params |= {"collective": "torch", "checkpointEverySteps": 5, "runUri": f"{folder}/run", "seed": 1}
    if mark is not None:
        params["callbacks"] = [Fails(mark, 12)]
    return quiet(TorchRegressor, folder, **params | changes)


@pytest.mark.spark
def test_shards_are_those_of_the_local_disk(spark_on_stores: Any, root: str, tmp_path: Path) -> None:
    table = waves(spark_on_stores)
    here = write_shards(table, str(tmp_path / "shards"))
    there = write_shards(table.limit(9), f"{root}/shards")
    with pytest.raises(ValueError, match="holds shards already"):
        write_shards(table, there.uri)
    there = write_shards(table, there.uri, overwrite=True)
    there.verify()
    assert ShardManifest.load(there.uri).files == there.files
    assert len(storage.list_names(there.uri)) == 2  # the manifest and one folder
    left, right = (_rows(manifest, start=0) for manifest in (here, there))
    for name, values in left.items():
        np.testing.assert_array_equal(values, right[name])
    np.testing.assert_array_equal(_rows(there, start=2)["label"], left["label"][32:])
    storage.remove(root, recursive=True)


def _rows(manifest: ShardManifest, start: int) -> dict[str, np.ndarray]:
    reader = open_reader(manifest, engine="arrow", batch_size=16, seed=3)
    batches = list(reader.batches(1, start_step=start))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.spark
def test_a_training_stops_resumes_and_is_saved_in_the_store(
    spark_on_stores: Any,
    store: places.Store,
    root: str,
    calm: list[torch.Tensor],
    tmp_path: Path,
    caplog: Any,
) -> None:
    caplog.set_level(logging.DEBUG, "ringspark")
    table = waves(spark_on_stores)
    mark = tmp_path / "failed"
    with pytest.raises(WorkerError, match=r"step 12; its last checkpoint is kept in ") as caught:
        _estimator(root, mark, certify=True, maxRestarts=0).fit(table)
    model = _estimator(root, mark, certify=True, resume=True).fit(table)
    # A failure waits two seconds for the checkpoint that is being written, and a store may need longer.
    assert model.summary.resumed_steps in ((5,), (10,))
    for found, expected in zip(model.module().state_dict().values(), calm, strict=True):
        assert torch.equal(found, expected)

    from ringspark.extras.certificate import verify_run

    certificate = model.certificate()
    assert [link.step for link in certificate.chain.checkpoints][-1] == 18
    for path in list_paths(f"{root}/run"):
        copy = tmp_path / "copy" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(storage.read_bytes(f"{root}/run/{path}"))
    report = verify_run(tmp_path / "copy", _estimator(root, mark, certify=True), intervals=1)
    assert report.holds, report.table()

    predictions = [row.prediction for row in model.transform(table).collect()]
    for _ in range(2):
        model.write().overwrite().save(f"{root}/model")
    loaded = TorchRegressionModel.load(f"{root}/model")
    assert [row.prediction for row in loaded.transform(table).collect()] == predictions
    if store.secret:
        written = [storage.read_bytes(f"{root}/{path}") for path in list_paths(root)]
        said = [log.getMessage() for log in caplog.records if log.name.startswith("ringspark")]
        assert said
        assert store.secret not in "\n".join([*said, str(caught.value), str(certificate.claims)])
        assert not [data for data in written if store.secret.encode() in data]
    storage.remove(root, recursive=True)


@pytest.mark.spark
@pytest.mark.slow
def test_the_check_of_a_cluster_trains_with_the_store(store: places.Store, root: str) -> None:
    done = run_ringspark("check", "--master", "local[2]", "--storage-uri", root, **store.environment)
    print(done.stdout)
    assert done.stdout.endswith("ready to train\n"), done.stdout + done.stderr[-2000:]
    assert not storage.exists(root) or storage.list_names(root) == []
