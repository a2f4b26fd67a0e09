"""Exports to compiled networks: AOTInductor for servers, ExecuTorch for phones and small devices."""

from __future__ import annotations

import os
import shutil

import torch

from ringspark.extras.export.export import Export, ExportError
from ringspark.models.process_state import silence_thread


def write_aotinductor(export: Export, path: str) -> None:
    """Compiles the network to machine code of this host's processor.

    Load it by `torch._inductor.aoti_load_package(path)`.
    """
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ExportError("format 'aotinductor' needs a C++ compiler; install g++, or set CXX to one")
    from torch._inductor import aoti_compile_and_package

    # aoti_compile_and_package accepts only paths that end in .pt2.
    package = f"{path}.compiled.pt2"
    with torch.no_grad(), silence_thread():
        aoti_compile_and_package(export.trace(), package_path=package)
    os.replace(package, path)


def write_executorch(export: Export, path: str) -> None:
    """Writes a `.pte` file that takes at most as many rows as one forward pass of `transform`.

    XNNPACK runs the layers that it supports.
    """
    with silence_thread():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        # ExecuTorch reserves the memory of the largest batch.
        program = export.trace_portable(export.stage._rows_per_pass())
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    with open(path, "wb") as writer:
        lowered.write_to_file(writer)
