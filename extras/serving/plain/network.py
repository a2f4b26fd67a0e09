"""Runs the network of a served model by ONNX Runtime or torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

from ringspark.pipelines.rows import NumpyArray

Network = Callable[[Sequence[NumpyArray]], list[NumpyArray]]

FILES = {"onnx": "network.onnx", "torch": "network.json"}
"""Runtime -> file of the network."""


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
    from safetensors.torch import load_file

    from ringspark.models.program import Program

    with open(path, encoding="utf-8") as file:
        program = Program(json.load(file))
    for name, tensor in load_file(weights_of(path)).items():
        program.put(name, tensor)

    def run(inputs: Sequence[NumpyArray]) -> list[NumpyArray]:
        with torch.inference_mode():
            outputs = program(*(torch.from_numpy(array) for array in inputs))
        given = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        return [output.double().numpy() for output in given]

    return run


def weights_of(path: str) -> str:
    """Returns the path of the safetensors file next to a program."""
    return path.removesuffix(".json") + ".safetensors"
