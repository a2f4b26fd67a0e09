"""Export to a model repository of the Triton Inference Server, with the network as ONNX.

    model/config.pbtxt      names, types and shapes of inputs and outputs
    model/1/model.onnx
    model/labels.txt        class names, if the labels of the training were strings

The repository holds the network alone: a client sends the numbers that the network takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ringspark.extras.export.export import EXPORTERS, Export, ExportError

_TYPES = {
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "BFLOAT16": "TYPE_BF16",
    "DOUBLE": "TYPE_FP64",
    "INT64": "TYPE_INT64",
    "INT32": "TYPE_INT32",
    "BOOL": "TYPE_BOOL",
}


def write_repository(export: Export, path: str) -> None:
    """Writes the folder `path`, a repository with one model of the same name."""
    import onnx

    name = os.path.basename(path)
    folder = os.path.join(path, name)
    os.makedirs(os.path.join(folder, "1"))
    file = os.path.join(folder, "1", "model.onnx")
    EXPORTERS["onnx"](export, file)
    graph = onnx.load(file, load_external_data=False).graph
    labels = list(getattr(export.stage, "labels", []))
    if labels:
        if any("\n" in label for label in labels):
            raise ExportError(
                "a class name contains a line break, which Triton's labels.txt cannot hold; rename it"
            )
        with open(os.path.join(folder, "labels.txt"), "w", encoding="utf-8") as writer:
            writer.writelines(f"{label}\n" for label in labels)
    has_rows = all(item.array.per_row for item in export.inputs)
    lines = _config(name, graph, export.stage._rows_per_pass() if has_rows else 0, bool(labels))
    with open(os.path.join(folder, "config.pbtxt"), "w", encoding="utf-8") as writer:
        writer.writelines(f"{line}\n" for line in lines)


def _config(name: str, graph: Any, max_rows: int, has_labels: bool) -> Iterator[str]:
    """Yields the lines of config.pbtxt. If `max_rows` > 0, Triton batches, and shapes omit the batch axis."""
    yield f'name: "{name}"'
    yield 'backend: "onnxruntime"'
    yield f"max_batch_size: {max_rows}"
    for kind, entries in (("input", graph.input), ("output", graph.output)):
        for entry in entries:
            yield f"{kind} {{"
            yield f'  name: "{entry.name}"'
            yield f"  data_type: {_type(entry)}"
            sizes = [size.dim_value or -1 for size in entry.type.tensor_type.shape.dim]
            if max_rows and not sizes[1:]:
                # Triton gives a batch of scalars a second dimension, which the network does not have.
                yield "  dims: [ 1 ]"
                yield "  reshape: { shape: [ ] }"
            else:
                yield f"  dims: [ {', '.join(map(str, sizes[1 if max_rows else 0 :]))} ]"
            if kind == "output" and has_labels:
                yield '  label_filename: "labels.txt"'
            yield "}"
    if max_rows:
        yield "dynamic_batching { }"


def _type(entry: Any) -> str:
    import onnx

    name = onnx.TensorProto.DataType.Name(entry.type.tensor_type.elem_type)
    if name not in _TYPES:
        raise ExportError(f"Triton has no type for {entry.name!r}, which is {name}; cast it in the network")
    return _TYPES[name]
