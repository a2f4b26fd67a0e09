"""Exports a trained network to formats that other programs run, such as torch.export and ONNX."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from ringspark.estimators.columns.inputs import ModelInput, layout_of_inputs
from ringspark.estimators.inference.portable_operators import replace_rare_operators
from ringspark.estimators.lazy_imports import LazyRegistry
from ringspark.estimators.training.arguments import InputLayout
from ringspark.estimators.training.batch_transforms import prepare_function, prepare_inputs
from ringspark.estimators.training.feed import zeros
from ringspark.models.process_state import PROCESS_LOCK, silence_thread
from ringspark.models.program import Program
from ringspark.models.recording import TRACED_ROWS, NoProgramError, first_line, record_program, trace_network
from ringspark.pipelines import storage

ExportFormat = Literal["torch.export", "onnx", "triton", "aotinductor", "executorch", "mlflow"]

# Larger weights than one protobuf message holds go into a separate file.
_ONNX_LIMIT = (2 << 30) - (64 << 20)
# Without a maximum, torch 2.6 cannot export a mixture of experts.
_MAX_ROWS = 2**31 - 1
# Values per row of varying length in a sample.
_VALUES = 3


class ExportError(ValueError):
    """An exporter refuses the model or needs something; the message is a whole sentence."""


@dataclass(frozen=True)
class Export:
    """A network to export: `module` includes `transformInPrediction` of the fitted `stage`."""

    module: nn.Module
    inputs: Sequence[ModelInput]
    names: Sequence[str]
    stage: Any = None

    def trace(self, max_rows: int = _MAX_ROWS) -> torch.export.ExportedProgram:
        """Traces the network for any number of rows."""
        return trace_network(self.module, self.samples(TRACED_ROWS), _varying(self.inputs, max_rows))

    def trace_portable(self, max_rows: int = _MAX_ROWS) -> torch.export.ExportedProgram:
        """Traces the network into operators that other runtimes have."""
        return replace_rare_operators(self.trace(max_rows))

    def samples(self, rows: int) -> tuple[torch.Tensor, ...]:
        return _samples(self.inputs, rows)

    @property
    def arguments(self) -> list[str]:
        """Name of each input of the network."""
        if len(self.names) == len(self.inputs):
            return list(self.names)
        return [item.column.name + item.part for item in self.inputs if item.column is not None]


def write_program(export: Export, path: str) -> None:
    torch.export.save(export.trace(), path)


def write_onnx(export: Export, path: str) -> None:
    _to_onnx(export.trace_portable(), export.arguments, path)


EXPORTED = {("bf16", "torch.export"), ("bf16", "aotinductor")}
"""Each `inferencePrecision` other than fp32 with the formats that can have it."""

_SERVING = "ringspark.extras.serving"

EXPORTERS: LazyRegistry[Callable[[Export, str], None]] = LazyRegistry(
    {
        "torch.export": f"{__name__}:write_program",
        "onnx": f"{__name__}:write_onnx",
        "triton": f"{_SERVING}.triton:write_repository",
        "aotinductor": f"{_SERVING}.compiled:write_aotinductor",
        "executorch": f"{_SERVING}.compiled:write_executorch",
        "mlflow": f"{_SERVING}.logged_model:write_model",
    }
)
"""Format -> function that writes it to a new local file or folder."""

# Packages that a format needs besides torch, and the extra of ringspark that installs them.
_ONNX = ("onnx", ("onnx", "onnxscript"))
_NEEDS = {
    "onnx": _ONNX,
    "triton": _ONNX,
    "executorch": ("executorch", ("executorch",)),
    "mlflow": ("mlflow", ("mlflow",)),
}


def export_module(export: Export, path: str, format: str) -> None:
    """Writes the network to the file or folder `path`."""
    if format not in EXPORTERS:
        raise ValueError(f"format must be one of {list(EXPORTERS)}, got {format!r}")
    extra, packages = _NEEDS.get(format, ("", ()))
    if missing := [package for package in packages if find_spec(package) is None]:
        raise ValueError(
            f"format {format!r} needs {' and '.join(missing)}; pip install 'ringspark[{extra}]', or take "
            "format='torch.export'"
        )
    target = storage.normalize(path)
    fs, inside = storage.filesystem(target)
    if path.endswith("/") or storage.exists(target):
        what = "is a folder" if path.endswith("/") or fs.isdir(inside) else "exists already"
        raise ValueError(f"{path} {what}, but an export writes a new file; give a new path")
    with tempfile.TemporaryDirectory(prefix="ringspark-") as folder:
        try:
            EXPORTERS[format](export, os.path.join(folder, os.path.basename(target)))
        except ExportError:
            raise
        except Exception as error:  # tracing runs the module's code
            raise ValueError(
                f"model {type(export.module).__name__} cannot be exported as {format}: "
                f"{type(error).__name__}: {first_line(error)}; torch.export needs a forward without "
                "branches on values"
            ) from error
        parent = target.rpartition("/")[0]
        for place, _, names in os.walk(folder):
            there = f"{parent}/{os.path.relpath(place, folder)}".removesuffix("/.")
            storage.make_dirs(there or "/")
            for name in sorted(names):
                with (
                    open(os.path.join(place, name), "rb") as source,
                    storage.open_file(f"{there}/{name}", "wb") as writer,
                ):
                    shutil.copyfileobj(source, writer, 16 << 20)


def make_samples(inputs: Sequence[ModelInput], prepare: Any) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns a function from a number of rows to example inputs of the network."""
    if any(item.column is None for item in inputs):
        raise NoProgramError("the types of its inputs are not known")
    function = prepare_function(prepare, torch.device("cpu"), training=False)

    def samples(rows: int, length: int | None = None) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return prepare_inputs(function, _samples(inputs, rows, length))

    return samples


def record_module(
    module: nn.Module, inputs: Sequence[ModelInput], prepare: Any = None, inner: Iterable[str] = ()
) -> Program:
    """Records the module as a program for any number of rows; raises NoProgramError if that fails.

    Args:
        prepare: The user's function transformInPrediction; the program takes the results of `prepare`.
        inner: Names of modules whose outputs the program keeps.
    """
    samples = make_samples(inputs, prepare)
    arrays = [item.array for item in inputs]
    longest = max((array.shape[0] for array in arrays if array.varies), default=0)
    # A trace may follow a branch on the length that holds only for the traced length.
    every, some = range(1, longest + 1), max(1, longest // 16)
    return record_program(module, samples, _varying(inputs), [*every[:32], *every[32::some]], tuple(inner))


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


def _varying(inputs: Sequence[ModelInput], max_rows: int = _MAX_ROWS) -> list[dict[int, Any]]:
    # Equal dimensions share a name: the rows, and the concatenated arrays of one column.
    batch = torch.export.Dim("batch", min=1, max=max_rows)
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
    with PROCESS_LOCK, silence_thread():
        torch.onnx.export(
            program,
            f=file,
            input_names=list(names),
            dynamo=True,
            external_data=num_bytes > _ONNX_LIMIT,
            verbose=False,
        )
