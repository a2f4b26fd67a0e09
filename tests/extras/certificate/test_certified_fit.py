"""A certified `fit` on Spark is signed, and `ringspark verify` checks it in another process."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import certified_network
import pytest
from command_line import run_ringspark
from forged_runs import claim, draw_rows, load_run
from signing_keys import write_keys

from ringspark.estimators import TorchRegressor
from ringspark.extras.certificate.chain import reseal, write_chain
from ringspark.extras.certificate.recorder import digest_run
from ringspark.models import ModelSpec

SUPPORT = Path(__file__).parents[2] / "support"
SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 1, "dropout": 0.2})


def _verify(*words: object) -> subprocess.CompletedProcess[str]:
    places = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    return run_ringspark("verify", *words, PYTHONPATH=os.pathsep.join(places))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_certified_fit_is_verified_on_the_command_line(spark: Any, tmp_path: Path, workers: int) -> None:
    rows = draw_rows(0)
    data = [(x.tolist(), float(y)) for x, y in zip(rows["x"], rows["y"], strict=True)]
    table = spark.createDataFrame(data, "features array<float>, label float")
    run = tmp_path / "run"
    network = SPEC if workers == 2 else certified_network.make()
    sizes = {"optimizer": "adamw", "epochs": 2, "batchSize": 20, "numWorkers": workers}
    run_of = {"runUri": str(run), "certify": True, "checkpointEverySteps": 2, "validationFraction": 0.2}
    model = TorchRegressor(model=network, **sizes, **run_of, showProgress=False).fit(table)
    private, public = write_keys(tmp_path)
    assert model.certificate(key=private).signature == str(run / "certificate" / "run.sig")
    given = [] if workers == 2 else ["--model", "certified_network:make"]
    done = _verify(run, "--intervals", 2, "--key", public, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "intervals replayed: 2 of 4" in done.stdout
    assert "signature                   holds" in done.stdout
    assert done.stdout.count("equal to the bit") == 4

    # The forger claims another learning rate in all files, and signs again.
    claim(run, certified_network.objects() if workers == 1 else None, learning_rate=0.5)
    begun = json.loads((run / "run.json").read_text())
    begun["identity"] = load_run(run).chain.links[0].content["identity"]
    (run / "run.json").write_text(json.dumps(begun))
    links = load_run(run).chain.links
    end = links[-1].content
    end["run"] = digest_run(str(run), end["folder"])
    write_chain(str(run), reseal(links))
    model.certificate(key=private)
    done = _verify(run, "--intervals", 1, "--key", public, *given)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "does not hold: training again gives other weights." in done.stdout
