"""Exports a trained network to formats that other programs run, such as torch.export and ONNX."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ringspark.estimators.columns.inputs import ModelInput
from ringspark.estimators.inference.precision import reduce_precision
from ringspark.estimators.lazy_imports import LazyRegistry
from ringspark.estimators.names import first_line
from ringspark.estimators.training.batch_transforms import PreparedNetwork
from ringspark.estimators.training.settings.choices import InferencePrecision
from ringspark.extras.export.recording import TRACED_ROWS, trace_network
from ringspark.extras.export.samples import MAX_ROWS, varying_sizes, zeros_of
from ringspark.extras.quantiles.outputs import check_apart
from ringspark.models.process_state import PROCESS_LOCK, silence_thread
from ringspark.pipelines import storage

# Larger weights than one protobuf message holds go into a separate file.
_ONNX_LIMIT = (2 << 30) - (64 << 20)
# Giles, "Approximating the erfinv function" (GPU Computing Gems, 2010): fp32 coefficients for the middle and
# for the tails, highest power first. The relative error is below 3e-7.
_MIDDLE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_TAILS = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


class ExportError(ValueError):
    """An exporter refuses the model or needs something; the message is a whole sentence."""


@dataclass(frozen=True)
class Export:
    """A network to export: `module` includes `transformInPrediction` of the fitted `stage`."""

    module: nn.Module
    inputs: Sequence[ModelInput]
    names: Sequence[str]
    stage: Any = None

    @classmethod
    def of(cls, model: Any, precision: InferencePrecision = "fp32") -> Export:
        """Returns the network of a fitted model, with its `transformInPrediction`."""
        prepare, module = model.getTransformInPrediction(), reduce_precision(model.module(), precision)
        if prepare is not None:
            module = PreparedNetwork(prepare, module)
        return cls(module, model._inputs, model.inputColumns(), model)

    def trace(self, max_rows: int = MAX_ROWS) -> torch.export.ExportedProgram:
        """Traces the network for any number of rows."""
        return trace_network(self.module, self.samples(TRACED_ROWS), varying_sizes(self.inputs, max_rows))

    def trace_portable(self, max_rows: int = MAX_ROWS) -> torch.export.ExportedProgram:
        """Traces the network into operators that other runtimes have."""
        program = self.trace(max_rows)
        with PROCESS_LOCK, torch.no_grad(), silence_thread():
            # Decomposes only `erfinv`, with which networks for tables encode numbers.
            found: torch.export.ExportedProgram = program.run_decompositions(
                {torch.ops.aten.erfinv.default: _erfinv}
            )
            return found

    def samples(self, rows: int) -> tuple[torch.Tensor, ...]:
        return zeros_of(self.inputs, rows)

    @property
    def arguments(self) -> list[str]:
        """Name of each input of the network."""
        if len(self.names) == len(self.inputs):
            return list(self.names)
        return [item.column.name + item.part for item in self.inputs if item.column is not None]


def write_program(export: Export, path: str) -> None:
    torch.export.save(export.trace(), path)


def write_onnx(export: Export, path: str) -> None:
    program = export.trace_portable()
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    with PROCESS_LOCK, silence_thread():
        torch.onnx.export(
            program,
            f=path,
            input_names=export.arguments,
            dynamo=True,
            external_data=num_bytes > _ONNX_LIMIT,
            verbose=False,
        )


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


def export_model(model: Any, path: str, format: str) -> None:
    """Writes the network of a fitted model to the file or folder `path`."""
    check_apart(model, format)
    precision = model.getInferencePrecision()
    if precision != "fp32" and (precision, format) not in EXPORTED:
        warnings.warn(
            f"export writes the network in fp32 as {format!r}, although inferencePrecision={precision!r}",
            UserWarning,
            stacklevel=3,
        )
        precision = "fp32"
    _export(Export.of(model, precision), path, format)


def _export(export: Export, path: str, format: str) -> None:
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


def _erfinv(x: torch.Tensor) -> torch.Tensor:
    w = -torch.log((1 - x) * (1 + x))
    middle = _polynomial(_MIDDLE, w - 2.5)
    tails = _polynomial(_TAILS, w.clamp(min=5.0).sqrt() - 3)
    return torch.where(w < 5, middle, tails) * x


def _polynomial(factors: Sequence[float], w: torch.Tensor) -> torch.Tensor:
    return reduce(lambda result, factor: result * w + factor, factors[1:], torch.full_like(w, factors[0]))
