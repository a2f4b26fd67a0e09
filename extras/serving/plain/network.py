"""Runs the network of a served model by ONNX Runtime or torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from .values import NumpyArray

Network = Callable[[Sequence[NumpyArray]], list[NumpyArray]]

FILES = {"onnx": "network.onnx", "torch": "network.pt2"}
"""File of the network, by the program that runs it."""


def load_network(folder: str, runtime: str) -> Network:
    """Returns a function from the network's inputs to its outputs."""
    path = os.path.join(folder, FILES[runtime])
    return _load_onnx(path) if runtime == "onnx" else _load_torch(path)


def _load_onnx(path: str) -> Network:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Without the variable, ONNX Runtime uses every core.
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(inputs: Sequence[NumpyArray]) -> list[NumpyArray]:
        outputs: list[NumpyArray] = session.run(None, dict(zip(names, inputs, strict=True)))
        return outputs

    return run


def _load_torch(path: str) -> Network:
    import torch

    module: Any = torch.export.load(path).module()

    def run(inputs: Sequence[NumpyArray]) -> list[NumpyArray]:
        with torch.inference_mode():
            outputs = module(*(torch.from_numpy(array) for array in inputs))
        given = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        return [output.double().numpy() for output in given]

    return run
