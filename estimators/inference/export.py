"""Exports a trained network to formats that other programs run: torch.export and ONNX."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import nn

from ringspark.estimators.columns.inputs import MASK, ModelInput
from ringspark.estimators.training.feed import zeros
from ringspark.models.outputs import as_outputs
from ringspark.pipelines import storage

ExportFormat = Literal["torch.export", "onnx"]

# The most bytes that one protobuf message holds; larger weights go into a separate file.
_ONNX_LIMIT = (2 << 30) - (64 << 20)


class _Outputs(nn.Module):
    """Returns only the tensors, whatever else the network returns beside them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        outputs = as_outputs(self.module(*inputs))
        return outputs[0] if len(outputs) == 1 else outputs


def export_module(
    module: nn.Module, inputs: Sequence[ModelInput], names: Sequence[str], path: str, format: str
) -> None:
    """Traces the module for any number of rows and writes it to the file `path`.

    Raises:
        ValueError: The format is unknown or not installed, the inputs are not known, `path` is a folder
            or already exists, or the module cannot be traced.
    """
    if format not in get_args(ExportFormat):
        raise ValueError(f"format must be one of {list(get_args(ExportFormat))}, got {format!r}")
    missing = [p for p in ("onnx", "onnxscript") if format == "onnx" and find_spec(p) is None]
    if missing:
        raise ValueError(
            f"format 'onnx' needs {' and '.join(missing)}; pip install 'ringspark[onnx]', or take "
            "format='torch.export'"
        )
    samples = tuple(_sample(item, name) for item, name in zip(inputs, names, strict=True))
    target = storage.normalize(path)
    fs, inside = storage.filesystem(target)
    if path.endswith("/") or storage.exists(target):
        what = "is a folder" if path.endswith("/") or fs.isdir(inside) else "exists already"
        raise ValueError(f"{path} {what}, and an export writes a new file; give a path that is free")
    with tempfile.TemporaryDirectory(prefix="ringspark-") as folder:
        file = os.path.join(folder, os.path.basename(target))
        # All inputs share the name of this dimension, because they have equally many rows.
        batch = torch.export.Dim("batch", min=1)
        try:
            with torch.no_grad():
                program = torch.export.export(
                    _Outputs(module).eval(), samples, dynamic_shapes=(tuple({0: batch} for _ in samples),)
                )
                if format == "onnx":
                    _to_onnx(program, names, file)
                else:
                    torch.export.save(program, file)
        except Exception as error:  # tracing runs the module's code
            raise ValueError(
                f"model {type(module).__name__} cannot be exported as {format}: "
                f"{type(error).__name__}: {_first_line(error)}; torch.export needs a forward without "
                "branches on values"
            ) from error
        parent = target.rpartition("/")[0]
        storage.make_dirs(parent or "/")
        for name in sorted(os.listdir(folder)):
            with (
                open(os.path.join(folder, name), "rb") as source,
                storage.open_file(f"{parent}/{name}", "wb") as writer,
            ):
                shutil.copyfileobj(source, writer, 16 << 20)


def _first_line(error: Exception) -> str:
    """Returns the first line of the error, which says what went wrong; torch's reasoning fills pages."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .;:") if lines else "no reason given"


def _sample(item: ModelInput, name: str) -> torch.Tensor:
    """Returns two rows of zeros as input; with one row, tracing would take the 1 for a constant."""
    assert item.column is not None
    if item.part == MASK:
        return torch.zeros(2)
    described = item.column.kind.arrays(item.column.name)[item.column.name + item.part]
    return zeros(described, 2)


def _to_onnx(program: torch.export.ExportedProgram, names: Sequence[str], file: str) -> None:
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    torch.onnx.export(
        program,
        f=file,
        input_names=list(names),
        dynamo=True,
        external_data=num_bytes > _ONNX_LIMIT,
        verbose=False,
    )
