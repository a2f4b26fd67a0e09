"""Exports to compiled networks: AOTInductor for servers, ExecuTorch for phones and small devices."""

from __future__ import annotations

import os
import shutil

import torch

from ringspark.estimators.inference.export import Export, ExportError


def write_aotinductor(export: Export, path: str) -> None:
    """Compiles the network to machine code of this host's processor.

    Load it by `torch._inductor.aoti_load_package(path)`.
    """
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ExportError("format 'aotinductor' needs a C++ compiler; install g++, or set CXX to one")
    from torch._inductor import aoti_compile_and_package

    # The function takes only this ending.
    package = f"{path}.compiled.pt2"
    with torch.no_grad():
        aoti_compile_and_package(export.trace(), package_path=package)
    os.replace(package, path)


def write_executorch(export: Export, path: str) -> None:
    """Writes a `.pte` file whose supported layers XNNPACK runs."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    lowered = to_edge_transform_and_lower(export.trace(), partitioner=[XnnpackPartitioner()])
    with open(path, "wb") as writer:
        lowered.to_executorch().write_to_file(writer)
