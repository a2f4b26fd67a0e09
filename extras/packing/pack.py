"""Packs this environment, tests the archive, and prints the options of spark-submit."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.extras.packing.archive import newest_glibc, try_archive, write_archive
from ringspark.extras.packing.distributions import choose_distributions, list_files
from ringspark.extras.packing.interpreter import OF_THE_HOST, check_environment, copy_interpreter

# Spark recognizes an archive by its name.
SUFFIXES = (".tar.gz", ".tgz")
_LARGEST = 5
_CUDA = re.compile(r"nvidia-(?!ml-py)|triton$|cuda-")


def pack(output: Path, requirement: Path | None = None, exclude: Iterable[str] = ()) -> None:
    """Packs this Python environment into `output`, and trains one rank in the unpacked archive.

    Args:
        requirement: Requirements file; only its packages, ringspark and their dependencies are packed.
        exclude: Names of packages to leave out.

    Raises:
        ValueError: The environment cannot be packed, or the archive does not work.
    """
    _check_output(output)
    packages = choose_distributions(requirement, exclude)
    check_environment()
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    with tempfile.TemporaryDirectory(prefix="ringspark-pack-") as name:
        try:
            files = _collect(Path(name, "environment"), packages)
            glibc = newest_glibc(files.values())
            write_archive(partial, files)
            told = try_archive(partial, Path(name))
            os.replace(partial, output)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(f"cannot write the archive: {error}; free space, or set TMPDIR") from error
        finally:
            partial.unlink(missing_ok=True)
    others = {Path(file).name for file in told["outside"]}
    libraries = ["libstdc++", *sorted(name for name in others if not OF_THE_HOST.fullmatch(name))]
    versions = ", ".join(f"{name} {told[name.lower()]}" for name in ("Python", "torch", "pyarrow"))
    print(f"{output}: {show_bytes(output.stat().st_size)}; it trained one rank with {versions}")
    print(
        f"executors need {platform.system()} {platform.machine()}, glibc {glibc} or later, "
        f"{', '.join(libraries)}, tar and gzip; they need no Python"
    )
    print(_options(output))


def _check_output(output: Path) -> None:
    if not output.name.endswith(SUFFIXES):
        raise ValueError(f"--output must end in {' or '.join(SUFFIXES)}, got {output}")
    if output.exists():
        raise ValueError(f"{output} exists; remove it, or choose another --output")
    if not output.parent.is_dir():
        raise ValueError(f"--output: the folder {output.parent} does not exist; create it first")


def _collect(root: Path, packages: dict[str, Distribution]) -> dict[str, Path]:
    """Returns path in the archive -> file; copies the interpreter to `root`. Prints the sizes."""
    files: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    site = copy_interpreter(root)
    for name, package in packages.items():
        found = {(site / path).as_posix(): file for path, file in list_files(package).items()}
        sizes[name] = sum(file.stat().st_size for file in found.values())
        files |= found
    files |= {path.relative_to(root).as_posix(): path for path in root.rglob("*") if not path.is_dir()}
    total = sum(file.stat().st_size for file in files.values())
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_LARGEST]
    shown = ", ".join(f"{name} {show_bytes(sizes[name])}" for name in largest)
    print(f"packing Python and {len(packages)} packages, {show_bytes(total)}: {shown}, ...", flush=True)
    print("--requirement and --exclude leave out packages", flush=True)
    cuda = sum(size for name, size in sizes.items() if _CUDA.match(name))
    if cuda:
        print(
            f"{show_bytes(cuda)} are libraries for GPUs; for executors without GPUs, pack an environment "
            "with a CPU build of torch, which has none of them",
            flush=True,
        )
    # The test of the archive unpacks it.
    if shutil.disk_usage(root).free < total:
        raise ValueError(f"the test of the archive needs {show_bytes(total)} in {root.parent}; set TMPDIR")
    return files


def _options(output: Path) -> str:
    python = "--conf spark.pyspark.python=./environment/bin/python"
    return f"""
Client mode, on every cluster manager; the driver runs this environment:
  spark-submit --archives {output}#environment {python} \\
    --conf spark.pyspark.driver.python={sys.executable} app.py
A session that a Python program starts; set the variables before the program imports pyspark:
  export PYSPARK_PYTHON=./environment/bin/python PYSPARK_DRIVER_PYTHON={sys.executable}
  SparkSession.builder.config("spark.archives", "{output}#environment")
Cluster mode on YARN; the driver unpacks the archive too:
  spark-submit --master yarn --deploy-mode cluster --archives {output}#environment {python} app.py
Cluster mode on Kubernetes; copy the archive to a store that the pods can read:
  spark-submit --deploy-mode cluster --archives s3a://BUCKET/{output.name}#environment {python} app.py"""
