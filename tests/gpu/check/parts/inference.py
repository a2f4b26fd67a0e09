"""Part "inference": the forward passes of `transform` against a plain loop, and against the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from bare_predictor import bare_predictor
from torch import nn

from check.part import Part, Value
from check.timing import compare
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
        batch, device = int(text.split()[0]), self.setup.device
        hidden, count = ([16], 100) if self.setup.is_tiny else (_SIZES[name], max(262_144, 4 * batch))
        spec = ModelSpec("mlp", {"in_features": _DIM, "hidden": hidden, "out_features": 1})
        rows = np.random.default_rng(0).random((count, _DIM), dtype=np.float32)
        predictor = bare_predictor(spec, batch_size=batch, use_gpu=self.setup.on_gpu)
        torch.manual_seed(0)
        module = spec.build().eval()
        wanted = predictor.predict(module, [rows[:3000]], "cpu")
        found = predictor.predict(module.to(device), [rows[:3000]], device)
        difference = float(np.abs(found - wanted).max() / np.abs(wanted).max())
        assert difference < 1e-3, f"an output differs by {difference:.2g} from the CPU's"
        own = partial(predictor.predict, module, [rows], device)
        rounds = compare(
            {"own": own, "plain": partial(predict_plainly, module, rows, batch, device)}, self.setup
        )
        rates = [rounds.rate(key, len(rows)) for key in ("own", "plain")]
        return [*rates, rounds.ratio("plain", "own"), difference]


def predict_plainly(module: nn.Module, rows: Rows, batch: int, device: str) -> None:
    with torch.inference_mode():
        for part in torch.from_numpy(rows).split(batch):
            module(part.to(device)).cpu()
