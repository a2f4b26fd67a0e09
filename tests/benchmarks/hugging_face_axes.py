"""Networks of transformers on every axis: largest difference of two workers' weights from one worker's.

Each family trains the same global batches alone and with two workers along each axis, with momentum and
clipping, in fp32 and in bf16 with activation checkpointing. bf16 rounds every sum, so its differences show
another order of roundings. Below the table are the refusals.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import harness
import torch
from hugging_face_families import FAMILIES, MESHES, MIXTRAL, PRECISIONS, Family, compare, make_config

from ringspark.estimators.options.finetuning import LoRA

ADAPTERS = {"lora": LoRA(rank=4, targets=["*.q_proj", "*.v_proj"]), "learning_rate": 0.5}


def main() -> None:
    options = harness.parse(__doc__, families=(len(FAMILIES), 1))
    torch.set_num_threads(1)
    lines: list[list[str]] = []
    refusals: list[str] = []

    def add(title: str, family: Family, what: str, changes: dict[str, Any], meshes: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as name:
            found = compare(family, make_config(family, Path(name), **changes), meshes)
        line = [title, what]
        for mesh in [*MESHES, "expert 2"]:
            value = found.get(mesh, "")
            line.append(f"{value:.1e}" if isinstance(value, float) else "refused" if value else "")
            if isinstance(value, str) and value:
                refusals.append(f"{title}, {what}, {mesh}: {value}")
        lines.append(line)

    for title, family in list(FAMILIES.items())[: options.families]:
        for precision, changes in PRECISIONS.items():
            add(title, family, precision, changes, MESHES)
    if options.families == len(FAMILIES):
        two = {name: MESHES[name] for name in ("data 2", "tensor 2")}
        add("Llama", FAMILIES["Llama"], "LoRA", ADAPTERS, two)
        add("Mixtral", MIXTRAL, "fp32", {}, {"expert 2": {"parallelism": {"expert": 2}}})
    harness.print_table(
        "hugging_face_axes: largest difference of the weights from one worker's after 6 steps",
        ["", "", *MESHES, "expert 2"],
        lines,
    )
    for refusal in refusals:
        print(refusal)


if __name__ == "__main__":
    main()
