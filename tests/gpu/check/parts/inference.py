"""Part "inference": the forward passes of `transform` against a plain loop, and against the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from check.part import Part, Value
from check.timing import compare, ratio
from ringspark.estimators.inference.predictor import Predictor
from ringspark.models import ModelSpec

_DIM = 32
_SIZES = {"small": [128, 128], "large": [2048, 2048, 2048]}

Rows = npt.NDArray[Any]


class Inference(Part):
    columns = ("rows/s", "plain loop", "ratio", "difference from the CPU")
    note = (
        "MLPs with 32 inputs and layers of 128 (small) or 2,048 (large) units. Both copy each batch to the "
        "device and its outputs back; ringspark also converts them to float64. The difference is the largest "
        "of an output, relative to the largest output."
    )

    def cases(self) -> Sequence[str]:
        return [f"{name}, {rows} rows per pass" for name in _SIZES for rows in (2048, 65_536)]

    def measure(self, case: str) -> Sequence[Value]:
        name, text = case.split(", ")
        batch = int(text.split()[0])
        hidden = [16] if self.setup.is_tiny else _SIZES[name]
        spec = ModelSpec("mlp", {"in_features": _DIM, "hidden": hidden, "out_features": 1})
        rows = np.random.default_rng(0).random((_count(batch, self.setup.is_tiny), _DIM), dtype=np.float32)
        predictor = Predictor(
            model=spec.to_json(),
            weights_uri="",
            weights_id="",
            feeds=(),
            results=None,  # type: ignore[arg-type]  # only the forward passes run
            output_widths=(1,),
            batch_size=batch,
            use_gpu=self.setup.on_gpu,
        )
        torch.manual_seed(0)
        module = spec.build().eval()
        few = rows[: min(len(rows), 3000)]
        wanted = predictor.predict(module, [few], "cpu")
        module = module.to(self.setup.device)
        found = predictor.predict(module, [few], self.setup.device)
        difference = float(np.abs(found - wanted).max() / np.abs(wanted).max())
        assert difference < 1e-3, f"an output differs by {difference:.2g} from the CPU's"
        rounds = compare(
            {
                "own": partial(predictor.predict, module, [rows], self.setup.device),
                "plain": partial(_plain, module, rows, batch, self.setup.device),
            },
            self.setup,
        )
        rates = {key: median(len(rows) / seconds for seconds in values) for key, values in rounds.items()}
        return [
            *(rates["own"], rates["plain"]),
            *(ratio(rounds["plain"], rounds["own"]), difference),
        ]


def _count(batch: int, is_tiny: bool) -> int:
    return 100 if is_tiny else max(262_144, 4 * batch)


def _plain(module: nn.Module, rows: Rows, batch: int, device: str) -> None:
    with torch.inference_mode():
        for start in range(0, len(rows), batch):
            module(torch.from_numpy(rows[start : start + batch]).to(device)).cpu()
