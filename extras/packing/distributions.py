"""Finds the files of installed packages, and of ringspark if it is installed from a checkout."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import ringspark

OURS = "ringspark"
# Executors take pyspark and py4j from their Spark; pyspark's jars are 400 MB.
LEFT_OUT = ("pip", "pyspark", "py4j")
# `fit` uses them by default if the driver has them.
_DEFAULTS = ("horovod", "petastorm")
# They name files and folders of this machine, or list files that are left out.
_NOT_PACKED = ("direct_url.json", "RECORD", "REQUESTED")


def choose_distributions(requirement: Path | None, exclude: Iterable[str]) -> dict[str, Distribution]:
    """Returns the installed packages to pack, by name.

    Raises ValueError for an unknown name, and for a version that is not installed.
    """
    installed: dict[str, Distribution] = {}
    for found in distributions():
        # Python imports the first of two packages with one name.
        installed.setdefault(canonicalize_name(found.name), found)
    # A build leaves an egg-info folder in a checkout of ringspark, without the list of its files.
    own = [found for found in distributions(name=OURS) if found.read_text("RECORD") is not None]
    if own:
        installed[OURS] = own[0]
    left_out = {canonicalize_name(name) for name in exclude}
    if unknown := sorted(left_out - set(installed)):
        raise ValueError(f"--exclude {unknown[0]}: no such package is installed; see pip list")
    if OURS in left_out or OURS not in installed:
        raise ValueError("the archive needs ringspark: install it by pip, and do not exclude it")
    chosen = set(installed) if requirement is None else _with_dependencies(_read(requirement), installed)
    return {name: installed[name] for name in sorted(chosen - left_out - set(LEFT_OUT))}


def list_files(package: Distribution) -> dict[str, Path]:
    """Returns the package's files: path in site-packages -> file here.

    Leaves out compiled Python, test modules, and commands, because commands name this machine's Python.
    """
    editable = json.loads(package.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable")
    name = canonicalize_name(package.name)
    if editable and name == OURS:
        metadata = {path: file for path, file in _recorded(package) if "dist-info" in path}
        return _checkout_files() | metadata
    if editable:
        raise ValueError(f"{name} is installed in editable mode: install it without -e, or --exclude {name}")
    if package.read_text("RECORD") is None:
        raise ValueError(f"{name} has no list of its files, because pip did not install it; --exclude {name}")
    return dict(_recorded(package))


def is_packed(path: PurePosixPath) -> bool:
    if "__pycache__" in path.parts or path.suffix == ".pyc":
        return False
    # Other files in test folders are kept, because some packages import them.
    is_test = path.name.startswith("test_") or path.stem.endswith("_test")
    return not (is_test and {"test", "tests", "bin"}.intersection(path.parts[:-1]))


def _recorded(package: Distribution) -> Iterator[tuple[str, Path]]:
    for path in package.files or ():
        file = Path(str(package.locate_file(path)))
        if ".." not in path.parts and path.name not in _NOT_PACKED and is_packed(path) and file.is_file():
            yield path.as_posix(), file


def _checkout_files() -> dict[str, Path]:
    """Returns the files of a ringspark whose packages lie in a checkout."""
    package = Path(str(ringspark.__file__)).parent
    files = {f"{OURS}/{file.name}": file for file in package.iterdir() if file.is_file()}
    rooms = [module for module in pkgutil.iter_modules(ringspark.__path__) if module.name != OURS]
    for room in rooms:
        parent = Path(room.module_finder.path)  # type: ignore[union-attr]
        for file in (parent / room.name).rglob("*") if room.ispkg else ():
            path = PurePosixPath(OURS, file.relative_to(parent).as_posix())
            if file.is_file() and is_packed(path):
                files[str(path)] = file
    return files


def _read(requirement: Path) -> list[Requirement]:
    """Returns the packages that a requirements file names."""
    lines = [line.partition(" #")[0].strip() for line in requirement.read_text().splitlines()]
    found = []
    for line in (line for line in lines if line and not line.startswith("#")):
        try:
            found.append(Requirement(line))
        except InvalidRequirement:
            raise ValueError(f"{requirement}: {line!r} does not name a package, such as pillow>=9") from None
    return found


def _with_dependencies(wanted: list[Requirement], installed: dict[str, Distribution]) -> set[str]:
    for item in wanted:
        have = installed.get(canonicalize_name(item.name))
        if have is None:
            raise ValueError(f"{item.name} is not installed here; pip install '{item}'")
        if not item.specifier.contains(have.version, prereleases=True):
            raise ValueError(f"{have.version} of {item.name} is installed, not {item}; pip install '{item}'")
    chosen: set[str] = set()
    seen: set[tuple[str, str]] = set()
    to_visit = [Requirement(OURS), *map(Requirement, _DEFAULTS), *wanted]
    while to_visit:
        item = to_visit.pop()
        name = canonicalize_name(item.name)
        for extra in ("", *item.extras):
            if name not in installed or (name, extra) in seen:
                continue
            seen.add((name, extra))
            chosen.add(name)
            needed = map(Requirement, installed[name].requires or ())
            to_visit += [n for n in needed if n.marker is None or n.marker.evaluate({"extra": extra})]
    return chosen
