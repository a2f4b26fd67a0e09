"""Lets Spark's Python workers on a local master run by the driver's own Python."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringspark.pipelines.spark_paths import is_local, is_remote

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What PySpark starts if nobody has chosen a Python.
_DEFAULT = "python3"

_logger = logging.getLogger(__name__)


def choose_python(spark: SparkSession) -> None:
    """Sets the Python of later workers to the driver's, if nobody has chosen one on a local master.

    Notebooks and services often start without the environment's folder on PATH. Then `python3` is another
    Python, without ringspark.
    """
    if is_remote(spark):
        return
    context: Any = spark.sparkContext
    own, found = sys.executable, shutil.which(_DEFAULT)
    is_chosen = "PYSPARK_PYTHON" in os.environ or context.pythonExec != _DEFAULT
    if is_chosen or not is_local({"spark.master": context.master}):
        return
    # Under uwsgi, the executable is the server.
    if not Path(own or "").name.startswith("python") or (found and Path(found).parent == Path(own).parent):
        return
    context.pythonExec = own
    _logger.warning("Spark's Python workers now run with %s; set PYSPARK_PYTHON to choose another", own)
