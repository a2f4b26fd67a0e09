"""Trains a network compiled by `torch.compile` (Ansel et al. 2024, "PyTorch 2").

Only the network's calls are compiled. The network is not wrapped, so gradient synchronization, checkpoints
and callbacks work unchanged. Collectives between sharded layers run uncompiled, between the compiled graphs.
"""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from ringspark.estimators.environment import environment
from ringspark.estimators.parallel.layout import layout_of
from ringspark.models.activation_checkpoint import compile_segments
from ringspark.models.module_hooks import replace_forward


@contextmanager
def compile_network(network: nn.Module, setting: bool | str, device: torch.device) -> Iterator[None]:
    """Compiles calls of `network` inside the context; `setting` is `TrainConfig.compile`."""
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
        # In this thread, because a rank has its own core, and torch's pool of compiling processes would
        # outlive it. Random numbers as without compilation, so that results differ only by rounding.
        with (
            _use_own_code_folder(),
            _keep_collectives(network),
            config.patch(compile_threads=1, fallback_random=True),
        ):
            yield
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        raise RuntimeError(
            f"compile failed on model {type(network).__name__}: {type(inner).__name__}: {_reason(inner)}; "
            "set compile=False"
        ) from error
    finally:
        network._compiled_call_impl = None
        # A Python worker serves later trainings; each starts with its own count of compilations.
        torch._dynamo.reset()


@contextmanager
def _keep_collectives(network: nn.Module) -> Iterator[None]:
    """Lets compiled code of a sharded network call collectives as plain Python."""
    layout = layout_of(network)
    # Not as decorators, which would import the compiler into every training.
    with ExitStack() as stack:
        for owner, name in () if layout is None else layout.uncompiled:
            function = getattr(owner, name)
            setattr(owner, name, torch.compiler.disable(function))  # type: ignore[no-untyped-call]
            stack.callback(setattr, owner, name, function)
        yield


def skip_single_rows(setting: bool | str, num_rows: int) -> AbstractContextManager[object]:
    """Returns a context in which a single row runs uncompiled, because torch would compile again."""
    return torch.compiler.set_stance("force_eager") if setting and num_rows == 1 else nullcontext()


def _compile_calls(network: nn.Module, mode: str | None) -> None:
    """Lets calls of the network run its compiled `forward`, and its hooks uncompiled.

    `nn.Module.compile` compiles none of torch's own classes, such as `nn.Sequential`.
    """
    forward = torch.compile(network.forward, mode=mode, dynamic=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        with replace_forward(network, forward):
            return network._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    network._compiled_call_impl = call


def _reason(error: Exception) -> str:
    output = getattr(error, "output", None)
    lines = [line.strip() for line in str(output or error).splitlines() if line.strip()]
    return " ".join(lines[-4:] if output else lines[:1])


def _check_compiler(device: torch.device) -> None:
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


@contextmanager
def _use_own_code_folder() -> Iterator[None]:
    """Lets torch and Triton cache compiled code in this user's folder, unless the user names one.

    torch's default is a folder under /tmp that anyone can create first, and a process loads code from it.
    """
    from torch._inductor import codecache, config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from torch._inductor.utils import clear_caches

    default = default_cache_dir()
    places = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    # torch itself writes its default into the environment.
    named, triton = (place if place and not place.startswith(default) else None for place in places.values())
    with ExitStack() as stack:
        folder = named or _make_user_folder()
        if folder is None:
            folder = stack.enter_context(
                TemporaryDirectory(prefix="ringspark-compiled-", ignore_cleanup_errors=True)
            )
            # The process must not remember files that will be removed.
            stack.callback(clear_caches)
            stack.enter_context(config.patch(cpp_cache_precompile_headers=False))
        # The headers' folder is a constant of torch that the environment does not change.
        codecache._HEADER_DIR = os.path.join(folder, "precompiled_headers")
        codecache._HEADER_LOCK_DIR = os.path.join(folder, "precompiled_headers", "locks")
        # An earlier training's headers may have been removed since.
        codecache._precompile_header.cache_clear()
        variables = dict(zip(places, (folder, triton or os.path.join(folder, "triton")), strict=True))
        stack.enter_context(environment(variables))
        yield


def _make_user_folder() -> str | None:
    """Makes a folder per host in the user's cache; returns None unless only this user can change it."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve()
        folder = cache / "ringspark" / f"compiled-{platform.node()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = folder.lstat()
        parents = [parent.lstat() for parent in folder.parents]
    except (OSError, RuntimeError):
        return None
    private = stat.S_ISDIR(own.st_mode) and own.st_uid == os.getuid() and not own.st_mode & 0o077
    # Whoever can rename a parent could put another folder in its place.
    kept = all(
        parent.st_uid in (0, os.getuid())
        and (not parent.st_mode & stat.S_IWOTH or parent.st_mode & stat.S_ISVTX)
        for parent in parents
    )
    return str(folder) if private and kept and os.access(folder, os.W_OK) else None
