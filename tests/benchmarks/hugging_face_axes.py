"""Networks of transformers on every axis: largest difference of two workers' weights from one worker's.

Every family trains the same global batches alone and with two workers along each axis, with momentum and
clipping, in fp32 and in bf16 with activation checkpointing. A refused pair shows its sentence below the table.
bf16 rounds every layer, so its differences are those of the roundings' order.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from hugging_face_families import FAMILIES, Family
from small_training import config_of, train_gang, weights_of
from written_shards import written

from ringspark.estimators.failures import WorkerError
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects

MESHES: dict[str, dict[str, Any]] = {
    "data 2": {},
    "tensor 2": {"parallelism": {"tensor": 2}},
    "pipeline 2": {"parallelism": {"pipeline": 2}, "gradient_accumulation": 2},
    "sequence 2": {"parallelism": {"sequence": 2}},
    "shard 2": {"sync": Zero(stage=3)},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, checkpointing": {"precision": "bf16", "gradient_checkpointing": "all"},
}


def make_config(family: Family, folder: Path, **changes: Any) -> TrainConfig:
    """Returns settings for one worker; writes the family's rows as shards."""
    manifest = written(folder / "shards", family.columns())
    return config_of(
        manifest,
        folder / "run",
        task="any",
        losses=("cross_entropy",) if not family.losses else ("own",),
        input_columns=family.inputs,
        # Key biases have only rounding errors as gradients, which Adam would turn into full steps.
        optimizer="momentum",
        learning_rate=0.05,
        max_grad_norm=1.0,
        collective="torch",
        **changes,
    )


def compare(family: Family, config: TrainConfig, meshes: dict[str, dict[str, Any]]) -> dict[str, float | str]:
    """Returns for each mesh the largest difference from one worker, relative to nothing, or the refusal."""
    network = family.build()
    before = torch.cat([p.detach().flatten() for p in network.parameters()])
    objects = UserObjects(module=network, losses=family.losses)
    one = replace(config, run_uri=f"{config.run_uri}-one")
    alone = weights_of(train_here(one, objects), family.build())
    assert float((alone - before).abs().max()) > 0.01
    found: dict[str, float | str] = {}
    for name, changes in meshes.items():
        two = replace(config, run_uri=f"{config.run_uri}-{name}", num_workers=2, **changes)
        try:
            trained = weights_of(train_gang(two, UserObjects(module=family.build(), losses=family.losses)), family.build())
            found[name] = float((trained - alone).abs().max())
        except (ValueError, WorkerError) as error:
            found[name] = str(error)
    return found


def main() -> None:
    options = harness.parse(__doc__, families=(len(FAMILIES), 1))
    torch.set_num_threads(1)
    lines, refusals = [], []
    with tempfile.TemporaryDirectory() as name:
        for title, family in list(FAMILIES.items())[: options.families]:
            for precision, changes in PRECISIONS.items():
                folder = Path(name) / title / precision
                found = compare(family, make_config(family, folder, **changes), MESHES)
                cells = [f"{value:.1e}" if isinstance(value, float) else "refused" for value in found.values()]
                refusals += [f"{title}, {precision}, {mesh}: {value}" for mesh, value in found.items() if isinstance(value, str)]
                lines.append([title, precision, *cells])
                print(lines[-1], *[r for r in refusals if r.startswith(f"{title}, {precision}")], sep="\n  ", flush=True)
    harness.print_table(
        "hugging_face_axes: largest difference of the weights from one worker's, 6 steps",
        ["", "", *MESHES],
        lines,
    )
    for refusal in refusals:
        print(refusal)


if __name__ == "__main__":
    main()
