"""`compile`: ranks train a compiled network to the weights of the plain one, and compile it once."""

from __future__ import annotations

import copy
import os
import pickle
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import config_of, train_gang, weights_of
from torch import nn
from torch._dynamo.utils import counters

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.finetuning import LoRA
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.compilation import compile_network
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.models.activation_checkpoint import apply_activation_checkpoint, compile_segments
from ringspark.pipelines import ShardManifest

PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

# torch warns about its own modules when it imports its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

MODEL = ModelSpec(
    "mlp",
    {"in_features": 4, "hidden": [16, 16, 16], "out_features": 1, "norm": "layer", "dropout": 0.1},
)


@pytest.fixture(autouse=True, scope="module")
def code_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder for compiled code, instead of the user's home."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        for name in PLACES:
            patch.delenv(name, raising=False)
        yield cache / "ringspark" / f"compiled-{platform.node()}"


def shards(make_shards: Any, rows: int, **options: Any) -> ShardManifest:
    """Returns `rows` rows; with 32 n + 1 rows, the last step of 32 has one row."""
    x = np.random.default_rng(3).standard_normal((rows, 4)).astype(np.float32)
    manifest: ShardManifest = make_shards({"x": x, "y": x[:, 0] * x[:, 1]}, **options)
    return manifest


def config(manifest: ShardManifest, run_uri: Path, **changes: Any) -> TrainConfig:
    return config_of(manifest, run_uri, model=MODEL.to_json(), **changes)


class CountGraphs(Callback):
    """Records the number of compiled graphs at the end of each epoch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_start(self, state: TrainingState) -> None:
        counters.clear()

    def on_epoch_end(self, state: TrainingState) -> None:
        self.counts.append(counters["stats"]["unique_graphs"])


class WritesGraphs(Callback):
    """Writes the number of graphs that rank 0 has compiled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_end(self, state: TrainingState) -> None:
        # Imported here, because the class travels by value, with its globals.
        from torch._dynamo.utils import counters

        if state.rank == 0:
            self._path.write_text(str(counters["stats"]["unique_graphs"]))


@pytest.mark.slow
def test_batches_of_many_sizes_are_compiled_for_once(make_shards: Any, tmp_path: Path) -> None:
    # 96 training rows, in steps of 31, 31, 31 and 3; 33 held-out rows: 31 and 2.
    manifest = shards(make_shards, 129, validation=np.arange(129) >= 96)
    count = CountGraphs()
    train_here(
        config(manifest, tmp_path / "run", batch_size=31, gradient_accumulation=2, epochs=3, compile=True),
        UserObjects(callbacks=(count,)),
    )
    assert count.counts == [2, 2, 2]  # one for training, one for evaluation


@pytest.mark.slow
def test_a_single_row_is_not_compiled_for(make_shards: Any, tmp_path: Path) -> None:
    count = CountGraphs()
    run = config(shards(make_shards, 33), tmp_path / "run", compile=True)
    train_here(run, UserObjects(callbacks=(count,)))
    assert count.counts == [1, 1]


VARIANTS: dict[str, dict[str, Any]] = {
    "horovod": {"collective": "horovod", "gradient_accumulation": 2},
    "torch": {"collective": "torch", "max_grad_norm": 0.5},
    "bf16": {"collective": "torch", "precision": "bf16"},
    "checkpointing": {"collective": "horovod", "gradient_checkpointing": "sqrt"},
    "zero1": {"collective": "torch", "sync": Zero(stage=1)},
    "zero2": {"collective": "torch", "sync": Zero(stage=2)},
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_weights_are_the_plain_ones(name: str, make_shards: Any, tmp_path: Path) -> None:
    # The last step has one row, so one rank has none.
    manifest = shards(make_shards, 97)
    plain = config(manifest, tmp_path / "plain", num_workers=2, **VARIANTS[name])
    mine = replace(plain, run_uri=str(tmp_path / "compiled"), compile=True)
    # The checkpoint has the names of the plain network.
    expected, found = (weights_of(train_gang(run), MODEL.build()) for run in (plain, mine))
    tolerance = 2e-2 if plain.precision == "bf16" else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


TEXTS = ModelSpec(
    "transformer_lm",
    {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 2, "num_heads": 4, "dropout": 0.1},
)
SHARDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation": 2, "max_grad_norm": 0.5},
    "zero2": {"sync": Zero(stage=2)},
    "checkpointing": {"gradient_checkpointing": "all"},
    "adapters": {"lora": LoRA(rank=2, targets=("*.qkv", "*.out", "*.up", "*.down"))},
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", SHARDED)
def test_compiled_weights_of_a_mesh_are_the_plain_ones(name: str, make_shards: Any, tmp_path: Path) -> None:
    """With dropout: compiled ranks also draw the same random numbers."""
    ids = np.random.default_rng(0).integers(1, 23, (100, 11))
    manifest = make_shards({"x": ids, "y": np.roll(ids, -1, 1)})
    changes: dict[str, Any] = {"task": "any", "losses": ("cross_entropy",), "optimizer": "momentum"}
    plain = config_of(manifest, tmp_path / "plain", model=TEXTS.to_json(), **changes, **SHARDED[name])
    plain = replace(plain, num_workers=4, collective="torch", parallelism=Mesh(data=2, tensor=2))
    mine = replace(plain, run_uri=str(tmp_path / "compiled"), compile=True)
    objects = UserObjects(callbacks=(WritesGraphs(tmp_path / "graphs"),))
    expected, found = (weights_of(train_gang(run, objects), TEXTS.build()) for run in (plain, mine))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert int((tmp_path / "graphs").read_text()) > 1


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x).tanh()
        return y


class Chain(nn.Sequential):
    pass


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)),
    "subclass": lambda: Chain(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)),
    "layer": lambda: nn.Linear(4, 1),
}


def trained(network: nn.Module, seen: list[int]) -> dict[str, torch.Tensor]:
    """Takes five steps, with a hook that records the rows of every call."""
    hook = network.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    for rows in (8, 8, 7, 8, 3):
        optimizer.zero_grad()
        network(torch.randn(rows, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    hook.remove()
    return network.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_torchs_own_classes_are_compiled_too(name: str) -> None:
    plain = NETWORKS[name]()
    network = copy.deepcopy(plain)
    expected_calls: list[int] = []
    calls: list[int] = []
    expected = trained(plain, expected_calls)
    counters.clear()
    with compile_network(network, True, torch.device("cpu")):
        found = trained(network, calls)
        assert counters["stats"]["unique_graphs"] == 1
        for same in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            assert "forward" not in vars(same)
            assert same._compiled_call_impl is None
            torch.testing.assert_close(same(torch.ones(5, 4)), network(torch.ones(5, 4)))
    torch.testing.assert_close(found, expected)  # including names
    assert calls == expected_calls
    assert "forward" not in vars(network)
    assert network._compiled_call_impl is None


@pytest.mark.slow
@pytest.mark.parametrize("private", [True, False])
def test_compiled_code_is_kept_where_this_user_alone_writes(
    private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "ringspark" / f"compiled-{platform.node()}"
    if not private:
        folder.mkdir(parents=True)
        folder.chmod(0o770)
    # A new network, because the process caches compiled code.
    network = nn.Sequential(nn.Linear(4, 1), nn.LeakyReLU(0.123 if private else 0.456))
    with compile_network(network, True, torch.device("cpu")):
        network(torch.ones(3, 4)).sum().backward()
        used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert list(used.rglob("*.so"))
        assert used.stat().st_mode & 0o777 == 0o700
        assert Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(used)
        headers = Path(torch._inductor.codecache._HEADER_DIR)
        assert headers.is_relative_to(used)
        # A header is compiled once per host, and never into a temporary folder.
        assert headers.exists() == private
    assert not any(os.environ.get(name, "").startswith(str(used)) for name in PLACES)
    assert used.exists() == private
    assert (used == folder) == private
    assert private or not list(folder.iterdir())


@pytest.mark.slow
def test_a_folder_that_the_user_names_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with compile_network(nn.Linear(4, 1), True, torch.device("cpu")):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("works_for", "message"),
    [
        (
            "*--version*|*-dump*",
            "compile needs Python's headers .* /broken .*: x.h:1: fatal error: no header$",
        ),
        (
            "*--version*|*-dump*|*-fsyntax-only*",
            "compile failed on model Linear: .*CompileError: x.h:1: fatal error: no header; set",
        ),
    ],
)
def test_what_a_compiler_says_is_told(works_for: str, message: str, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    works = f'case "$*" in {works_for}) exec g++ "$@";; esac'
    compiler.write_text(f"#!/bin/sh\n{works}\necho 'x.h:1: fatal error: no header' >&2; exit 1\n")
    compiler.chmod(0o755)
    network = nn.Linear(4, 1)
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}),
        pytest.raises(RuntimeError, match=message.replace("/broken", str(compiler))),
        compile_network(network, True, torch.device("cpu")),
    ):
        network(torch.ones(3, 4)).sum().backward()
    assert network._compiled_call_impl is None


@pytest.mark.slow
def test_a_rank_without_a_compiler_says_so_before_the_first_step(make_shards: Any, tmp_path: Path) -> None:
    run = config(shards(make_shards, 64), tmp_path / "run", compile=True)
    code = f"""
        from ringspark.estimators.launch.local import train_here
        from ringspark.estimators.training.settings.config import TrainConfig
        try:
            train_here(TrainConfig.from_json({run.to_json()!r}))
        except RuntimeError as error:
            print(error)
    """
    environment = os.environ | {"CXX": str(tmp_path / "no-compiler")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("compile needs a C++ compiler on every worker"), done.stderr
    assert not (tmp_path / "run" / "history.json").exists()


def test_only_innermost_recomputed_modules_are_compiled_by_themselves() -> None:
    plain = MODEL.build()
    assert not compile_segments(plain, None)
    net = apply_activation_checkpoint(MODEL.build(), ["trunk", "trunk.0"])
    assert compile_segments(net, None)
    stand_ins: list[Any] = [vars(module)["_call_impl"] for module in (net.trunk, net.trunk[0])]  # type: ignore[index]
    assert [stand_in.compiled is not None for stand_in in stand_ins] == [False, True]
