"""Every benchmark runs with its command line, in sizes that take seconds.

run.py finds the benchmarks in the folder. The measured values have no meaning here.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from links import link_refusal

RUN = Path(__file__).with_name("run.py")
PEERS = RUN.parent / "peers" / "run.py"
PEERS_PYTHON = RUN.parents[2] / ".venv-peers-xgboost" / "bin" / "python"
BENCHMARKS = runpy.run_path(str(RUN))["benchmarks"]()
# Two or more columns, underlined; below the rows the machine, as in harness.print_table.
TABLE = re.compile(r"^-+(  -+)+\n(.+\n)+\d+ cores, load average ", re.MULTILINE)
NO_CUDA = re.compile(r"^\w+: skipped, there is no CUDA device here$", re.MULTILINE)
NO_HOSTS = re.compile(r"^\w+: skipped, ", re.MULTILINE)
NO_PEERS = re.compile(r"^\w+: skipped, .*make setup-peers", re.MULTILINE)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the flights, created by the first benchmark that needs it."""
    return tmp_path_factory.mktemp("benchmarks") / "flights"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_tiny_run_prints_its_table(name: str, root: Path) -> None:
    command = [sys.executable, str(RUN), name, "--tiny", "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    if not torch.cuda.is_available() and NO_CUDA.search(done.stdout):
        return
    if link_refusal() and NO_HOSTS.search(done.stdout):
        return
    if not PEERS_PYTHON.exists() and NO_PEERS.search(done.stdout):
        return
    assert TABLE.search(done.stdout), done.stdout[-4000:]


def run_peers(root: Path, *options: str) -> str:
    """Output of a tiny run of the peers' program; its results are next to the flights."""
    folders = ["--root", str(root), "--results", str(root.parent / "peers")]
    done = subprocess.run(
        [sys.executable, str(PEERS), "--tiny", *folders, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.spark
@pytest.mark.slow
def test_the_peers_of_this_environment_take_part(root: Path) -> None:
    """The other peers need environments that only `make bench-peers` builds."""
    names = "torch and Arrow,Horovod and Petastorm,pyarrow loader,Multilayer,scikit-learn,TorchClassifier"
    printed = run_peers(root, "--only", names)
    assert len(TABLE.findall(printed)) == 3
    assert "failed" not in printed


@pytest.mark.spark
@pytest.mark.slow
def test_a_peer_that_hangs_has_the_reason_in_each_of_its_rows(root: Path) -> None:
    printed = run_peers(root, "--only", "scikit-learn", "--limit", "1")
    assert len(re.findall("^scikit-learn .*failed: no result in 1 s, ", printed, re.MULTILINE)) == 2, printed
