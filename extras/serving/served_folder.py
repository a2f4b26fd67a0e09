"""Writes the folder of a served model: the network for ONNX Runtime or torch, and `serving.json`."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ringspark.estimators.inference.local_inputs import local_inputs
from ringspark.estimators.inference.results import Classes, Values
from ringspark.estimators.names import first_line
from ringspark.extras.export.export import EXPORTERS, Export
from ringspark.extras.export.samples import record_module
from ringspark.extras.quantiles.outputs import QuantileResults, check_apart
from ringspark.extras.serving.plain.network import FILES, load_network, weights_of
from ringspark.extras.serving.plain.served import FILE, FORMAT_VERSION
from ringspark.extras.serving.served_model import class_name, session_zone
from ringspark.models.outputs import as_outputs
from ringspark.models.program import Program

PACKAGE = "ringspark_served"
"""Name of the copied package `plain` in a logged model."""

RUNTIMES = {"onnx": ("onnxruntime",), "torch": ("torch", "safetensors")}
"""Runtime -> packages that run the network."""

# Packages of ringspark whose modules the copied package needs, and these modules; an empty tuple means all.
_COPIED = {
    "models": ("class_scores.py", "program.py", "operators.py", "quantiles.py"),
    "pipelines": (
        "columns.py",
        "local_rows.py",
        "nulls.py",
        "quoting.py",
        "rows.py",
        "spark_errors.py",
        "typed_json.py",
    ),
    "pipelines.kinds": (),
}

# tzdata is for time zones, in images that have none.
_PACKAGES = ("numpy", "pandas", "pyarrow", "tzdata")

# Largest relative difference that counts as rounding.
_TOLERANCE = 1e-3


def write_served(stage: Any, folder: Path, runtime: str | None = None) -> list[str]:
    """Writes the model to a new local folder, and returns the pinned packages that the model needs.

    Without a `runtime`, takes ONNX Runtime if its results equal the network's results, else torch. Raises
    ValueError if no runtime gives equal results.
    """
    if stage.getInnerCols() or stage.getContributionsCol():
        raise ValueError(
            "innerCols and contributionsCol need the whole stage; leave runtime unset, or clear both settings"
        )
    inputs = local_inputs(stage._inputs, stage.inputColumns(), session_zone())
    folder.mkdir(parents=True)
    export = Export.of(stage)
    problems = []
    for name in [runtime] if runtime else list(RUNTIMES):
        try:
            _WRITERS[name](export, folder / FILES[name])
            _compare(export, folder, name)
            break
        except Exception as error:  # the exporters raise errors of many classes
            (folder / FILES[name]).unlink(missing_ok=True)
            problems.append(f"{name}: {first_line(error)}")
    else:
        raise ValueError(f"the network cannot be exported ({'; '.join(problems)})")
    text = {
        "format_version": FORMAT_VERSION,
        "runtime": name,
        "inputs": [vars(item) | {"kind": item.kind and item.kind.to_json()} for item in inputs],
        "results": _describe_results(stage),
        "rows_per_pass": stage._rows_per_pass(),
        "handle_invalid": stage.getHandleInvalid(),
    }
    (folder / FILE).write_text(json.dumps(text))
    needed = [package for item in inputs if item.kind for package in item.kind.packages]
    return [pin(package) for package in dict.fromkeys([*_PACKAGES, *RUNTIMES[name], *needed])]


def copy_package(folder: Path) -> Path:
    """Copies the package `plain` and `_COPIED` into `folder`, also if ringspark was shipped as a zip."""
    target = folder / PACKAGE
    for source, place in {"extras.serving.plain": "", **{name: name for name in _COPIED}}.items():
        package = target.joinpath(*place.split("."))
        package.mkdir(parents=True)
        for entry in files(f"ringspark.{source}").iterdir():
            if entry.name.endswith(".py") and entry.name in (_COPIED.get(place) or (entry.name,)):
                text = entry.read_text(encoding="utf-8")
                copied = re.sub(r"^( *from )ringspark\.", rf"\1{PACKAGE}.", text, flags=re.MULTILINE)
                (package / entry.name).write_text(copied, encoding="utf-8")
    return target


def _write_onnx(export: Export, path: Path) -> None:
    import onnxruntime  # noqa: F401 (to compare the results)

    EXPORTERS["onnx"](export, str(path))


def _write_program(export: Export, path: Path) -> None:
    """Writes the network as JSON and safetensors, because `torch.export.load` runs code in its file."""
    module = export.module
    program = module if isinstance(module, Program) else record_module(module, export.inputs)
    names = [tensor["name"] for tensor in program.text["tensors"]]
    tensors: dict[str, torch.Tensor] = {}
    tensors |= dict(program.named_parameters(remove_duplicate=False))
    tensors |= dict(program.named_buffers(remove_duplicate=False))
    # A file of safetensors cannot hold a tensor twice.
    save_file({name: tensors[name].detach().clone().contiguous() for name in names}, weights_of(str(path)))
    path.write_text(json.dumps(program.text))


_WRITERS = {"onnx": _write_onnx, "torch": _write_program}


def pin(package: str) -> str:
    """Returns the requirement of the installed version, without a local label such as "+cpu"."""
    try:
        return f"{package}=={version(package).partition('+')[0]}"
    except PackageNotFoundError:
        return package


def _describe_results(stage: Any) -> dict[str, Any]:
    check_apart(stage)
    names, results = stage._outputs()
    described: dict[str, Any] = {
        "names": names,
        "widths": Values(shapes=stage._output_shapes).widths,
        "type": "values",
        "labels": list(getattr(stage, "labels", [])),
        "label_name": class_name(stage) or "",
        "thresholds": None,
    }
    if isinstance(results, Classes):
        thresholds = results.thresholds
        described |= {"type": "classes", "thresholds": None if thresholds is None else list(thresholds)}
    if isinstance(results, QuantileResults):
        described |= {"type": "quantiles", "quantiles": list(results.quantiles)}
        described |= {"coverage": results.coverage, "correction": results.correction}
    return described


def _compare(export: Export, folder: Path, runtime: str) -> None:
    """Raises ValueError if the written network computes other numbers than the module."""
    run = load_network(str(folder), runtime)
    for rows in (1, 3):
        inputs = export.samples(rows)
        # Ids stay zero, because zero is a valid id of every input. Floats vary.
        for tensor in inputs:
            if tensor.is_floating_point():
                tensor.copy_(torch.linspace(-1, 1, tensor.numel()).reshape(tensor.shape))
        with torch.inference_mode():
            expected = as_outputs(export.module(*(tensor.clone() for tensor in inputs)))
        found = run([tensor.numpy() for tensor in inputs])
        for one, other in zip(found, expected, strict=True):
            wanted = other.double().numpy()
            limit = _TOLERANCE * max(1.0, float(np.abs(wanted).max(initial=0)))
            if one.shape != wanted.shape or not np.allclose(one, wanted, 0, limit, equal_nan=True):
                raise ValueError(f"its results for {rows} rows differ from the network's results")
