"""The command `ringspark check`: is this session or cluster ready to train?

It looks at versions, slots, packages of all executors, storage and GPUs, and trains a small network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ringspark.jobs import cli

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DESCRIPTION = "Check whether a Spark session or cluster is ready to train."
# Packages whose versions are compared, if the driver has them. A training uses Horovod and Petastorm if the
# driver has them.
_PACKAGES = (
    *("torch", "numpy", "pandas", "pyarrow", "cloudpickle", "safetensors", "torchmetrics", "ringspark"),
    *("horovod", "petastorm"),
)
# Only some trainings import these, so an executor may lack them.
_SELDOM = ("transformers", "pillow")
_DRIVER_FILE = "driver"
_MAX_TASKS = 1_000
# Executors are all there if their number stays the same for so long.
_STEADY_SECONDS = 4.0
_CAUSE = re.compile(r"(?:\w+(?:Error|Exception)|\[[A-Z_.]+\])[: ].*")


def add_arguments(parser: cli.JobParser) -> None:
    cli.add_master(parser)
    parser.add_argument(
        "--workers", type=cli.positive_int, default=2, metavar="N", help="workers to train with"
    )
    parser.add_argument("--storage-uri", metavar="URI", help="folder that driver and executors share")
    parser.add_argument("--gpu", action="store_true", help="check GPUs as well, and train on them")


def run(args: argparse.Namespace) -> None:
    """Prints a line per check; raises ValueError if one found a problem."""
    found = _Findings()
    with contextlib.ExitStack() as stack:
        try:
            _check_reachable(args.master or os.environ.get("SPARK_REMOTE", ""))
            spark = stack.enter_context(cli.spark("ringspark check", args.master))
        except ConnectionError as error:
            found.problem("session", f"{error}; check --master")
        except Exception as error:  # Java's and Spark's, of any kind
            found.problem("session", f"Spark does not start: {_cause(error)}; {_java_advice()}")
        else:
            _check_session(spark, args, found)
    if found.problems:
        some = "1 problem" if found.problems == 1 else f"{found.problems} problems"
        raise ValueError(f"{some}, see above")
    print("ready to train")


@dataclass
class _Findings:
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
    """Result of one probe task.

    `import_error` says why it could not import torch and ringspark, `storage_error` why it could not use the
    storage; both are empty on success. `file` is the URI of a file that it wrote.
    """

    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    import_error: str = ""
    storage_error: str = ""
    file: str = ""


def _cause(error: Exception) -> str:
    """Returns the line of an error's text that names the cause: Spark puts others around it."""
    lines = [found[0] for line in str(error).splitlines() if (found := _CAUSE.search(line))]
    return (lines or [str(error).strip().partition("\n")[0]])[-1][:500]


def _check_reachable(master: str) -> None:
    """Raises ConnectionError if no server listens at the address, because Spark would try for minutes."""
    scheme, _, rest = master.partition("://")
    if scheme not in ("spark", "sc"):
        return
    problem = None
    for address in re.split("[/;]", rest)[0].split(","):
        host, _, port = address.rpartition(":") if ":" in address else (address, "", "15002")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            return
        except OSError as error:
            problem = ConnectionError(f"no Spark server answers at {address} ({error})")
    if problem is not None:
        raise problem


def _java_advice() -> str:
    home = os.environ.get("JAVA_HOME")
    if shutil.which(os.path.join(home, "bin", "java") if home else "java") is None:
        where = f"JAVA_HOME ({home}) has no bin/java" if home else "java is not on the PATH"
        return f"{where}: install Java 17 or 21, and set JAVA_HOME to its folder"
    return "check --master, and that `java -version` shows 17 or 21"


def _check_session(spark: SparkSession, args: argparse.Namespace, found: _Findings) -> None:
    import torch

    from ringspark.estimators.stages.session import spark_conf
    from ringspark.pipelines.folder_removal import remove_folder
    from ringspark.pipelines.spark_paths import is_remote

    conf = spark_conf(spark)
    java = "Connect" if is_remote(spark) else f"Java {_java_version(spark)}"
    found.ok(
        "versions",
        f"Python {platform.python_version()}, torch {torch.__version__}, Spark {spark.version}, {java}, "
        f"master {conf.get('spark.master', 'unknown')}",
    )
    tasks = _check_slots(spark, conf, args, found)
    if tasks == 0:
        return
    folder = _check_driver_storage(spark, args.storage_uri, found)
    try:
        answers = _ask_executors(spark, tasks or args.workers, tasks is not None, folder, found)
        if answers:
            _check_packages(answers, found)
            if folder is not None:
                _check_executor_storage(answers, folder, found)
            if args.gpu:
                _check_gpus(answers, found)
        _check_horovod(found)
        if not found.problems and folder is not None:
            _train(spark, args, folder, found)
    finally:
        if folder is not None:
            remove_folder(folder, ".+", _DRIVER_FILE, lambda content: content == folder.encode())


def _java_version(spark: SparkSession) -> str:
    context: Any = spark.sparkContext
    return str(context._jvm.java.lang.System.getProperty("java.version"))


def _check_slots(
    spark: SparkSession, conf: dict[str, str], args: argparse.Namespace, found: _Findings
) -> int | None:
    """Returns how many tasks can run at the same time; None if that is unknown, or is not constant."""
    from ringspark.estimators.launch.slots import check_slots, is_dynamic

    # Dynamic allocation adds executors only while tasks wait for them.
    slots = None if is_dynamic(conf) else _settled_slots(spark, conf, args.gpu)
    if slots == 0:
        found.problem(
            "slots",
            "no executor has registered; look at the cluster manager's page: it may be full, or a worker too "
            "small for spark.executor.memory and spark.executor.cores",
        )
        return 0
    try:
        check_slots(spark, args.workers, args.gpu)
    except ValueError as error:
        found.problem("slots", str(error))
    else:
        known = "an unknown number of task slots" if slots is None else f"task slots: {slots}"
        known = "dynamic allocation" if is_dynamic(conf) else known
        found.ok("slots", f"{known}, needed: {args.workers}")
    return slots


def _settled_slots(spark: SparkSession, conf: dict[str, str], use_gpu: bool) -> int | None:
    """Returns the number of task slots after executors have had time to register."""
    from ringspark.estimators.launch.slots import REGISTRATION_SECONDS, count_slots
    from ringspark.pipelines.spark_paths import is_local

    slots = count_slots(spark, use_gpu)
    deadline = time.monotonic() + REGISTRATION_SECONDS
    steady_since = time.monotonic()
    while slots is not None and not is_local(conf) and time.monotonic() < deadline:
        time.sleep(0.2)
        now = count_slots(spark, use_gpu)
        if now != slots or not now:
            slots, steady_since = now, time.monotonic()
        elif time.monotonic() - steady_since > _STEADY_SECONDS:
            break
    return slots


def _check_driver_storage(spark: SparkSession, uri: str | None, found: _Findings) -> str | None:
    """Returns a new folder in the storage, with a file of the driver; None if that fails."""
    from ringspark.estimators.stages.storage_root import storage_root
    from ringspark.pipelines import storage
    from ringspark.pipelines.folder_removal import discard

    try:
        root = storage_root(spark, uri)
    except (ValueError, OSError) as error:
        found.problem("storage", str(error).replace("storageUri is not set", "--storage-uri is not set"))
        return None
    folder = storage.join(root, f"check-{uuid.uuid4().hex}")
    try:
        storage.make_dirs(folder)
        storage.write_atomic(storage.join(folder, _DRIVER_FILE), folder.encode())
    except OSError as error:
        found.problem("storage", f"the driver cannot write into {root}: {error}; give another --storage-uri")
        discard(folder, ".+")
        return None
    return folder


def _ask_executors(
    spark: SparkSession, tasks: int, at_once: bool, folder: str | None, found: _Findings
) -> list[_Answer]:
    """Runs probe tasks and returns their answers.

    `at_once`: whether to run them as a barrier stage, so that one executor cannot run the tasks one after
    another while another executor gets none.
    """
    from ringspark.pipelines.local_python import choose_python
    from ringspark.pipelines.spark_errors import explain_worker_errors

    choose_python(spark)
    tasks = min(tasks, _MAX_TASKS)
    frame = spark.range(0, tasks, 1, tasks)
    try:
        with explain_worker_errors():
            rows = frame.mapInArrow(_probe(folder, _DRIVER_FILE), "answer string", barrier=at_once).collect()
    except Exception as error:  # Spark's own, of any kind
        text = str(error)
        advice = "; use the driver's Python on every executor" if "PYTHON_VERSION_MISMATCH" in text else ""
        found.problem("executors", f"a task failed: {_cause(error)}{advice}")
        return []
    answers = [_Answer(**json.loads(row.answer)) for row in rows]
    hosts = sorted({answer.host for answer in answers})
    some = ", ".join(hosts[:5]) + (", ..." if len(hosts) > 5 else "")
    found.ok("executors", f"tasks run: {len(answers)}, hosts: {len(hosts)} ({some})")
    return answers


def _probe(folder: str | None, name: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns a function for a task. It is pickled by value, because an executor may lack ringspark."""
    packages = (*_PACKAGES, *_SELDOM)

    def answer(batches: Iterator[Any]) -> Iterator[Any]:
        import importlib.metadata
        import json
        import platform
        import socket
        import uuid

        import pyarrow as pa

        for _ in batches:
            pass
        versions = {"Python": platform.python_version()}
        for package in packages:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        said: dict[str, Any] = {"host": socket.gethostname(), "versions": versions}
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
                    said["file"] = storage.join(folder, f"task-{uuid.uuid4().hex}")
                    storage.write_atomic(said["file"], b"")
            except Exception as error:
                said["storage_error"] = f"{type(error).__name__}: {error}"
        yield pa.RecordBatch.from_pylist([{"answer": json.dumps(said)}])

    return answer


def _check_packages(answers: list[_Answer], found: _Findings) -> None:
    wanted = _ask_driver().versions
    differ: dict[str, None] = {}
    for answer in answers:
        if answer.import_error:
            differ[f"{answer.host} cannot import torch and ringspark ({answer.import_error:.200})"] = None
        theirs = answer.versions
        for package, version in wanted.items():
            # `--py-files` ships ringspark without its metadata, so its version may be unknown.
            may_lack = package in _SELDOM or (package == "ringspark" and not answer.import_error)
            if package not in theirs:
                if not may_lack:
                    differ[f"{answer.host} lacks {package}, the driver has {version}"] = None
            elif _comparable(package, theirs[package]) != _comparable(package, version):
                differ[f"{answer.host} has {package} {theirs[package]}, the driver has {version}"] = None
    if differ:
        found.problem(
            "packages",
            "; ".join(list(differ)[:5]) + "; install the same packages on every executor, or ship an "
            "environment with `ringspark pack` (docs/install.md)",
        )
    else:
        shown = ", ".join(f"{package} {version}" for package, version in wanted.items())
        found.ok("packages", f"the same on driver and executors: {shown}")


def _comparable(package: str, version: str) -> str:
    # Spark compares the first two parts of Python's version, and a driver may have a torch without CUDA.
    return ".".join(version.split(".")[:2]) if package == "Python" else version.partition("+")[0]


def _ask_driver() -> _Answer:
    (batch,) = _probe(None, "")(iter(()))
    return _Answer(**json.loads(batch.to_pylist()[0]["answer"]))


def _check_executor_storage(answers: list[_Answer], folder: str, found: _Findings) -> None:
    from ringspark.pipelines import storage

    where = folder.rpartition("/")[0]
    errors = [f"{answer.host}: {answer.storage_error}" for answer in answers if answer.storage_error]
    errors += [
        f"the driver does not find a file that {answer.host} wrote"
        for answer in answers
        if answer.file and not answer.storage_error and not storage.exists(answer.file)
    ]
    if errors:
        found.problem(
            "storage",
            f"executors cannot use {where} ({'; '.join(list(dict.fromkeys(errors))[:3])}); give "
            "--storage-uri (storageUri in `fit`) a folder that driver and executors share, for example on "
            "HDFS, S3 or NFS",
        )
    elif any(answer.file for answer in answers):
        found.ok("storage", f"driver and executors read and write {where}")


def _check_gpus(answers: list[_Answer], found: _Findings) -> None:
    able = [answer for answer in answers if not answer.import_error]
    lacking = sorted({answer.host for answer in able if not answer.gpus})
    if lacking:
        found.problem(
            "GPUs",
            f"torch sees no GPU on {', '.join(lacking[:5])}; install a torch with CUDA there, or do without "
            "--gpu (useGpu in `fit`)",
        )
    elif able:
        found.ok("GPUs", ", ".join(sorted({f"torch sees {a.gpus} on {a.host}" for a in able})))


def _check_horovod(found: _Findings) -> None:
    if find_spec("horovod") is None:
        found.note("Horovod", "not installed; collective='torch' does without (`ringspark build-horovod`)")
        return
    try:
        import horovod.torch  # noqa: F401
    except Exception as error:
        found.problem(
            "Horovod",
            f"installed, but cannot be imported ({_cause(error)}); run `ringspark build-horovod`, or "
            "uninstall it",
        )
    else:
        found.ok("Horovod", f"{metadata.version('horovod')} on the driver")


def _train(spark: SparkSession, args: argparse.Namespace, folder: str, found: _Findings) -> None:
    """Trains a small network by a normal `fit`: shards, a barrier stage, all-reduce and storage."""
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
            storageUri=folder,
            epochs=1,
            showProgress=False,
        ).fit(rows)
    except Exception as error:
        found.problem("training", str(error)[:1000])
    else:
        seconds = time.perf_counter() - start
        found.ok("training", f"a small network in {seconds:.1f} s, workers: {args.workers}")
