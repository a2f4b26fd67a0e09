"""Builds the development environment `.venv` and the layers on top of it. A second run changes nothing.

`.venv` has the newest version of every package. A layer has only the packages that differ, and imports all
others, such as torch and Horovod, from `.venv`:

- `.venv-floor` (--floor): the oldest Spark, Arrow, NumPy and pandas that ringspark supports.
- `.venv-peers-*` (--peers): the libraries that `make bench-peers` compares ringspark with.
- `.venv-frameworks` (--frameworks): JAX and TensorFlow, for the scripts in tests/frameworks.

The script needs only the standard library of the Python that the Makefile finds. It checks the machine
(Python, Java, a C++ compiler, CMake), installs the packages pinned in `requirements/`, and builds Horovod
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
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("pipelines", "models", "estimators", "extras", "jobs")

# The pins of `.venv-floor` have wheels for this Python, and not for every later one.
PYTHON = (3, 11)
# Spark 4 runs on Java 17 and 21; from 24 on Hadoop's use of the security manager fails.
JAVA = (17, 21)


def _load_horovod_build() -> Any:
    """Returns extras/commands/build_horovod.py as a module, because the package is not installed yet."""
    spec = importlib.util.spec_from_file_location("build_horovod", HOROVOD_BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


ROOT = Path(__file__).resolve().parent.parent
HOROVOD_BUILD = ROOT / "extras" / "commands" / "build_horovod.py"
horovod = _load_horovod_build()
output_of = horovod.output_of


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
FRAMEWORKS = Environment(".venv-frameworks", ("frameworks.txt", *MAIN.files))
PEERS = tuple(
    Environment(f".venv-peers-{name}", (f"peers_{name}.txt", *MAIN.files)) for name in ("horovod", "xgboost")
)
# What torch or Horovod's setup.py imports.
BUILD_PACKAGES = ("numpy", "packaging", "setuptools", "wheel")
LOCK, NO_DEPS, _, CMAKE_PIN = (str(file) for file in MAIN.requirements)
BUILD_LOG = MAIN.folder / "horovod-build.log"


class SetupError(Exception):
    """Ends the set-up: its text is what the user reads, one sentence a line."""


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


def check_machine() -> None:
    """Raises SetupError with a sentence for each tool that is missing, with its Debian package."""
    problems = [python_problem(), java_problem(), horovod.compiler_problem()]
    if any(problems):
        raise SetupError("\n".join(filter(None, problems)))
    if horovod.cmake_on_path() is None:
        say("cmake 3.13 or newer is missing (apt-get install cmake): the Horovod build takes pip's")


def pip(*arguments: str) -> list[str]:
    """Returns the command line of `.venv`'s pip."""
    return [str(MAIN.python), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]


def install(*arguments: str, to: Environment | None = None) -> None:
    """Installs packages with `.venv`'s pip, into another environment with `to`."""
    where = [] if to is None else ["--python", str(to.python)]
    # Python compiles a module at its first import; most modules are never imported.
    run(pip(*where, "install", *arguments, "--no-compile"))


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
    for file in [*environment.requirements, ROOT / "pyproject.toml", HOROVOD_BUILD, Path(__file__)]:
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
    """Runs a command quietly; raises SetupError with its last lines if it fails."""
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
    files = [Path("ringspark", path.name) for path in (ROOT / "ringspark").glob("*.py")]
    for link in tree.iterdir():
        if not link.exists():  # of a file that was moved or removed
            link.unlink()
    for target in (*map(Path, PACKAGES), *files):
        if not (tree / target.name).exists():
            (tree / target.name).symlink_to(Path("..", "..", target))


def report_horovod(reason: str) -> int:
    """Prints that Horovod is not installed; returns the exit status, which depends on the environment."""
    say(f"Horovod could not be installed ({reason}; log: {BUILD_LOG}); collective='torch' serves instead")
    return 1 if horovod_required() else 0


def horovod_required() -> bool:
    """Says whether a missing Horovod is an error here."""
    return os.environ.get("RINGSPARK_REQUIRE_HOROVOD", "0") not in ("", "0")


def install_torch() -> None:
    """Installs torch, and what the build of Horovod imports: later steps do not change these packages."""
    torch = pin("torch")
    with phase(f"torch {torch}"):
        install(f"torch=={torch}", *BUILD_PACKAGES, "--constraint", LOCK)


def install_pinned() -> None:
    """Installs what the requirements pin, and ringspark itself; all but Horovod."""
    with phase("pinned requirements"):
        install("--requirement", LOCK)
    with phase("MLflow"):
        install("--no-deps", "-r", NO_DEPS)
    remove_strays()
    with phase("ringspark itself, editable"):
        install("--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def remove_strays() -> None:
    """Uninstalls what no pinned package requires, so that no test runs with what a clean set-up lacks."""
    sys.path.append(str(MAIN.packages))  # for `packaging`, which install_torch has installed
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    # A name with "~" is what pip was replacing when it was cut off.
    installed = {
        canonicalize_name(folder.name.partition("-")[0]): importlib.metadata.Distribution.at(folder)
        for folder in MAIN.packages.glob("[!~]*.dist-info")
    }
    pins = "".join(file.read_text() for file in MAIN.requirements)
    pinned = (*re.findall(r"^([\w.-]+)==", pins, flags=re.MULTILINE), "pip", "setuptools", "ringspark")
    needed: set[tuple[str, str]] = set()
    todo = [(canonicalize_name(name), "") for name in pinned]  # with an extra
    while todo:
        name, extra = todo.pop()
        if name not in installed or (name, extra) in needed:
            continue
        needed.add((name, extra))
        for requirement in map(Requirement, installed[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(requirement.name), part) for part in ("", *requirement.extras)]
    if strays := sorted(installed.keys() - {name for name, _ in needed}):
        with phase(f"removed, as no pinned package requires it: {', '.join(strays)}"):
            run(pip("uninstall", "--yes", *strays))


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
        install_torch()
    build = horovod.Build(
        python=str(MAIN.python),
        log=BUILD_LOG,
        version=pin("horovod"),
        cmake=("-r", CMAKE_PIN),
        torch=pin("torch"),
        say=say,
    )
    status, stamp = 0, {"inputs": inputs, "horovod": stamp.get("horovod", "")}
    # The compiler works while pip downloads and unpacks the other packages.
    with ThreadPoolExecutor(1) as pool:
        wheel = pool.submit(build.wheel)
        if not current:
            install_pinned()
    try:
        wheel.result()
        stamp["horovod"] = build.install(stamp["horovod"] or None)
    except horovod.HorovodError as error:
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
        install("--no-deps", "--requirement", own, to=environment)
    # addsitedir also reads the .pth files there, such as ringspark's; a plain path would not.
    link.write_text(f"import site; site.addsitedir({str(MAIN.packages)!r})\n")
    write_stamp(environment, {"inputs": inputs})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the development environment.")
    parser.add_argument("--floor", action="store_true", help=f"build {FLOOR.name} too")
    names = " and ".join(environment.name for environment in PEERS)
    parser.add_argument("--peers", action="store_true", help=f"build {FLOOR.name}, {names} too")
    parser.add_argument("--frameworks", action="store_true", help=f"build {FRAMEWORKS.name} too")
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
            layers += (FRAMEWORKS,) if options.frameworks else ()
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
