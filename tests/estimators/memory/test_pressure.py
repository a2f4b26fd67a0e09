"""A worker's estimated need is below its real use, and training that cannot fit fails with a clear error."""

import json
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from registries import optimizer_names
from short_sync import sync_of
from small_networks import Net, linear
from small_training import config_of
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.failures import WorkerError
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.launch.train_task import TrainTask
from ringspark.estimators.memory import pressure
from ringspark.estimators.memory.available import (
    Available,
    find_cgroup_limit,
    find_host_limit,
    find_spark_limit,
)
from ringspark.estimators.memory.pressure import check_memory, limits_on_driver, worker_needs
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.optimizers.registry import make_optimizer
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import train_worker
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

NOTHING = UserObjects()
BIG = ModelSpec("mlp", {"in_features": 64, "hidden": [2048] * 6, "out_features": 1})
PARTS = ("parameters", "gradients", "optimizer state")


def _config(manifest: ShardManifest, model: ModelSpec | None, **changes: Any) -> TrainConfig:
    training = {"model": model, "batch_size": 64, "epochs": 1, "learning_rate": 1e-3, "collective": "torch"}
    changes = training | {"checkpoint_every_seconds": 0} | changes
    return config_of(manifest, f"{manifest.uri}-run", **changes)


def _needs(manifest: ShardManifest, model: ModelSpec | None = BIG, **changes: Any) -> dict[str, int]:
    return worker_needs(_config(manifest, model, **changes), NOTHING, manifest)


def _available(num_bytes: int) -> Available:
    return Available(num_bytes=num_bytes, source="here")


@pytest.fixture
def shards(make_shards):
    x = np.zeros((1000, 64), np.float32)
    manifest: ShardManifest = make_shards({"x": x, "y": x[:, 0]}, row_group_rows=10)
    return manifest


def _taken(config: TrainConfig) -> Any:
    """Returns work that reports the peak growth of the rank's memory in bytes."""

    def work(collective: Any, device: str, status: Any) -> str:
        def field(name: str) -> int:
            return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

        # Libraries that any first training step loads.
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(layer.weight).sum().backward()
        optimizer.step()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = field("VmRSS")
        train_worker(config, collective, NOTHING, device, status)
        return json.dumps(field("VmHWM") - before)

    return work


@pytest.mark.extras
@pytest.mark.distributed
@pytest.mark.parametrize("case", ["wide data", "big network"])
def test_the_need_is_below_what_a_worker_takes(make_shards, case):
    is_wide = case == "wide data"
    x = np.zeros((600, 8192) if is_wide else (200, 64), np.float32)
    model = linear(1, 8192) if is_wide else BIG
    manifest = make_shards({"x": x, "y": x[:, 0]}, row_group_rows=12)
    config = check_training(_config(manifest, model), NOTHING, manifest).config
    (taken,) = map(json.loads, run_spawned(1, "torch", _taken(config)))
    needs = worker_needs(config, NOTHING, manifest)
    assert 0 < sum(needs.values()) < taken
    if is_wide:
        assert needs["row groups in flight"] > x.nbytes / 4
    else:
        assert sum(needs.values()) > taken / 2


@pytest.mark.telling
@pytest.mark.extras
@pytest.mark.distributed
def test_a_rank_refuses_what_its_process_may_not_hold(shards):
    # It needs 20 GiB. The limit leaves room for the libraries and threads of any build of torch.
    model = ModelSpec("mlp", {"in_features": 64, "hidden": [16384] * 6, "out_features": 1})
    config = check_training(_config(shards, model, num_workers=2), NOTHING, shards).config

    def work(collective: Any, device: str, status: Any) -> str:

        pressure.find_host_limit = lambda workers: None  # other processes may use the memory of this host
        if collective.rank == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
        return TrainTask(config=config, objects=user_code.dumps(NOTHING))(collective, device, status)

    with pytest.raises(WorkerError) as caught:
        run_spawned(2, "torch", work)
    sentence = str(caught.value).splitlines()[0]
    assert sentence.startswith("rank 1 on host ")
    assert "failed in phase 'checking the memory': ValueError: training needs at least " in sentence
    assert " that this process is limited to); set sync=Zero(stage=3)" in sentence
    assert sentence.endswith("or give the workers more memory by spark.executor.pyspark.memory")


@pytest.mark.extras
def test_a_limit_refuses_one_byte_below_the_need_and_no_other(shards):
    config = _config(shards, linear(1, 64))
    need = sum(worker_needs(config, NOTHING, shards).values())
    check_memory(config, NOTHING, shards, [None])
    check_memory(config, NOTHING, shards, [_available(need)])
    refusal = r"at least .* \(parameters 260 B, .* are available \(here\); .* memory$"
    with pytest.raises(ValueError, match=refusal):
        check_memory(config, NOTHING, shards, [None, _available(need - 1)])


@pytest.mark.extras
@pytest.mark.parametrize(
    ("collective", "sharding", "mesh", "remedy"),
    [
        ("torch", "gradients", {}, r"set sync=Zero\(stage=3\)"),
        ("torch", "parameters", {}, "take an optimizer with less state"),
        ("torch", "none", {"pipeline": 2}, r"set sync=Zero\(stage=1\)"),
        ("torch", "optimizer", {"pipeline": 2}, "take an optimizer with less state"),
        ("horovod", "optimizer", {}, r"set sync=Zero\(stage=2\)"),
        ("horovod", "gradients", {}, "take an optimizer with less state"),
    ],
)
def test_the_remedy_is_not_what_is_set_already_or_refused(shards, collective, sharding, mesh, remedy):
    settings = {"num_workers": 4, "collective": collective, "sync": sync_of(sharding=sharding)}
    config = _config(shards, BIG, parallelism=mesh, **settings)
    with pytest.raises(ValueError, match=f"available.*; {remedy}, "):
        check_memory(config, NOTHING, shards, [_available(1)])


@pytest.mark.extras
@pytest.mark.parametrize(
    ("sharding", "parts"),
    [
        ("none", (1, 1, 2)),
        ("optimizer", (1, 1, 0.5)),
        ("gradients", (1, 0.25, 0.5)),
        ("parameters", (0.25, 0.25, 0.5)),
    ],
)
def test_what_is_cut_over_the_ranks_counts_in_part(shards, sharding, parts):
    needs = _needs(shards, num_workers=4, sync=sync_of(sharding=sharding))
    whole = _needs(shards)["parameters"]
    found = [needs[part] / whole for part in PARTS]
    assert found == pytest.approx(parts, rel=1e-6)


@pytest.mark.extras
def test_what_a_mesh_leaves_a_worker_counts_in_part(shards):
    whole = _needs(shards)
    cut = {"num_workers": 4, "parallelism": {"tensor": 2, "data": 2}}
    found = _needs(shards, **cut)
    # Biases of row-sharded layers and the head are not sharded.
    assert [found[name] / whole[name] for name in PARTS] == pytest.approx([0.5] * 3, rel=1e-2)
    assert _needs(shards, **cut, sync=Zero(stage=1))[PARTS[2]] == found[PARTS[2]] // 2
    # Fully sharded weights, with the mesh axis "shard" given or left to the default.
    whole_mesh = {"num_workers": 4, "sync": Zero(stage=3)}
    assert _needs(shards, **whole_mesh, parallelism={"shard": 4}) == _needs(shards, **whole_mesh)
    hybrid = _needs(shards, **whole_mesh, parallelism={"shard": 2, "data": 2})
    assert hybrid[PARTS[2]] == whole[PARTS[2]] // 2


@pytest.mark.extras
@pytest.mark.parametrize("optimizer", optimizer_names())
def test_the_state_of_every_optimizer_counts_as_large_as_it_is(shards, optimizer):
    spec = ModelSpec("mlp", {"in_features": 64, "hidden": [256, 256], "out_features": 1})
    module = spec.build()
    made = make_optimizer(optimizer, module.parameters(), 1e-3, 0.0)
    module(torch.zeros(2, 64)).sum().backward()
    made.step()
    state = [v for entry in made.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    config = _config(shards, spec, optimizer=optimizer)
    needs = worker_needs(config, NOTHING, shards)
    # The quantization tables are not part of the optimizer state.
    tables = 2 * (65 << 10) if optimizer.endswith("8bit") else 0
    assert needs["optimizer state"] == num_bytes(state) + tables
    # The rough first estimate of `check_memory` is never below the exact need.
    with pytest.raises(ValueError, match="training needs at least"):
        check_memory(config, NOTHING, shards, [_available(sum(needs.values()) - 1)])


@pytest.mark.extras
def test_the_state_of_a_users_own_optimizer_counts(shards):
    objects = UserObjects(optimizer=lambda parameters: torch.optim.Adam(parameters, amsgrad=True))
    needs = worker_needs(_config(shards, BIG), objects, shards)
    assert needs["optimizer state"] == pytest.approx(3 * needs["gradients"], rel=1e-5)


@pytest.mark.extras
@pytest.mark.parametrize(
    ("settings", "copied"),
    [
        ({"checkpoint_every_steps": 3}, True),
        ({"checkpoint_every_steps": 1_000}, False),
        ({"checkpoint_every_epochs": 1, "epochs": 2}, True),
        ({"checkpoint_every_epochs": 1}, False),
        ({"checkpoint_every_seconds": 60.0}, False),
    ],
)
def test_the_copy_for_a_checkpoint_counts_where_one_is_certain(shards, settings, copied):
    needs = _needs(shards, **settings)
    copy = 3 * needs["parameters"] if copied else 0
    assert needs.get("copy for a checkpoint", 0) == pytest.approx(copy, rel=1e-5)
    assert ("gradients" in needs) is not copied


@pytest.mark.extras
def test_parameters_without_gradient_have_no_state_either(shards):
    """The network has ten times as many parameters as it uses."""
    idle = {"idle": nn.Linear(64, 100_000), "rare": nn.Embedding(100_000, 8, sparse=True)}
    network = Net(lambda self, x: self.used(x), used=nn.Linear(64, 1), **idle)
    objects = UserObjects(module=network)
    config = check_training(_config(shards, None), objects, shards).config
    needs = worker_needs(config, objects, shards)
    assert needs["gradients"] == 4 * 65
    # Enough memory for the parameters and the rows.
    check_memory(config, objects, shards, [_available(needs["parameters"] + (1 << 20))])
    with pytest.raises(ValueError, match=r"\(parameters .* take an optimizer with less state|smaller model"):
        check_memory(config, objects, shards, [_available(1 << 20)])


@pytest.mark.extras
def test_on_a_gpu_the_host_holds_the_network_once(shards):
    big, small = (_needs(shards, model, use_gpu=True) for model in (BIG, linear(1, 64)))
    assert list(big) == ["parameters"]
    assert small["parameters"] == small["gradients"] == 0
    assert sum(small.values()) > 0


@pytest.mark.parametrize(
    ("conf", "num_bytes"),
    [
        ({"spark.executor.pyspark.memory": "2g"}, 2 << 30),
        ({"spark.executor.pyspark.memory": "2048", "spark.executor.cores": "4"}, 1 << 29),
        ({}, None),
    ],
)
def test_spark_divides_the_memory_of_its_python_workers_by_cores(conf, num_bytes):
    found = find_spark_limit(conf)
    assert (found and found.num_bytes) == num_bytes


@pytest.mark.extras
def test_the_driver_refuses_what_spark_leaves_no_room_for(shards):
    conf = {"spark.master": "yarn", "spark.executor.pyspark.memory": "100m"}
    config = check_training(_config(shards, BIG), NOTHING, shards).config
    refusal = r"spark.executor.pyspark.memory is 100.0 MiB\); .* more memory by spark"
    with pytest.raises(ValueError, match=refusal):
        check_memory(config, NOTHING, shards, limits_on_driver(1, conf, is_here=False))
    check_memory(config, NOTHING, shards, limits_on_driver(1, {"spark.master": "yarn"}, is_here=False))
    check_memory(config, NOTHING, shards, limits_on_driver(1, {"spark.master": "local[2]"}, is_here=True))


def _write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_the_limit_of_a_container_is_the_least_of_its_groups(tmp_path):
    group = "sys/fs/cgroup/"
    files = {
        "proc/self/cgroup": "0::/pod/one\n",
        f"{group}pod/one/memory.max": "max\n",
        f"{group}pod/memory.max": "1000000\n",
        f"{group}pod/memory.current": "700000\n",
        f"{group}pod/memory.stat": "anon 400000\nfile 300000\nshmem 50000\n",
    }
    root = _write(tmp_path / "v2", files)
    assert find_cgroup_limit(root) == 1_000_000 - 400_000 - 50_000
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/not/seen/here\n",
        f"{group}memory/memory.limit_in_bytes": "1000000\n",
        f"{group}memory/memory.usage_in_bytes": "600000\n",
        f"{group}memory/memory.stat": "cache 1\ntotal_cache 100000\ntotal_shmem 0\n",
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:  600 kB\nSwapFree: 100 kB\n",
    }
    root = _write(tmp_path / "v1", files)
    assert find_cgroup_limit(root) == 500_000
    # All workers of a host share its memory, but each worker may have its own cgroup.
    for workers, same, expected in ((1, False, 500_000), (2, False, 700 * 512), (2, True, 250_000)):
        found = find_host_limit(workers, same_cgroup=same, root=root)
        assert found.num_bytes == expected
    unlimited = {f"{group}memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert find_cgroup_limit(_write(tmp_path / "v1", unlimited)) is None
    assert find_host_limit(1, root=str(tmp_path / "no Linux")) is None
