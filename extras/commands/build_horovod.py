"""The command `ringspark build-horovod`: builds Horovod for the installed torch, and installs it.

Horovod 0.28.1 as published does not compile with torch 2.1 or later. `edit_sources` fixes this and two
bugs. The wheel is built once per version of Horovod, torch and Python, and kept in the user's cache.

`make setup` loads this file before any package is installed, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from ringspark.jobs import cli

DESCRIPTION = "Build Horovod for the installed torch, and install it."
VERSION = "0.28.1"
LABEL = "+iface.cycle"
"""Suffix of the version of a build with edited sources; `HorovodCollective` checks it."""

_CMAKE = (3, 13)
# Gloo's sources ask for policies that CMake 4 removed, so pip installs CMake 3.
_CMAKE_PACKAGE = "cmake>=3.13,<4"
_PROGRAM = """
#include <optional>
template <typename T> int size() { if constexpr (sizeof(T) > 1) return 2; else return 1; }
int main() { std::optional<int> answer = size<int>(); return *answer - 2; }
"""
_BUILD = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    # If the machine has CMake 4, this makes it accept Gloo's old policy version. CMake 3 ignores it.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}


def add_arguments(parser: cli.JobParser) -> None:
    parser.add_argument("--output", metavar="DIR", help="folder for a copy of the wheel, for other hosts")
    parser.add_argument("--no-install", action="store_true", help="only build the wheel")


def run(args: argparse.Namespace) -> None:
    """Builds and installs; raises ValueError if a tool is missing or the build fails."""
    log = _cache() / "horovod-build.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    build = Build(python=sys.executable, log=log)
    if not build.torch_version():
        raise ValueError("torch is not installed in this environment; pip install torch first")
    if not build.folder().exists() and (problem := compiler_problem()):
        raise ValueError(problem)
    try:
        wheel = build.wheel()
        if args.output:
            Path(args.output).mkdir(parents=True, exist_ok=True)
            wheel = Path(shutil.copy(wheel, args.output))
        print(f"wheel: {wheel}")
        if not args.no_install:
            # By force: the version does not say for which torch, and whether with NCCL, Horovod was built.
            build.install("")
    except HorovodError as error:
        raise ValueError(f"Horovod was not installed: {error}; see {log}") from error


class HorovodError(Exception):
    """Horovod could not be built or imported."""


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringspark"


def output_of(command: Sequence[str]) -> str | None:
    """Returns the output of a command (stdout and stderr), or None if it cannot run or fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def compiler_problem() -> str | None:
    """Returns a message if no C++17 compiler works, else None."""
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++"]
    found = [name for name in compilers if shutil.which(name)]
    if not found:
        return "A C++17 compiler is missing (Horovod is compiled with it): apt-get install g++"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "check.cc")
        source.write_text(_PROGRAM)
        command = ["-std=c++17", str(source), "-o", str(Path(folder, "check"))]
        if not any(output_of([name, *command]) is not None for name in found):
            return f"The C++ compiler {found[0]} does not compile C++17: apt-get install g++"
    return None


def cmake_on_path() -> str | None:
    """Returns the CMake to build with; None if there is none that is new enough."""
    cmake = os.environ.get("HOROVOD_CMAKE", "cmake")
    found = re.search(r"version (\d+)\.(\d+)", output_of([cmake, "--version"]) or "")
    return cmake if found and (int(found[1]), int(found[2])) >= _CMAKE else None


def edit_sources(sources: Path, torch: str) -> None:
    """Compiles Horovod by the C++ of torch's headers (horovod/horovod#3996), and fixes two bugs.

    This is C++17, from torch 2.14 on C++20.

    First, Gloo's global context ignores the configured interface. It binds to the address of the host name,
    which is a loopback address on Debian, so other hosts cannot connect. Second, if the cycle time and the
    fusion threshold are both set, the second start in a process writes past the end of a vector. On
    2026-11-27 neither bug was in Horovod's issue tracker.

    The edits also leave out debug symbols, which take a third of the compile time. Since torch 2.14,
    CUDA_HOME may be a folder of pip's packages without the compiler. If nvcc or the headers are missing
    there, Horovod is built without CUDA.

    Raises:
        HorovodError: A file does not contain the line to edit.
    """
    is_late = tuple(map(int, re.findall(r"\d+", torch)[:2])) >= (2, 14)
    standard = ("set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {20 if is_late else 17})")
    forgets = "auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;"
    mended = f"device_attr.iface = gloo_iface_ = global_context.gloo_iface_;\n  {forgets}"
    default = "else {\n    Eigen::VectorXd v = TunableParameter::BestValue();"
    guarded = default.replace("else", "else if (fixed_values_.find(variable) == fixed_values_.end())")
    exists = "__import__('os').path.exists(CUDA_HOME + '/{}')"
    has_toolkit = f"(CUDA_HOME and {exists.format('bin/nvcc')} and {exists.format('include/cuda_runtime.h')})"
    version = re.compile(r"__version__ = '([\d.]+)'")
    for name, old, new in (
        ("CMakeLists.txt", *standard),
        ("CMakeLists.txt", '"-O2" "-O3" CMAKE_CXX_FLAGS_REL', '"-O2 -g" "-O3" CMAKE_CXX_FLAGS_REL'),
        ("horovod/torch/CMakeLists.txt", *standard),
        ("cmake/Modules/FindPytorch.cmake", "(CUDA_HOME is not None)", has_toolkit),
        ("horovod/common/gloo/gloo_context.cc", forgets, mended),
        ("horovod/common/parameter_manager.cc", default, guarded),
        ("horovod/__init__.py", version, rf"__version__ = '\1{LABEL}'"),
    ):
        text = (sources / name).read_text()
        edited = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
        if edited == text:
            raise HorovodError(f"Horovod's file {name} does not contain the line to edit")
        (sources / name).write_text(edited)


# Not `kw_only`, so that `make setup` can say that Python 3.9 is too old.
@dataclass(frozen=True)
class Build:
    """Builds Horovod for the torch of one environment.

    Attributes:
        python: Path of the environment's Python.
        log: File for the build's output.
        version: Version of Horovod.
        cmake: Arguments of pip that install CMake if the machine has no suitable one.
        torch: Version of torch to assume if none is installed.
        say: Called with each line of progress.
    """

    python: str
    log: Path
    version: str = VERSION
    cmake: tuple[str, ...] = (_CMAKE_PACKAGE,)
    torch: str = ""
    say: Callable[[str], object] = print

    def torch_version(self) -> str:
        """Returns the installed version of torch; its local part, such as `+cpu`, counts too."""
        code = "import importlib.metadata as m; print(m.version('torch'), end='')"
        return output_of([self.python, "-c", code]) or self.torch

    def folder(self) -> Path:
        """Returns the cache folder of the wheel for these versions, this Python and these GPU operations."""
        operations = self._operations().lower()
        key = f"horovod-{self.version}{LABEL}-torch-{self.torch_version()}-cp{self._tag()}"
        return _cache() / "wheels" / (f"{key}-{operations}" if operations else key)

    def wheel(self) -> Path:
        """Returns the wheel, and builds it first if it is not in the cache.

        Raises HorovodError if the build fails.
        """
        folder = self.folder()
        if not list(folder.glob("*.whl")):
            self.say(f"building Horovod for torch {self.torch_version()}; this takes a few minutes")
            if self._operations() == "NCCL":
                self.say("Horovod is built with NCCL; HOROVOD_GPU_OPERATIONS='' builds it without")
            with self._phase("Horovod wheel built"):
                self._build(folder)
        wheels = list(folder.glob("*.whl"))
        if not wheels:
            raise HorovodError(f"the build left no wheel in {folder}")
        return wheels[0]

    def install(self, installed: str | None = None) -> str:
        """Installs the wheel and returns the name of its cache folder.

        Raises HorovodError if the build or the import fails.

        `installed`: name of the cache folder that the environment's Horovod came from, if known.
        """
        wheel, name = str(self.wheel()), self.folder().name
        with self._phase(f"Horovod {self.version}"):
            # pip compares only versions: a wheel that was built for another torch must be replaced by force.
            stale = installed is not None and installed != name
            for force in [True] if stale else [False, True]:
                options = ["--no-deps", *(["--force-reinstall"] if force else [])]
                done = self._run(self._pip("install", *options, wheel))
                if done.returncode == 0:
                    done = self._run([self.python, "-c", "import horovod.torch"])
                    if done.returncode == 0:
                        return name
        with self.log.open("a") as log:
            log.write(done.stdout)
        raise HorovodError(f"its wheel cannot be imported; delete {self.folder()} to build it again")

    def _build(self, folder: Path) -> None:
        """Builds the wheel into `folder`, which appears only when the build is complete."""
        scratch = tempfile.TemporaryDirectory(prefix="ringspark-horovod-")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            fresh = tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent)
        except OSError as error:
            raise HorovodError(
                f"no Horovod cache: {error}; set XDG_CACHE_HOME to a writable folder"
            ) from error
        with self.log.open("w") as log, scratch as name, fresh as built:

            def step(*words: str, env: dict[str, str] | None = None) -> None:
                command = self._pip(*words)
                log.write(f"$ {' '.join(command)}\n")
                log.flush()
                done = subprocess.run(
                    command, cwd=name, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
                if done.returncode != 0:
                    raise HorovodError(f"`pip {words[0]}` failed with exit code {done.returncode}")

            # Under `make`, its own flags would reach Horovod's build, which must run one job per core.
            env = {key: value for key, value in os.environ.items() if key not in ("MFLAGS", "MAKELEVEL")}
            env.update(_BUILD | self._gpu_settings, MAKEFLAGS=f"-j{os.cpu_count() or 1}")
            env["PATH"] = f"{Path(self.python).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
            if cmake_on_path() is None:
                step("install", "--target", f"{name}/cmake", *self.cmake)
                # pip's script `cmake` imports a package that is not on the path; this is the binary.
                env["HOROVOD_CMAKE"] = f"{name}/cmake/cmake/data/bin/cmake"
            if output_of([self.python, "-c", "import packaging, setuptools, wheel"]) is None:
                # Since Python 3.12, new virtual environments have no setuptools.
                step("install", "--target", f"{name}/tools", "packaging", "setuptools", "wheel")
                env["PYTHONPATH"] = f"{name}/tools"

            # Without build isolation: the build asks the installed torch for its headers and flags.
            source = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod"]
            step("download", *source, "--dest", name, f"horovod=={self.version}", env=env)
            (archive,) = Path(name).glob("horovod-*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(name)
            sources = Path(name, f"horovod-{self.version}")
            edit_sources(sources, self.torch_version())
            options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", f"{name}/wheel"]
            step("wheel", *options, str(sources), env=env)

            for wheel in Path(name, "wheel").glob("*.whl"):
                shutil.copy(wheel, built)
            os.chmod(built, 0o755)
            with contextlib.suppress(OSError):  # another process was first: take its wheel
                os.rename(built, folder)

    @cached_property
    def _gpu_settings(self) -> dict[str, str]:
        """Settings that build with NCCL; empty if nvcc, NCCL's headers or a torch with CUDA is missing.

        Without NCCL, gradients on GPUs would pass through host memory. If `HOROVOD_GPU_OPERATIONS` is set,
        even to an empty string, its value is used instead.
        """
        nvcc = shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '')}/bin") or shutil.which("nvcc")
        if nvcc is None or "HOROVOD_GPU_OPERATIONS" in os.environ:
            return {}
        if not (
            output_of([self.python, "-c", "import torch; print(torch.version.cuda or '')"]) or ""
        ).strip():
            return {}
        home = Path(nvcc).resolve().parent.parent
        places = [home, Path(os.environ.get("HOROVOD_NCCL_HOME", "/usr")), Path("/usr")]
        if not any(Path(place, "include", "nccl.h").exists() for place in places):
            self.say(
                "NCCL's headers are missing (apt-get install libnccl-dev): Horovod is built without NCCL"
            )
            return {}
        return {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": str(home)}

    def _operations(self) -> str:
        return (os.environ | self._gpu_settings).get("HOROVOD_GPU_OPERATIONS", "")

    def _tag(self) -> str:
        found = output_of([self.python, "-c", "import sys; print(*sys.version_info[:2])"])
        return "".join((found or "").split())

    def _pip(self, *arguments: str) -> list[str]:
        quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
        return [self.python, "-m", "pip", *quiet, *arguments]

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.say(f"{name} ({time.monotonic() - start:.1f} s)")
