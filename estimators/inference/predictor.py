"""Predicts by a trained network, batch by batch, in a Python worker of Spark or without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.columns.feeds import Feed
from ringspark.estimators.inference.precision import reduce_precision
from ringspark.estimators.training.arguments import InputLayout, count_rows, slice_rows
from ringspark.estimators.training.batch_transforms import PreparedNetwork
from ringspark.estimators.training.checkpoint.weights import map_checkpoint, stream_checkpoint
from ringspark.estimators.training.feed import Array
from ringspark.estimators.training.settings.choices import InferencePrecision, WeightOffload
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta
from ringspark.models.process_state import print_any_text

if TYPE_CHECKING:
    from ringspark.estimators.inference.results import Results


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Everything that a Python worker needs to predict, except the weights, which stay on the store.

    Attributes:
        model: `ModelSpec` as JSON, or the user's pickled module without weights.
        weights_id: Identity of the checkpoint; another id means other weights in the same folder.
        keeps_rows: Whether the input has one more column, which is false for rows that get no prediction.
        packs: Whether the first column of the input is a struct that holds all inputs.
        gives_vectors: Whether Python returns vectors, see `takes_vectors`; the driver decides it.
    """

    model: str | bytes
    weights_uri: str
    weights_id: str
    feeds: tuple[Feed, ...]
    results: Results
    output_widths: tuple[int, ...]
    batch_size: int
    prepare: bytes = b""
    use_gpu: bool = False
    offload: WeightOffload = "none"
    precision: InferencePrecision = "fp32"
    keeps_rows: bool = False
    packs: bool = False
    gives_vectors: bool = True
    layout: InputLayout = ()

    def load(self, device: str = "cpu", cache: str | None = None) -> nn.Module:
        """Returns the trained module in eval mode, which computes on `device`."""
        module: nn.Module
        if isinstance(self.model, str):
            module = build_on_meta(ModelSpec.from_json(self.model).build)
        else:
            module = user_code.loads(self.model)
        # A task may start long after `transform` was called, when the folder holds another model.
        load = stream_checkpoint if self.offload == "disk" else map_checkpoint
        load(self.weights_uri, module, device, cache, expected_id=self.weights_id)
        module = reduce_precision(module, self.precision, device)
        if self.prepare:
            module = PreparedNetwork(user_code.loads(self.prepare), module, device)
        return module.eval()

    def predict(self, module: nn.Module, columns: Sequence[Array], device: str = "cpu") -> Array:
        """Returns the outputs of the network and of inner modules, side by side, (rows, numbers) float64."""
        num_rows = count_rows(columns, self.layout)
        widths = (*self.output_widths, *self.results.inner_widths)
        outputs = np.empty((num_rows, sum(widths)), dtype=np.float64)
        # Not `inference_mode`, whose tensors a forward pass that differentiates cannot use.
        with torch.no_grad(), print_any_text(), self.results.forward(module) as forward:
            for start in range(0, num_rows, self.batch_size):
                stop = min(start + self.batch_size, num_rows)
                rows = slice_rows(columns, self.layout, start, stop)
                inputs = [torch.from_numpy(column).to(device) for column in rows]
                left = 0
                for width, output in zip(widths, forward(inputs), strict=True):
                    # Converted to float64 here, because fp32 would round whole numbers beyond 2^24.
                    values = output.cpu().double().reshape(stop - start, width)
                    outputs[start:stop, left : left + width] = values.numpy()
                    left += width
        return outputs
