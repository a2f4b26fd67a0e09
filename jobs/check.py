"""The command `ringspark check`: is this session or cluster ready to train?

It looks at versions, slots, packages of all executors, storage and GPUs, and trains a small network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ringspark.jobs import cli

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DESCRIPTION = "Check whether a Spark session or cluster is ready to train."
# Packages that must have the same version everywhere. The optional ones count if the driver has them.
_PACKAGES = ("torch", "numpy", "pandas", "pyarrow", "cloudpickle", "safetensors", "torchmetrics", "ringspark")
_OPTIONAL = ("horovod", "petastorm", "transformers", "pillow")
# Hadoop does not work with Java from this version on.
_TOO_NEW_JAVA = 24
_DRIVER_FILE = "driver"
_MAX_TASKS = 1_000


def add_arguments(parser: cli.JobParser) -> None:
    cli.add_master(parser)
    parser.add_argument(
        "--workers", type=cli.positive_int, default=2, metavar="N", help="workers to train with"
    )
    parser.add_argument("--storage-uri", metavar="URI", help="folder that driver and executors share")
    parser.add_argument("--gpu", action="store_true", help="check GPUs as well")


def run(args: argparse.Namespace) -> None:
    """Prints a line per check; raises ValueError if one found a problem."""
    found = _Findings()
    if args.master is None or args.master.startswith(("local", "spark://", "yarn", "k8s://")):
        _check_java_is_installed(found)
    if not found.problems:
        with cli.spark("ringspark check", args.master) as spark:
            _check_session(spark, args, found)
    if found.problems:
        some = "1 problem" if found.problems == 1 else f"{found.problems} problems"
        raise ValueError(f"{some}, see above")
    print("ready to train")


@dataclass
class _Findings:
    """Prints what each check found, and counts the problems."""

    problems: int = 0

    def ok(self, subject: str, text: str) -> None:
        self._print("ok", subject, text)

    def note(self, subject: str, text: str) -> None:
        self._print("-", subject, text)

    def problem(self, subject: str, text: str) -> None:
        self.problems += 1
        self._print("PROBLEM", subject, text)

    def _print(self, word: str, subject: str, text: str) -> None:
        print(f"{word:8} {subject:12} {' '.join(text.split())}", flush=True)


@dataclass(frozen=True)
class _Answer:
    """What one task of an executor said.

    `error` is why it cannot import ringspark, or cannot use the storage.
    """

    host: str
    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    import_error: str = ""
    storage_error: str = ""


def _check_java_is_installed(found: _Findings) -> None:
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else "java"
    if "PYSPARK_GATEWAY_PORT" not in os.environ and shutil.which(program) is None:
        where = f"JAVA_HOME ({home}) has no bin/java" if home else "java is not on the PATH"
        found.problem("Java", f"{where}; install Java 17 or 21, and set JAVA_HOME to its folder")


def _check_session(spark: SparkSession, args: argparse.Namespace, found: _Findings) -> None:
    import torch

    from ringspark.estimators.stages.session import spark_conf
    from ringspark.pipelines import storage
    from ringspark.pipelines.spark_paths import is_remote

    conf = spark_conf(spark)
    java = _java_version(spark)
    mode = " Connect" if is_remote(spark) else ""
    master = conf.get("spark.master", "unknown")
    text = f"Python {platform.python_version()}, Spark {spark.version}{mode}, Java {java}, master {master}"
    if int(java.partition(".")[0]) >= _TOO_NEW_JAVA:
        found.problem("versions", f"{text}; use Java 17 or 21, because Hadoop fails on later ones")
    else:
        found.ok("versions", f"{text}, torch {torch.__version__}")
    _check_slots(spark, conf, args, found)
    root = _check_driver_storage(spark, args.storage_uri, found)
    try:
        answers = _ask_executors(spark, args.workers, root, found)
        if answers:
            _check_packages(answers, found)
            if root is not None:
                _check_executor_storage(answers, root, found)
            if args.gpu:
                _check_gpus(answers, found)
    finally:
        if root is not None:
            storage.remove(root, recursive=True)
    _check_horovod(found)
    if not found.problems:
        _train(spark, args, found)


def _java_version(spark: SparkSession) -> str:
    # By SQL, because a Connect client has no JVM.
    row = spark.sql("SELECT java_method('java.lang.System', 'getProperty', 'java.version')").head()
    return str(row[0]) if row else "0"


def _check_slots(
    spark: SparkSession, conf: Mapping[str, str], args: argparse.Namespace, found: _Findings
) -> None:
    from ringspark.estimators.launch.slots import check_fixed_size, check_slots

    try:
        check_fixed_size(dict(conf))
        slots = check_slots(spark, args.workers, args.gpu)
    except ValueError as error:
        found.problem("slots", str(error))
        return
    if slots is None:
        found.note(
            "slots",
            f"the session does not say how many tasks run at the same time; {args.workers} are needed",
        )
    else:
        found.ok("slots", f"{slots} tasks run at the same time, {args.workers} are needed")


def _check_driver_storage(spark: SparkSession, uri: str | None, found: _Findings) -> str | None:
    """Returns a new folder in the storage, with a file of the driver; None if that fails."""
    from ringspark.estimators.stages.storage_root import storage_root
    from ringspark.pipelines import storage

    try:
        folder = storage.join(storage_root(spark, uri), f"check-{uuid.uuid4().hex}")
        storage.make_dirs(folder)
        storage.write_atomic(storage.join(folder, _DRIVER_FILE), folder.encode())
    except (ValueError, OSError) as error:
        found.problem("storage", str(error))
        return None
    return folder


def _ask_executors(
    spark: SparkSession, num_workers: int, folder: str | None, found: _Findings
) -> list[_Answer]:
    """Runs a task in every slot; returns what the tasks say."""
    from ringspark.estimators.launch.slots import check_fixed_size, count_slots
    from ringspark.estimators.stages.session import spark_conf
    from ringspark.pipelines.spark_errors import explain_worker_errors

    tasks, at_once = num_workers, False
    with contextlib.suppress(ValueError):
        check_fixed_size(spark_conf(spark))
        tasks, at_once = max(1, min(count_slots(spark) or num_workers, _MAX_TASKS)), True
    frame = spark.range(0, tasks, 1, tasks)
    try:
        with explain_worker_errors():
            # All at the same time, so that no executor answers twice and another one never.
            rows = frame.mapInArrow(_probe(folder, _DRIVER_FILE), "answer string", barrier=at_once).collect()
    except Exception as error:  # Spark's own, of any kind
        text = str(error).strip().partition("\n")[0]
        found.problem("executors", f"a task failed: {text[:500]}; use the driver's Python on every executor")
        return []
    answers = [_Answer(**json.loads(row.answer)) for row in rows]
    hosts = sorted({answer.host for answer in answers})
    some = ", ".join(hosts[:5]) + (", ..." if len(hosts) > 5 else "")
    found.ok(
        "executors",
        f"{len(answers)} tasks ran on {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}: {some}",
    )
    return answers


def _probe(folder: str | None, name: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns a function for a task. It is pickled by value, because an executor may lack ringspark."""
    packages = (*_PACKAGES, *_OPTIONAL)

    def answer(batches: Iterator[Any]) -> Iterator[Any]:
        import importlib.metadata
        import json
        import platform
        import socket
        import uuid

        import pyarrow as pa

        for _ in batches:
            pass
        said: dict[str, Any] = {"host": socket.gethostname(), "python": platform.python_version()}
        versions = {}
        for package in packages:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        said["versions"] = versions
        try:
            import torch

            from ringspark.pipelines import storage

            said["gpus"] = torch.cuda.device_count()
        except Exception as error:
            said["import_error"] = f"{type(error).__name__}: {error}"
        else:
            try:
                if folder is not None:
                    if storage.read_bytes(storage.join(folder, name)).decode() != folder:
                        raise OSError("it read another file than the driver wrote")
                    storage.write_atomic(storage.join(folder, f"task-{uuid.uuid4().hex}"), b"")
            except Exception as error:
                said["storage_error"] = f"{type(error).__name__}: {error}"
        yield pa.RecordBatch.from_pylist([{"answer": json.dumps(said)}])

    return answer


def _check_packages(answers: list[_Answer], found: _Findings) -> None:
    """Compares each executor's Python and packages with the driver's."""
    wanted = {"Python": platform.python_version(), **_versions()}
    differ: dict[str, None] = {}
    for answer in answers:
        if answer.import_error:
            differ[f"{answer.host} cannot import ringspark ({answer.import_error:.200})"] = None
        theirs = {"Python": answer.python, **answer.versions}
        for package, version in wanted.items():
            # `--py-files` ships ringspark without its metadata.
            if theirs.get(package) != version and not (package == "ringspark" and not answer.import_error):
                has = f"has {package} {theirs[package]}" if package in theirs else f"lacks {package}"
                differ[f"{answer.host} {has}, the driver has {version}"] = None
    if differ:
        found.problem(
            "packages",
            "; ".join(list(differ)[:5]) + "; install the same packages on every executor, or ship an "
            "environment by spark.archives (docs/install.md)",
        )
    else:
        found.ok(
            "packages",
            "the same on driver and executors: " + ", ".join(f"{k} {v}" for k, v in wanted.items()),
        )


def _versions() -> dict[str, str]:
    found = {}
    for package in (*_PACKAGES, *_OPTIONAL):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _check_executor_storage(answers: list[_Answer], folder: str, found: _Findings) -> None:
    from ringspark.pipelines import storage

    able = [answer for answer in answers if not answer.import_error]
    written = [name for name in storage.list_names(folder) if name != _DRIVER_FILE]
    errors = {f"{answer.host}: {answer.storage_error}": None for answer in able if answer.storage_error}
    where = folder.rpartition("/")[0]
    if not errors and len(written) < len(able):
        errors = {f"files that {len(able) - len(written)} tasks wrote are missing on the driver": None}
    if errors:
        found.problem(
            "storage",
            f"executors cannot use {where} ({'; '.join(list(errors)[:3])}); give a folder that driver and "
            "executors share, for example on HDFS, S3 or NFS, by storageUri",
        )
    else:
        found.ok("storage", f"driver and executors read and write {where}")


def _check_gpus(answers: list[_Answer], found: _Findings) -> None:
    lacking = sorted({answer.host for answer in answers if not answer.gpus})
    if lacking:
        found.problem(
            "GPUs",
            f"torch sees no GPU on {', '.join(lacking[:5])}; install a torch with CUDA there, or train "
            "without useGpu",
        )
    else:
        found.ok("GPUs", ", ".join(sorted({f"{answer.host} has {answer.gpus}" for answer in answers})))


def _check_horovod(found: _Findings) -> None:
    try:
        import horovod.torch  # noqa: F401
    except Exception as error:
        what = "not installed" if isinstance(error, ImportError) else f"broken ({error})"
        found.note(
            "Horovod",
            f"{what}; collective='torch' needs none, collective='horovod' a build (docs/install.md)",
        )
    else:
        found.ok("Horovod", f"{metadata.version('horovod')} on the driver")


def _train(spark: SparkSession, args: argparse.Namespace, found: _Findings) -> None:
    """Trains a small network, with everything that a real training needs."""
    from ringspark.estimators import TorchRegressor
    from ringspark.models import ModelSpec

    rows = spark.range(64 * args.workers).selectExpr("array(float(id)) AS x", "float(id) AS label")
    start = time.perf_counter()
    try:
        TorchRegressor(
            model=ModelSpec("linear", {"in_features": 1, "out_features": 1}),
            inputCols=["x"],
            labelCol="label",
            numWorkers=args.workers,
            useGpu=args.gpu,
            storageUri=args.storage_uri,
            epochs=1,
        ).fit(rows)
    except Exception as error:
        found.problem("training", " ".join(str(error).split())[:1000])
    else:
        some = "1 worker" if args.workers == 1 else f"{args.workers} workers"
        found.ok("training", f"{some} trained a small network in {time.perf_counter() - start:.1f} s")
