"""Peak bytes of a transformers network: on the driver in its checks, and on two workers until step 1.

The model is a ModelSpec, so the driver and the workers build it on the meta device. Bytes are counted in
torch's allocator.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import harness
import torch
from building_bytes import driver_bytes, rank_bytes
from hugging_face_families import FAMILIES, LARGE, MESHES, make_config

from ringspark.estimators.training.settings.config import UserObjects

MIB = 1 << 20
TITLES = {"shard 2": "data 2, Zero 3", "tensor 2": "tensor 2", "pipeline 2": "pipeline 2"}


def main() -> None:
    options = harness.parse(__doc__, families=(len(LARGE), 1))
    torch.set_num_threads(1)
    lines: list[list[str]] = []
    for name in list(LARGE)[: options.families]:
        family = FAMILIES[name]
        spec = family.spec(**LARGE[name])
        whole = sum(parameter.nbytes for parameter in spec.build().parameters())
        objects = UserObjects(losses=family.losses)
        with tempfile.TemporaryDirectory() as folder:
            config = make_config(family, Path(folder), num_workers=2, model=spec.to_json())
            for mesh, title in TITLES.items():
                found = replace(config, **MESHES[mesh])
                counts = (whole, driver_bytes(found, objects), max(rank_bytes(found, objects)))
                lines.append([name, title, *(f"{count / MIB:.1f}" for count in counts)])
    harness.print_table(
        "hugging_face_memory: MiB at the peak, until step 1",
        ["", "", "weights", "driver", "fullest worker"],
        lines,
    )


if __name__ == "__main__":
    main()
