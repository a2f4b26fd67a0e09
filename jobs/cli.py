"""Shared code of the jobs: options, one-line errors, the Spark session, rows per second.

Spark is imported only when a job needs it, so `--help` and errors in options appear at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ringspark.estimators.environment import environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER = "local[2]"
_INTERRUPTED = 130
# Spark's generated code for a row of 60 columns exceeds Java's default limit for compilation.
_JAVA_OPTIONS = "-XX:-DontCompileHugeMethods"
_SUBMIT_OPTIONS = "SPARK_SUBMIT_OPTS"
# In a job of a minute, Java's thorough compiler takes more time than its code saves.
_SHORT_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1"


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


class JobParser(argparse.ArgumentParser):
    """Parses the options of a job.

    The help shows defaults; a wrong option prints one line and exits with code 2.
    """

    def __init__(self, prog: str | None = None, description: str | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(prog=prog, description=description, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def add_master(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--master",
        metavar="URL",
        help=f"Spark master; default: master of spark-submit or a running session, else {DEFAULT_MASTER}",
    )


def main(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None = None,
    *,
    refused: int = 1,
) -> int:
    """Parses the options, runs the job, and returns the exit code.

    The code is `refused` if the job cannot use its input: a ValueError, OSError or ImportError, which is
    printed as one line. Any other exception is a bug and keeps its traceback.
    """
    args = parser.parse_args(argv)
    try:
        run(args)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        # As in `ringspark runs list URI | head`. Python's flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _INTERRUPTED
    except KeyboardInterrupt:
        message, code = "interrupted", _INTERRUPTED
    except (ValueError, OSError, ImportError) as error:
        message, code = str(error), refused
    prog = getattr(args, "command_prog", parser.prog)
    print(f"{prog}: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def positive_int(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")


@contextlib.contextmanager
def spark(app_name: str, master: str | None = None, *, is_short: bool = False) -> Iterator[SparkSession]:
    """Yields a Spark session; stops it at the end, unless it was running before, as in a notebook.

    If `master` is None, spark-submit, SPARK_REMOTE or `DEFAULT_MASTER` determines it. `is_short` tunes a
    local session for about a minute of work.
    """
    running = _running_session()
    if running is not None:
        if master is not None:
            print(f"--master {master} has no effect: a Spark session is already running", file=sys.stderr)
        yield running
        return
    session = _start_session(app_name, master, is_short)
    try:
        yield session
    finally:
        session.stop()


def _start_session(app_name: str, master: str | None, is_short: bool) -> SparkSession:
    # spark-submit starts the JVM first and passes its port; its configuration has the master.
    if master is None and "PYSPARK_GATEWAY_PORT" not in os.environ and "SPARK_REMOTE" not in os.environ:
        master = DEFAULT_MASTER
    if master is not None and master.startswith("local"):
        # The JVM would look up the host's name, which containers often lack.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Repeated for each file if Spark is older than pandas; the pinned versions are tested together.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    # Executors must run this Python, not the first python3 on the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    builder, java_options = SparkSession.builder.appName(app_name), ""
    if master is not None and master.startswith("sc://"):
        return builder.remote(master).getOrCreate()
    if master is not None:
        builder = builder.master(master)
    if master is not None and master.startswith("local"):
        # One JVM holds driver and executors; 200 shuffle partitions would be 200 tiny tasks.
        builder = builder.config("spark.sql.shuffle.partitions", 8).config("spark.driver.memory", "3g")
        java_options = f"{_JAVA_OPTIONS} {_SHORT_JAVA_OPTIONS}" if is_short else _JAVA_OPTIONS
    builder = (
        builder.config("spark.ui.enabled", False)
        .config("spark.ui.showConsoleProgress", False)
        .config("spark.log.level", "ERROR")
        .config("spark.sql.execution.arrow.pyspark.enabled", True)
    )
    # Before the user's options, because Java uses the last one. Spark's own setting would replace the user's.
    options = f"{java_options} {os.environ.get(_SUBMIT_OPTIONS, '')}".strip()
    with environment({_SUBMIT_OPTIONS: options or None}):
        try:
            return builder.getOrCreate()
        except PySparkRuntimeError as error:
            raise OSError(f"Spark did not start: {error}; run `ringspark check`") from error


def print_rate(job: str, rows: int, seconds: float) -> None:
    print(f"{job}: {rows:,} rows in {seconds:.1f} s, {rows / max(seconds, 1e-9):,.0f} rows/s", flush=True)


def _running_session() -> SparkSession | None:
    if "pyspark" not in sys.modules:
        return None
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()
