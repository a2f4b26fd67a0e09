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

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

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
        network.compile(mode=mode, dynamic=True)
    try:
        # In this thread, since a rank has its own core and torch's pool of compiling processes would outlive
        # it. Random numbers are drawn as without compilation, so that a training differs by rounding alone.
        with config.patch(compile_threads=1, fallback_random=True):
            yield
    except BackendCompilerFailed as error:
        reason = str(error.inner_exception).strip().partition("\n")[0]
        raise RuntimeError(
            f"compile failed on model {type(network).__name__}: {type(error.inner_exception).__name__}: "
            f"{reason}; set compile=False"
        ) from error
    finally:
        # A Python worker serves later trainings: each starts with its own count of compilations.
        torch._dynamo.reset()


def single_rows_eager(setting: bool | str, num_rows: int) -> AbstractContextManager[object]:
    """Returns the context of a pass, forward or backward, in which nothing is compiled for a single row."""
    return torch.compiler.set_stance("force_eager") if setting and num_rows == 1 else nullcontext()


def _check_compiler(device: torch.device) -> None:
    """Refuses a host without the compiler that torch needs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise RuntimeError(
            "compile needs a C++ compiler on every worker, and this one has none; install g++, name another "
            "one in the workers' environment variable CXX, or set compile=False"
        ) from error
    if device.type == "cuda" and not has_triton():
        raise RuntimeError(
            "compile needs Triton on workers with a GPU, and this one has none; pip install triton, or set "
            "compile=False"
        )
