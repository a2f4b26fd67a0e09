"""`compile`: ranks train a compiled network to the weights of the plain one, and compile it once."""

import copy
import json
import os
import pickle
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import Runs, columns_of, weights_of
from torch import nn
from torch._dynamo.utils import counters

from ringspark.estimators.options.finetuning import LoRA
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.compilation import compile_network
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.models import ModelSpec

PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

# torch warns about its own modules when it imports its compiler.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")]

LAYERS = {"in_features": 4, "hidden": [16, 16, 16], "out_features": 1, "norm": "layer", "dropout": 0.1}
MODEL = ModelSpec("mlp", LAYERS)


@pytest.fixture(autouse=True, scope="module")
def code_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder for compiled code, instead of the user's home."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        for name in PLACES:
            patch.delenv(name, raising=False)
        yield cache / "ringspark" / f"compiled-{platform.node()}"


SETTINGS = {"model": MODEL}


class WritesGraphs(Callback):
    """Writes the number of graphs that rank 0 has compiled, at the end of each epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_start(self, state: TrainingState) -> None:
        # Imported here, because the class travels by value, with its globals.
        from torch._dynamo.utils import counters

        counters.clear()
        self._counters, self._counts = counters, []

    def on_epoch_end(self, state: TrainingState) -> None:
        self._counts.append(self._counters["stats"]["unique_graphs"])
        if state.rank == 0:
            self._path.write_text(json.dumps(self._counts))


@pytest.mark.parametrize(
    ("rows", "held_out", "changes", "graphs"),
    [
        # 96 training rows, in steps of 31, 31, 31 and 3; 33 held-out rows: 31 and 2. One graph each.
        (129, 33, {"batch_size": 31, "gradient_accumulation": 2, "epochs": 3}, [2, 2, 2]),
        # The last step has one row, which is not compiled for.
        (33, 0, {}, [1, 1]),
    ],
)
def test_batches_of_many_sizes_are_compiled_for_once(
    runs: Runs, rows: int, held_out: int, changes: dict[str, Any], graphs: list[int]
) -> None:
    path = runs.folder / "graphs"
    manifest = runs.shards(rows, validation=np.arange(rows) >= rows - held_out if held_out else None)
    runs.here(manifest, UserObjects(callbacks=(WritesGraphs(path),)), compile=True, **changes)
    assert json.loads(path.read_text()) == graphs


TEXT = {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 2, "num_heads": 4, "dropout": 0.1}
MESH: dict[str, Any] = {
    "model": ModelSpec("transformer_lm", TEXT),
    "task": "any",
    "losses": ("cross_entropy",),
    "optimizer": "momentum",
    "num_workers": 4,
    "parallelism": Mesh(data=2, tensor=2),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "horovod": {"collective": "horovod", "gradient_accumulation": 2},
    "torch": {"max_grad_norm": 0.5},
    "bf16": {"precision": "bf16"},
    "checkpointing": {"collective": "horovod", "gradient_checkpointing": "sqrt"},
    "zero1": {"sync": Zero(stage=1)},
    "zero2": {"sync": Zero(stage=2)},
    "mesh": MESH,
    "mesh, accumulation": {**MESH, "gradient_accumulation": 2, "max_grad_norm": 0.5},
    "mesh, zero2": {**MESH, "sync": Zero(stage=2)},
    "mesh, checkpointing": {**MESH, "gradient_checkpointing": "all"},
    "mesh, adapters": {**MESH, "lora": LoRA(rank=2, targets=("*.qkv", "*.out", "*.up", "*.down"))},
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_weights_are_the_plain_ones(runs: Runs, name: str) -> None:
    """With dropout: compiled ranks also draw the same random numbers."""
    changes, graphs = {**SETTINGS, **VARIANTS[name]}, runs.folder / "graphs"
    ids = np.random.default_rng(0).integers(1, 23, (100, 11))
    # The last step of 97 rows has one row, so one rank has none.
    data = {"x": ids, "y": np.roll(ids, -1, 1)} if "mesh" in name else columns_of(97)
    objects = UserObjects(callbacks=(WritesGraphs(graphs),))
    # The checkpoint has the names of the plain network.
    expected, found = (
        weights_of(runs.gang(data, objects, compile=compiles, **changes), changes["model"].build())
        for compiles in (False, True)
    )
    tolerance = 2e-2 if name == "bf16" else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert json.loads(graphs.read_text())[-1] > ("mesh" in name)


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class Chain(nn.Sequential):
    pass


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "own": lambda: Own(4, 1),
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


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_torchs_own_classes_are_compiled_too(name: str) -> None:
    plain = NETWORKS[name]()
    network = copy.deepcopy(plain)
    calls: list[list[int]] = [[], []]
    expected = trained(plain, calls[0])
    counters.clear()
    with compile_network(network, True, torch.device("cpu")):
        found = trained(network, calls[1])
        assert counters["stats"]["unique_graphs"] == 1
        for same in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            assert "forward" not in vars(same)
            assert same._compiled_call_impl is None
            torch.testing.assert_close(same(torch.ones(5, 4)), network(torch.ones(5, 4)))
    torch.testing.assert_close(found, expected)  # including names
    assert calls[0] == calls[1]
    assert "forward" not in vars(network)
    assert network._compiled_call_impl is None


@pytest.mark.parametrize("private", [True, False])
def test_compiled_code_stays_private(private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_folder_that_the_user_names_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with compile_network(nn.Linear(4, 1), True, torch.device("cpu")):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)


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


def test_a_rank_without_a_compiler_says_so_before_the_first_step(runs: Runs) -> None:
    run = runs.config(64, compile=True)
    code = f"""
        from ringspark.estimators.launch.local import train_here
        from ringspark.estimators.training.settings.config import TrainConfig
        try:
            train_here(TrainConfig.from_json({run.to_json()!r}))
        except RuntimeError as error:
            print(error)
    """
    environment = os.environ | {"CXX": str(runs.folder / "no-compiler")}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("compile needs a C++ compiler on every worker"), done.stderr
    assert not Path(run.run_uri, "history.json").exists()
