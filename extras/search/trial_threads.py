"""Threads that train concurrently, each with its own Spark jobs, and a driver that waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pyspark import InheritableThread
from pyspark.sql import SparkSession

from ringspark.pipelines.spark_paths import is_remote

POLL_SECONDS = 0.1


def run_in_threads(
    spark: SparkSession,
    work: Callable[[], None],
    number: int,
    *,
    watch: Callable[[], None],
    end: Callable[[BaseException], None],
) -> None:
    """Runs `work`, which must not raise, in threads until all have ended, even after an error or interrupt.

    Args:
        watch: Called every `POLL_SECONDS` in the calling thread.
        end: Receives an error of the calling thread, such as a KeyboardInterrupt, and makes `work` return
            soon.
    """
    kind = threading.Thread if is_remote(spark) else InheritableThread
    threads = [kind(target=work, name=f"ringspark-search-{i}", daemon=True) for i in range(number)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        while any(thread.is_alive() for thread in threads):
            watch()
            time.sleep(POLL_SECONDS)
    except BaseException as error:
        end(error)
        raise
    finally:
        for thread in started:
            while thread.is_alive():
                thread.join(1.0)
