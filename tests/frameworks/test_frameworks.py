"""Scripts of five frameworks run as a gang, and their ranks train together."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import ringspark

FOLDER = Path(__file__).parent


@pytest.mark.spark
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.parametrize(
    ("script", "package"),
    [
        ("horovod_digits.py", "horovod"),
        ("ddp.py", "torch"),
        ("jax_linear.py", "jax"),
        ("keras_on_torch.py", "keras"),
        ("tensorflow_workers.py", "tensorflow"),
    ],
)
def test_the_ranks_of_a_script_end_with_the_same_weights(spark, tmp_path, script, package):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}; `make test-frameworks` has it")
    ringspark.run(FOLDER / script, str(tmp_path), numWorkers=2)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [(report["rank"], report["size"]) for report in reports] == [(0, 2), (1, 2)]
    # The ranks began with different weights or rows.
    assert reports[0]["weights"] == reports[1]["weights"]
    assert all(report["losses"][-1] < 0.5 * report["losses"][0] for report in reports)
