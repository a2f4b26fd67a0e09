"""Trains a network compiled by `torch.compile` (Ansel et al. 2024, "PyTorch 2"), on the rank that trains it.

Only calls are compiled, in place: the network stays the same object with the same names, so the exchange of
gradients, checkpoints and callbacks see no wrapper. Batches differ by a few rows between steps and ranks, so
the number of rows is a variable of the compiled code, which is made once for training and, if rows are held
out, once for evaluation. A single row runs uncompiled (`single_rows_eager`), as torch would compile for it
anew.

With gradient checkpointing each recomputed module is compiled by itself: a segment must see its modules'
calls to run them again.
"""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ringspark.estimators.training.compiled_code import own_code_folder
from ringspark.models.recompute.activation_checkpoint import compile_segments


@contextmanager
def compiled(network: nn.Module, setting: bool | str, device: torch.device) -> Iterator[None]:
    """Has calls of `network` compiled inside the context.

    Args:
        setting: Value of `TrainConfig.compile`.

    Raises:
        RuntimeError: This host has no compiler for the device, or torch cannot compile the network.
    """
    if not setting:
        yield
        return
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor import config

    _check_compiler(device)
    mode = None if setting is True else str(setting)
    if not compile_segments(network, mode):
        _compile_calls(network, mode)
    try:
        # In this thread, since a rank has its own core and torch's pool of compiling processes would outlive
        # it. Random numbers are drawn as without compilation, so that a training differs by rounding alone.
        with own_code_folder(), config.patch(compile_threads=1, fallback_random=True):
            yield
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        raise RuntimeError(
            f"compile failed on model {type(network).__name__}: {type(inner).__name__}: {_reason(inner)}; "
            "set compile=False"
        ) from error
    finally:
        network._compiled_call_impl = None
        # A Python worker serves later trainings: each starts with its own count of compilations.
        torch._dynamo.reset()


def single_rows_eager(setting: bool | str, num_rows: int) -> AbstractContextManager[object]:
    """Returns the context of a pass, forward or backward, in which nothing is compiled for a single row."""
    return torch.compiler.set_stance("force_eager") if setting and num_rows == 1 else nullcontext()


def _compile_calls(network: nn.Module, mode: str | None) -> None:
    """Has calls of the network run its compiled `forward`, and its hooks as they are.

    `nn.Module.compile` compiles nothing of torch's own classes, such as an `nn.Sequential`, since there torch
    skips frames of its own files. The compiled `forward` is an attribute of the network only while a call
    runs, so copies and pickles of the network hold none.
    """
    forward = torch.compile(network.forward, mode=mode, dynamic=True)
    own = {name: value for name, value in vars(network).items() if name == "forward"}

    def call(*args: Any, **kwargs: Any) -> Any:
        vars(network)["forward"] = forward
        try:
            return network._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            vars(network).pop("forward", None)
            vars(network).update(own)

    network._compiled_call_impl = call


def _reason(error: Exception) -> str:
    """Returns the end of what the C++ compiler printed, or another message's first line."""
    output = getattr(error, "output", None)
    lines = [line.strip() for line in str(output or error).splitlines() if line.strip()]
    return " ".join(lines[-4:] if output else lines[:1])


def _check_compiler(device: torch.device) -> None:
    """Refuses a host without the compiler and the headers that torch needs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise RuntimeError(
            "compile needs a C++ compiler on every worker, and this one has none; install g++, name another "
            "one in the workers' environment variable CXX, or set compile=False"
        ) from error
    found = subprocess.run(
        [compiler, "-fsyntax-only", "-x", "c++", "-I", sysconfig.get_path("include"), "-"],
        input="#include <Python.h>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise RuntimeError(
            f"compile needs Python's headers on every worker, and {compiler} does not find them on this one; "
            f"install Python's development package, or set compile=False: {found.stderr.strip()[-500:]}"
        )
    if device.type == "cuda" and not has_triton():
        raise RuntimeError(
            "compile needs Triton on workers with a GPU, and this one has none; pip install triton, or set "
            "compile=False"
        )
