"""Exports a trained network to formats that other programs run: torch.export and ONNX."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import nn

from ringspark.estimators.columns.inputs import ModelInput, layout_of_inputs
from ringspark.estimators.training.arguments import InputLayout
from ringspark.estimators.training.batch_transforms import prepare_function, prepare_inputs
from ringspark.estimators.training.feed import zeros
from ringspark.models.process_state import PROCESS_LOCK
from ringspark.models.program import Program
from ringspark.models.recording import TRACED_ROWS, NoProgramError, first_line, record_program, trace_network
from ringspark.pipelines import storage

ExportFormat = Literal["torch.export", "onnx"]

# Larger weights than one protobuf message holds go into a separate file.
_ONNX_LIMIT = (2 << 30) - (64 << 20)
# Values per row of varying length in a sample.
_VALUES = 3


def export_module(
    module: nn.Module, inputs: Sequence[ModelInput], names: Sequence[str], path: str, format: str
) -> None:
    """Traces the module for any number of rows and writes it to the file `path`."""
    if format not in get_args(ExportFormat):
        raise ValueError(f"format must be one of {list(get_args(ExportFormat))}, got {format!r}")
    missing = [p for p in ("onnx", "onnxscript") if format == "onnx" and find_spec(p) is None]
    if missing:
        raise ValueError(
            f"format 'onnx' needs {' and '.join(missing)}; pip install 'ringspark[onnx]', or take "
            "format='torch.export'"
        )
    target = storage.normalize(path)
    fs, inside = storage.filesystem(target)
    if path.endswith("/") or storage.exists(target):
        what = "is a folder" if path.endswith("/") or fs.isdir(inside) else "exists already"
        raise ValueError(f"{path} {what}, but an export writes a new file; give a new path")
    with tempfile.TemporaryDirectory(prefix="ringspark-") as folder:
        file = os.path.join(folder, os.path.basename(target))
        try:
            program = trace_network(module, _samples(inputs, TRACED_ROWS), _varying(inputs))
            if format == "onnx":
                plain = [item.column.name + item.part for item in inputs if item.column is not None]
                _to_onnx(program, names if len(names) == len(inputs) else plain, file)
            else:
                torch.export.save(program, file)
        except Exception as error:  # tracing runs the module's code
            raise ValueError(
                f"model {type(module).__name__} cannot be exported as {format}: "
                f"{type(error).__name__}: {first_line(error)}; torch.export needs a forward without "
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


def record_module(module: nn.Module, inputs: Sequence[ModelInput], prepare: Any = None) -> Program:
    """Records the module as a program for any number of rows; raises NoProgramError if that fails.

    `prepare`: the user's function transformInPrediction; the program takes the results of `prepare`.
    """
    if any(item.column is None for item in inputs):
        raise NoProgramError("the types of its inputs are not known")
    function = prepare_function(prepare, torch.device("cpu"), training=False)

    def samples(rows: int, length: int | None = None) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return prepare_inputs(function, _samples(inputs, rows, length))

    arrays = [item.array for item in inputs]
    longest = max((array.shape[0] for array in arrays if array.varies), default=0)
    # A trace may follow a branch on the length that holds only for the traced length.
    every, some = range(1, longest + 1), max(1, longest // 16)
    return record_program(module, samples, _varying(inputs), [*every[:32], *every[32::some]])


def _samples(inputs: Sequence[ModelInput], rows: int, length: int | None = None) -> tuple[torch.Tensor, ...]:
    """Returns sample inputs; a ragged row has `_VALUES` values, a padded row at most `length` values."""
    made = []
    for number, (item, place) in enumerate(zip(inputs, _places(inputs), strict=True)):
        array = item.array
        if place == number:
            made.append(torch.arange(rows) * _VALUES)
            continue
        sample = zeros(array, rows if place is None else rows * _VALUES)
        if array.varies:
            # A single row has full length; several rows differ in length.
            sample = sample[:, : length or (rows + _VALUES if rows > 1 else None)]
        made.append(sample)
    return tuple(made)


def _varying(inputs: Sequence[ModelInput]) -> list[dict[int, Any]]:
    # Equal dimensions share a name: the rows, and the concatenated arrays of one column.
    # Without a maximum, torch 2.6 cannot export a mixture of experts.
    batch = torch.export.Dim("batch", min=1, max=2**31 - 1)
    ends: dict[int, Any] = {}
    dims = []
    for number, (item, place) in enumerate(zip(inputs, _places(inputs), strict=True)):
        if place is not None and place != number:
            dims.append({0: ends.setdefault(place, torch.export.Dim(f"values{place}", min=0))})
        else:
            # torch may refuse a bound on a length that the network does not treat specially.
            dims.append({0: batch} | ({1: torch.export.Dim.AUTO} if item.array.varies else {}))
    return dims


def _places(inputs: Sequence[ModelInput]) -> InputLayout:
    return layout_of_inputs(inputs) or (None,) * len(inputs)


def _to_onnx(program: torch.export.ExportedProgram, names: Sequence[str], file: str) -> None:
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    with PROCESS_LOCK:
        torch.onnx.export(
            program,
            f=file,
            input_names=list(names),
            dynamo=True,
            external_data=num_bytes > _ONNX_LIMIT,
            verbose=False,
        )
