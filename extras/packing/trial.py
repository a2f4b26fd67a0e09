"""Trains one rank on the rows of FOLDER/shards: `python -I -m ringspark.extras.packing.trial FOLDER`.

Prints JSON: versions, the loss, and the files outside of the archive that the process has loaded.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import torch

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec


def main(folder: Path) -> None:
    config = TrainConfig(
        shards_uri=str(folder / "shards"),
        run_uri=str(folder / "run"),
        task="regression",
        losses=("mse",),
        input_columns=("x",),
        label_columns=("y",),
        batch_size=16,
        reader="arrow",
        model=ModelSpec("linear", {"in_features": 2, "out_features": 1}).to_json(),
    )
    result = train_here(config)
    if find_spec("horovod"):
        import_module("horovod.torch")
    told = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyarrow": pa.__version__,
        "loss": result.history[-1].value("train_loss"),
        "outside": _files_outside(),
    }
    print(json.dumps(told))


def _files_outside() -> list[str]:
    """Returns the Python files and libraries of this process that are not in the archive."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if ".so" in line}
    files |= {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    return sorted(file for file in files if file.startswith("/") and not file.startswith(f"{sys.prefix}/"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
