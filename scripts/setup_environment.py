"""Builds the development environment `.venv` and the layers on top of it. A second run changes nothing.

`.venv` has the newest version of every package. A layer has only the packages that differ, and imports all
others, such as torch and Horovod, from `.venv`:

- `.venv-floor` (--floor): the oldest Spark, Arrow, NumPy, pandas and Petastorm that ringspark supports.
- `.venv-peers-*` (--peers): the libraries that `make bench-peers` compares ringspark with.

The script needs only the standard library of the Python that the Makefile finds. It checks the machine
(Python, Java, a C++17 compiler, CMake), installs the packages pinned in `requirements/`, and builds Horovod
from edited sources, with NCCL if CUDA is installed. The wheel is built once per version of Horovod, torch
and Python, and all checkouts share it in the user's cache.

Invariant: the stamp is written last, so it exists only after every phase has passed with the inputs
whose hash it holds; an interrupted run has no current stamp and is simply run again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pipelines", "models", "estimators", "extras", "jobs")

# The pins of `.venv-floor` have wheels for this Python, and not for every later one.
PYTHON = (3, 11)
# Spark 4 runs on Java 17 and 21; from 24 on Hadoop's use of the security manager fails.
JAVA = (17, 21)
CMAKE = (3, 13)

CPP_PROGRAM = """
#include <optional>
template <typename T> int size() { if constexpr (sizeof(T) > 1) return 2; else return 1; }
int main() { std::optional<int> answer = size<int>(); return *answer - 2; }
"""

HOROVOD_BUILD = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    # CMake 4 refuses the old policy version of the Gloo sources without this; older ones ignore it.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}


@dataclass(frozen=True)
class Environment:
    """One virtual environment of this checkout."""

    name: str
    files: tuple[str, ...]  # of `requirements/`, that decide what it holds

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.folder / ".ringspark-setup"

    @property
    def packages(self) -> Path:
        return self.folder / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"

    @property
    def requirements(self) -> list[Path]:
        return [ROOT / "requirements" / file for file in self.files]


MAIN = Environment(".venv", ("lock.txt", "no_deps.txt", "horovod.txt", "cmake.txt"))
FLOOR = Environment(".venv-floor", ("floor.txt", *MAIN.files))
PEERS = tuple(
    Environment(f".venv-peers-{name}", (f"peers_{name}.txt", *MAIN.files)) for name in ("horovod", "xgboost")
)
LOCK, NO_DEPS, _, CMAKE_PIN = (str(file) for file in MAIN.requirements)
# In the version of a build that `edit_horovod_sources` has mended, by which the package knows it.
HOROVOD_LABEL = "+iface.cycle"
BUILD_LOG = MAIN.folder / "horovod-build.log"


class SetupError(Exception):
    """Ends the set-up: its text is what the user reads, one sentence a line."""


class HorovodError(Exception):
    """Horovod could not be built or imported; the rest of the environment stands."""


# ------------------------------------------------------------------------------ the machine


def output_of(command: Sequence[str]) -> str | None:
    """Returns what a command prints (both streams), or None where it cannot run or fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def python_problem() -> str | None:
    """Names a wrong Python, or one that cannot make environments or compile extensions."""
    have = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] != PYTHON:
        return f"Python 3.11 is missing (this is {have}): apt-get install python3.11 python3.11-venv"
    try:
        import ensurepip  # noqa: F401  Debian ships it apart from Python itself
    except ImportError:
        return "Python's venv module is missing: apt-get install python3.11-venv"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's C headers (Python.h) are missing: apt-get install python3.11-dev"
    return None


def java_problem() -> str | None:
    """Names a Java that is missing, that Spark does not run on, or that lacks the vector module."""
    install = "apt-get install openjdk-17-jre-headless"
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    found = re.search(r'version "(\d+)(?:\.(\d+))?', output_of([java, "-version"]) or "")
    if not found:
        where = f" (JAVA_HOME is {home})" if home else ""
        return f"Java 17 or 21 is missing{where}: {install}"
    major = int(found[2] or 0) if found[1] == "1" else int(found[1])  # "1.8.0_392" is Java 8
    if not JAVA[0] <= major <= JAVA[1]:
        return f"Java 17 or 21 is missing (this is Java {major}): {install}"
    # Spark starts its JVM with this module; some trimmed-down runtimes lack it and die at start-up.
    if output_of([java, "--add-modules", "jdk.incubator.vector", "-version"]) is None:
        return f"Java's module jdk.incubator.vector is missing, which Spark 4 needs: {install}"
    return None


def compiler_problem() -> str | None:
    """Names a C++ compiler that is missing or that does not compile C++17."""
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++"]
    found = [name for name in compilers if shutil.which(name)]
    if not found:
        return "A C++17 compiler is missing (Horovod is compiled with it): apt-get install g++"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "check.cc")
        source.write_text(CPP_PROGRAM)
        command = ["-std=c++17", str(source), "-o", str(Path(folder, "check"))]
        if not any(output_of([name, *command]) is not None for name in found):
            return f"The C++ compiler {found[0]} does not compile C++17: apt-get install g++"
    return None


def cmake_on_path() -> str | None:
    """Returns the CMake to build with, or None where there is none that is new enough."""
    cmake = os.environ.get("HOROVOD_CMAKE", "cmake")
    found = re.search(r"version (\d+)\.(\d+)", output_of([cmake, "--version"]) or "")
    return cmake if found and (int(found[1]), int(found[2])) >= CMAKE else None


def check_machine() -> None:
    """Checks every tool.

    Raises:
        SetupError: something is missing; one sentence for each, with the Debian package.
    """
    problems = [problem for problem in (python_problem(), java_problem(), compiler_problem()) if problem]
    if problems:
        raise SetupError("\n".join(problems))
    if cmake_on_path() is None:
        say("cmake 3.13 or newer is missing (apt-get install cmake): the Horovod build takes pip's")


# ------------------------------------------------------------------------------ what is there


def pip(*arguments: str) -> list[str]:
    """Returns the command line of `.venv`'s pip."""
    return [str(MAIN.python), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]


def pin(name: str) -> str:
    """Returns the version of a package that the requirements of `.venv` pin."""
    for file in MAIN.requirements:
        found = re.search(rf"^{re.escape(name)}==(\S+)", file.read_text(), flags=re.MULTILINE)
        if found:
            return found[1]
    raise SetupError(f"requirements/ holds no pin for {name}")


def inputs_hash(environment: Environment) -> str:
    """Hashes all that decides what the environment holds, its own path and Python included."""
    digest = hashlib.sha256(f"{environment.folder} {sys.version_info[:3]}".encode())
    for file in [*environment.requirements, ROOT / "pyproject.toml", Path(__file__)]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def read_stamp(environment: Environment) -> dict[str, str]:
    """Returns the stamp of the last run that came to its end; empty where there is none."""
    try:
        stamp = json.loads(environment.stamp.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(environment: Environment, stamp: dict[str, str]) -> None:
    """Writes the stamp in one step."""
    fresh = environment.stamp.with_suffix(".new")
    fresh.write_text(json.dumps(stamp, indent=1))
    fresh.replace(environment.stamp)


def wheel_folder(horovod: str, torch: str, operations: str) -> Path:
    """Returns the cache folder of the Horovod wheel for these versions and this Python.

    Args:
        horovod: Version of Horovod.
        torch: Installed version of torch; its local part (`+cpu`) counts, as the binary differs.
        operations: What its operations on GPUs are built with, see `gpu_settings`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = f"horovod-{horovod}{HOROVOD_LABEL}-torch-{torch}-cp{PYTHON[0]}{PYTHON[1]}"
    return cache / "ringspark" / "wheels" / (f"{key}-{operations.lower()}" if operations else key)


def gpu_settings() -> dict[str, str]:
    """Returns the settings that build Horovod with NCCL, if CUDA, NCCL and a torch with CUDA are installed.

    Otherwise gradients on GPUs would travel through the hosts' memory. `HOROVOD_GPU_OPERATIONS`, also an
    empty one, decides if it is set.
    """
    nvcc = shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '')}/bin") or shutil.which("nvcc")
    if nvcc is None or "HOROVOD_GPU_OPERATIONS" in os.environ:
        return {}
    if not (
        output_of([str(MAIN.python), "-c", "import torch; print(torch.version.cuda or '')"]) or ""
    ).strip():
        return {}
    home = Path(nvcc).resolve().parent.parent
    places = [home, Path(os.environ.get("HOROVOD_NCCL_HOME", "/usr")), Path("/usr")]
    if not any(Path(place, "include", "nccl.h").exists() for place in places):
        say("NCCL's headers are missing (apt-get install libnccl-dev): Horovod is built without NCCL")
        return {}
    return {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": str(home)}


# ------------------------------------------------------------------------------ phases


def say(text: str) -> None:
    """Prints one line at once, also into a pipe."""
    print(f"set-up: {text}", flush=True)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Prints what was done and how many seconds it took."""
    start = time.monotonic()
    yield
    say(f"{name} ({time.monotonic() - start:.1f} s)")


def run(command: Sequence[str]) -> None:
    """Runs a command quietly.

    Raises:
        SetupError: it failed; carries the last lines it printed.
    """
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise SetupError(f"{tail}\n{' '.join(command[1:])} failed; run the set-up again once that is mended")


def make_venv(environment: Environment) -> None:
    """Makes the environment where there is none with a working Python of the right version."""
    version = output_of([str(environment.python), "-c", "import sys; print(*sys.version_info[:2])"])
    if version is not None and version.split() == [str(part) for part in PYTHON]:
        # pip writes RECORD last. A package without it was cut off half-way, and pip would take it
        # for installed; without its metadata pip installs it again, over what is there.
        for metadata in environment.folder.glob("lib/python*/site-packages/*.dist-info"):
            if not (metadata / "RECORD").exists():
                shutil.rmtree(metadata)
        return
    with phase(f"virtual environment {environment.name}"):
        # A layer with its own pip and setuptools would not use the versions of `.venv`.
        without = [] if environment is MAIN else ["--without-pip"]
        run([sys.executable, "-m", "venv", "--clear", *without, str(environment.folder)])


def link_packages() -> None:
    """Makes `.dev/ringspark`, the layout that mypy and editors read (they see no import hooks)."""
    tree = ROOT / ".dev" / "ringspark"
    tree.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if not (tree / package).exists():
            (tree / package).unlink(missing_ok=True)
            (tree / package).symlink_to(Path("..", "..", package))


def edit_horovod_sources(sources: Path) -> None:
    """Moves Horovod to C++17, which torch's headers need, and mends two faults.

    The connection of the global process set ignores the configured interface and binds to the address of
    the host's name, which is a loopback address on Debian, so other hosts cannot reach it. If both the cycle
    time and the fusion threshold are set, a second start in one process writes past the end of a vector.

    Raises:
        HorovodError: a file does not hold the line that the edit is about.
    """
    standard = ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)")
    forgets = "auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;"
    mended = f"device_attr.iface = gloo_iface_ = global_context.gloo_iface_;\n  {forgets}"
    default = "else {\n    Eigen::VectorXd v = TunableParameter::BestValue();"
    guarded = default.replace("else", "else if (fixed_values_.find(variable) == fixed_values_.end())")
    version = re.compile(r"__version__ = '([\d.]+)'")
    for name, old, new in (
        ("CMakeLists.txt", *standard),
        ("horovod/torch/CMakeLists.txt", *standard),
        ("horovod/common/gloo/gloo_context.cc", forgets, mended),
        ("horovod/common/parameter_manager.cc", default, guarded),
        ("horovod/__init__.py", version, rf"__version__ = '\1{HOROVOD_LABEL}'"),
    ):
        text = (sources / name).read_text()
        edited = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
        if edited == text:
            raise HorovodError(f"{name} of its sources is not as expected")
        (sources / name).write_text(edited)


def build_horovod(version: str, folder: Path, settings: dict[str, str]) -> None:
    """Builds the wheel of Horovod into its cache folder, which appears only when it is whole.

    Args:
        settings: Of `gpu_settings`.

    Raises:
        HorovodError: a step of the build failed; the log holds what it printed.
    """
    scratch = tempfile.TemporaryDirectory(prefix="ringspark-horovod-")
    with BUILD_LOG.open("w") as log, scratch as name:

        def step(command: Sequence[str], env: dict[str, str] | None = None) -> None:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            done = subprocess.run(
                command, cwd=name, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            if done.returncode != 0:
                raise HorovodError(f"{' '.join(command[1:3])} exited with {done.returncode}")

        # make hands its own flags on to what it starts; Horovod's are to be one job a core.
        env = {key: value for key, value in os.environ.items() if key not in ("MFLAGS", "MAKELEVEL")}
        env.update(HOROVOD_BUILD | settings, MAKEFLAGS=f"-j{os.cpu_count() or 1}")
        env["PATH"] = f"{MAIN.python.parent}{os.pathsep}{env.get('PATH', os.defpath)}"
        if cmake_on_path() is None:
            step(pip("install", "--target", f"{name}/cmake", "-r", CMAKE_PIN))
            # The package's own script needs it importable; this is the binary behind the script.
            env["HOROVOD_CMAKE"] = f"{name}/cmake/cmake/data/bin/cmake"

        # Without build isolation: only Horovod is to come as source, not what builds it, and the
        # build asks the installed torch for its headers and flags.
        source = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod"]
        step(pip("download", *source, "--dest", name, f"horovod=={version}"))
        (archive,) = Path(name).glob("horovod-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(name)
        sources = Path(name, f"horovod-{version}")
        edit_horovod_sources(sources)
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", f"{name}/wheel"]
        step(pip("wheel", *options, str(sources)), env)

        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = tempfile.mkdtemp(prefix=".new-", dir=folder.parent)
        try:
            for wheel in Path(name, "wheel").glob("*.whl"):
                shutil.copy(wheel, fresh)
            os.chmod(fresh, 0o755)
            with contextlib.suppress(OSError):  # another checkout was first: take its wheel
                os.rename(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def install_horovod(installed: str | None) -> str:
    """Installs Horovod from the cache, after building it into the cache where it is not there.

    Args:
        installed: Name of the cache folder that the environment's Horovod came from, if known.

    Returns:
        The name of the cache folder.

    Raises:
        HorovodError: it could not be built, or cannot be imported.
    """
    python = str(MAIN.python)
    torch = output_of([python, "-c", "import importlib.metadata as m; print(m.version('torch'), end='')"])
    version = pin("horovod")
    settings = gpu_settings()
    operations = (os.environ | settings).get("HOROVOD_GPU_OPERATIONS", "")
    folder = wheel_folder(version, torch or pin("torch"), operations)
    if not list(folder.glob("*.whl")):
        with_nccl = " with NCCL (HOROVOD_GPU_OPERATIONS= builds it without)" if operations == "NCCL" else ""
        say(f"building Horovod{with_nccl} once for this torch, a few minutes ...")
        with phase("Horovod wheel built"):
            build_horovod(version, folder, settings)
    wheels = [str(wheel) for wheel in folder.glob("*.whl")]
    if not wheels:
        raise HorovodError(f"the build left no wheel in {folder}")
    with phase(f"Horovod {version}"):
        # pip sees only the version: a wheel built for another torch has to be put in by force.
        stale = installed is not None and installed != folder.name
        for force in [True] if stale else [False, True]:
            options = ["--no-deps", *(["--force-reinstall"] if force else [])]
            run(pip("install", *options, *wheels))
            imported = subprocess.run(
                [python, "-c", "import horovod.torch"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if imported.returncode == 0:
                return folder.name
    with BUILD_LOG.open("a") as log:
        log.write(imported.stdout)
    raise HorovodError(f"its wheel cannot be imported, delete {folder} to build it again")


def report_horovod(reason: str) -> int:
    """Says in one line that Horovod is not there and what serves instead.

    Returns:
        The exit status: an error only where the environment demands Horovod.
    """
    where = f"({reason}; log: {BUILD_LOG})"
    say(f"Horovod could not be installed {where}; collective='torch' serves instead")
    return 1 if horovod_required() else 0


def horovod_required() -> bool:
    """Says whether a missing Horovod is an error here."""
    return os.environ.get("RINGSPARK_REQUIRE_HOROVOD", "0") not in ("", "0")


def install_pinned() -> None:
    """Installs what the requirements pin, and ringspark itself; all but Horovod."""
    torch = pin("torch")
    with phase(f"torch {torch}"):
        run(pip("install", f"torch=={torch}", "--constraint", LOCK))
    with phase("pinned requirements"):
        run(pip("install", "--requirement", LOCK))
    with phase("petastorm and MLflow"):
        run(pip("install", "--no-deps", "-r", NO_DEPS))
    remove_strays()
    with phase("ringspark itself, editable"):
        run(pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)))


def remove_strays() -> None:
    """Uninstalls what the requirements do not name, so that no test runs with what a clean set-up lacks."""
    # A name with "~" is what pip was replacing when it was cut off.
    pins = "".join(file.read_text() for file in MAIN.requirements)
    pinned = {canonical(name) for name in re.findall(r"^([\w.-]+)==", pins, flags=re.MULTILINE)}
    installed = {
        canonical(metadata.name.partition("-")[0]) for metadata in MAIN.packages.glob("[!~]*.dist-info")
    }
    if strays := sorted(installed - pinned - {"pip", "setuptools", "ringspark"}):
        with phase(f"removed, as nothing pins it: {', '.join(strays)}"):
            run(pip("uninstall", "--yes", *strays))


def canonical(package: str) -> str:
    """Returns the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", package).lower()


def is_current(environment: Environment, inputs: str) -> bool:
    """Says whether the last run that came to its end had these inputs."""
    return read_stamp(environment).get("inputs") == inputs and os.access(environment.python, os.X_OK)


def set_up() -> int:
    """Brings `.venv` to what its inputs ask for; returns the exit status."""
    link_packages()
    inputs, stamp = inputs_hash(MAIN), read_stamp(MAIN)
    current = is_current(MAIN, inputs)
    failure = stamp.get("horovod_failure")
    if current and not failure:
        say(f"{MAIN.name} is up to date")
        return 0
    if current and failure and not horovod_required():
        return report_horovod(failure)

    check_machine()
    make_venv(MAIN)
    MAIN.stamp.unlink(missing_ok=True)
    if not current:
        install_pinned()

    status, stamp = 0, {"inputs": inputs, "horovod": stamp.get("horovod", "")}
    try:
        stamp["horovod"] = install_horovod(stamp["horovod"] or None)
    except HorovodError as error:
        stamp["horovod_failure"] = str(error)
        status = report_horovod(str(error))
    write_stamp(MAIN, stamp)
    return status


def set_up_layer(environment: Environment) -> None:
    """Brings an environment on top of `.venv` to what its inputs ask for; `.venv` stands."""
    inputs = inputs_hash(environment)
    if is_current(environment, inputs):
        say(f"{environment.name} is up to date")
        return
    make_venv(environment)
    environment.stamp.unlink(missing_ok=True)
    link = environment.packages / "base.pth"
    link.unlink(missing_ok=True)  # pip is to see the layer's own packages only
    with phase(f"packages of {environment.name} that differ from {MAIN.name}"):
        own = str(environment.requirements[0])
        run(pip("--python", str(environment.python), "install", "--no-deps", "--requirement", own))
    # addsitedir also reads the .pth files there, such as ringspark's; a plain path would not.
    link.write_text(f"import site; site.addsitedir({str(MAIN.packages)!r})\n")
    write_stamp(environment, {"inputs": inputs})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the development environment.")
    parser.add_argument("--floor", action="store_true", help=f"build {FLOOR.name} too")
    names = " and ".join(environment.name for environment in PEERS)
    parser.add_argument("--peers", action="store_true", help=f"build {FLOOR.name}, {names} too")
    parser.add_argument("--check", action="store_true", help="check the machine's tools, install nothing")
    options = parser.parse_args(arguments)
    try:
        if options.check:
            check_machine()
            return 0
        lock = ROOT / ".dev" / "setup.lock"
        lock.parent.mkdir(exist_ok=True)
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # two `make`s in one checkout: the second finds it done
            status = set_up()
            layers = (FLOOR, *PEERS) if options.peers else (FLOOR,) if options.floor else ()
            for layer in layers if status == 0 else ():
                set_up_layer(layer)
            return status
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; run it again to finish", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
