"""Writes the folder of a served model: the network for ONNX Runtime or torch, and `serving.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ringspark.estimators.columns.inputs import ModelInput, source_names
from ringspark.estimators.inference.results import Classes, Values
from ringspark.estimators.inference.samples import record_module
from ringspark.estimators.served_model import class_name
from ringspark.estimators.stages.storage_root import find_session
from ringspark.extras.export.export import EXPORTERS, Export
from ringspark.extras.serving.plain.columns import READERS
from ringspark.extras.serving.plain.network import FILES, load_network, weights_of
from ringspark.extras.serving.plain.served import FILE, FORMAT_VERSION
from ringspark.models.outputs import as_outputs
from ringspark.models.program import Program
from ringspark.models.recording import first_line
from ringspark.pipelines.kinds import Binary, HashBuckets, Image, Struct, TableRow, Tokens

PACKAGE = "ringspark_served"
"""Name of the copied package `plain` in a logged model."""

RUNTIMES = {"onnx": ("onnxruntime",), "torch": ("torch", "safetensors")}
"""Runtime -> packages that run the network."""

# Largest relative difference that counts as rounding.
_TOLERANCE = 1e-3


def write_served(stage: Any, folder: Path, runtime: str | None = None) -> list[str]:
    """Writes the model to a new local folder, and returns the pinned packages that the model needs.

    Without a `runtime`, takes ONNX Runtime if its results equal the network's results, else torch. Raises
    ValueError if no runtime gives equal results.
    """
    inputs = describe_inputs(stage)
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
            problems.append(f"{name}: {first_line(error) or type(error).__name__}")
    else:
        raise ValueError(f"the network cannot be exported ({'; '.join(problems)})")
    text = {
        "format_version": FORMAT_VERSION,
        "runtime": name,
        "inputs": inputs,
        "results": _describe_results(stage),
        "rows_per_pass": stage._rows_per_pass(),
        "handle_invalid": stage.getHandleInvalid(),
    }
    (folder / FILE).write_text(json.dumps(text))
    packages = ["numpy", "pandas", *RUNTIMES[name], *_packages_of(stage._inputs)]
    return [pin(package) for package in packages]


def copy_package(folder: Path) -> Path:
    """Copies the package `plain` into `folder`, also if ringspark was shipped as a zip."""
    target = folder / PACKAGE
    target.mkdir(parents=True)
    for entry in files("ringspark.extras.serving.plain").iterdir():
        if entry.name.endswith(".py"):
            (target / entry.name).write_bytes(entry.read_bytes())
    for name in ("program.py", "operators.py"):
        source = (files("ringspark.models") / name).read_text(encoding="utf-8")
        (target / name).write_text(source.replace("from ringspark.models.", "from ."), encoding="utf-8")
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


def describe_inputs(stage: Any) -> list[dict[str, Any]]:
    """Returns the entries of the network's inputs in `serving.json`.

    Raises ValueError for a column type without a reader in the package `plain`.
    """
    session = find_session()
    # A time without an offset is in the time zone of this session.
    zone = "UTC" if session is None else str(session.conf.get("spark.sql.session.timeZone"))
    described: list[dict[str, Any]] = []
    readings: dict[Any, int] = {}
    names = source_names(stage._inputs, stage.inputColumns())
    # The mask and the values of a column come from one `Reading`.
    filled = {name for item, name in zip(stage._inputs, names, strict=True) if item.fills_nulls}
    for item, name in zip(stage._inputs, names, strict=True):
        kind = {} if item.column is None else item.column.kind.to_json()
        if kind.get("kind", "") not in READERS:
            raise ValueError(f"column {name!r} has the type {kind['kind']!r}, which only ringspark can read")
        described.append(
            {
                "name": name,
                "kind": kind,
                "part": item.part,
                "type": "" if item.column is None else item.column.source,
                "fills_nulls": name in filled,
                "zone": zone,
                "reading": readings.setdefault((name, item.column), len(readings)),
            }
        )
    return described


def pin(package: str) -> str:
    """Returns the requirement of the installed version, without a local label such as "+cpu"."""
    try:
        return f"{package}=={version(package).partition('+')[0]}"
    except PackageNotFoundError:
        return package


def _packages_of(inputs: Sequence[ModelInput]) -> Iterator[str]:
    kinds = [item.column.kind for item in inputs if item.column is not None]
    if any(
        isinstance(kind, Image) or (isinstance(kind, Binary) and kind.decoder == "image") for kind in kinds
    ):
        yield "pillow"
    if any(isinstance(kind, Tokens) for kind in kinds):
        yield "tokenizers"
    if any(isinstance(kind, HashBuckets) for kind in kinds):
        yield "xxhash"
    zones = [column.zone for kind in kinds if isinstance(kind, TableRow) for column in kind.columns]
    types = [kind_type for kind in kinds if isinstance(kind, Struct) for kind_type in kind.types]
    types += [item.column.source for item in inputs if item.column is not None]
    if any(zones) or "timestamp" in types:
        yield "tzdata"


def _describe_results(stage: Any) -> dict[str, Any]:
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
