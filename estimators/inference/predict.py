"""Batched inference as a Spark SQL expression, for batch and streaming.

The weights stay on the store. A Python worker maps them once for consecutive tasks, and the workers of a host
share the pages. A GPU holds the weights for one task only, because other tasks need the memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, Iterator, Tuple, TypeVar  # noqa: UP035 (arrow_udf reads these hints)

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators.columns.feeds import make_inputs, unread_error
from ringspark.estimators.environment import count_cores
from ringspark.estimators.inference import pandas_batches
from ringspark.estimators.inference.predictor import Predictor
from ringspark.estimators.training.feed import Array
from ringspark.models.process_state import release_gpu

# Bytes of inputs and outputs that are predicted at a time, at least one forward pass. Spark 3.5 limits its
# batches only by rows, and outputs may be wider than inputs.
CHUNK_BYTES = 64 << 20
KEEP_SECONDS = 60.0
# A pipeline has a few models, but a worker of a CrossValidator switches between many.
MAX_MODULES = 4

T = TypeVar("T")


class ModuleCache(Generic[T]):
    """At most `MAX_MODULES` modules, each released `keep_seconds` after its last use.

    A Python worker runs the tasks of many jobs and would otherwise keep gigabytes of unused models.
    """

    def __init__(self, keep_seconds: float = KEEP_SECONDS) -> None:
        self.keep_seconds = keep_seconds
        # Key -> (module, time of its last use), the least recently used first.
        self._known: dict[Hashable, tuple[T, float]] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def get(self, key: Hashable, load: Callable[[], T]) -> T:
        with self._lock:
            found = self._known.pop(key, None)
            while found is None and len(self._known) >= MAX_MODULES:
                self._known.pop(next(iter(self._known)))
            module = load() if found is None else found[0]
            self._known[key] = module, time.monotonic()
            self._set_timer()
        return module

    def clear(self) -> None:
        with self._lock:
            self._known.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def __len__(self) -> int:
        return len(self._known)

    def _set_timer(self) -> None:
        # for the next module to be released; the lock is held
        if self._timer is None and self._known:
            _, used = next(iter(self._known.values()))
            wait = max(0.0, used + self.keep_seconds - time.monotonic())
            self._timer = threading.Timer(wait, self._release)
            self._timer.daemon = True  # the end of the process does not wait for it
            self._timer.start()

    def _release(self) -> None:
        with self._lock:
            self._timer = None
            oldest = time.monotonic() - self.keep_seconds
            self._known = {key: known for key, known in self._known.items() if known[1] > oldest}
            self._set_timer()


# This process's modules on the CPU. The key includes the network, because two networks may use the same
# weights, as a copy of a model with another activation does.
modules: ModuleCache[nn.Module] = ModuleCache()


def cached_module(predictor: Predictor) -> nn.Module:
    p = predictor
    key = p.weights_uri, p.weights_id, p.model, p.prepare, p.offload, p.precision
    return modules.get(key, lambda: predictor.load(cache=_cache_folder()))


def choose_inference_device(
    use_gpu: bool, addresses: Sequence[str], partition_id: int, num_devices: int
) -> str:
    """Returns the torch device of one task; unlike the ranks of a training, tasks may share a GPU."""
    if not use_gpu:
        return "cpu"
    if not num_devices:
        raise ValueError(
            "inferenceUseGpu=True needs a GPU on every host that runs tasks of transform, but torch finds no "
            "GPU on this host; set inferenceUseGpu=False, or install a torch with CUDA where there is a GPU"
        )
    # torch cannot use an identifier, or an index of devices that a container hides.
    if addresses and addresses[0].isdigit() and int(addresses[0]) < num_devices:
        return f"cuda:{int(addresses[0])}"
    # Without Spark's resources, partition numbers spread tasks over the devices.
    return f"cuda:{partition_id % num_devices}"


def task_device(use_gpu: bool) -> str:
    if not use_gpu:
        return "cpu"
    from pyspark import TaskContext

    context = TaskContext.get()
    gpu = context.resources().get("gpu") if context is not None else None
    partition_id = context.partitionId() if context is not None else 0
    addresses = list(gpu.addresses) if gpu is not None else []
    return choose_inference_device(use_gpu, addresses, partition_id, torch.cuda.device_count())


def takes_vectors(spark: SparkSession) -> bool:
    """Whether Spark has a UDF over Arrow arrays (4.1), which can return vectors."""
    # The client of a Spark Connect server may have another version than the server and its workers.
    major, minor = str(spark.version).split(".")[:2]
    return hasattr(F, "arrow_udf") and (int(major), int(minor)) >= (4, 1)


def prediction_expression(predictor: Predictor, columns: Sequence[Column]) -> Column:
    """Returns a column of predictions for `columns`; its type is `spark_type` of the results."""
    feeds, results = predictor.feeds, predictor.results
    if not predictor.gives_vectors:
        return pandas_batches.make_expression(partial(run, predictor), feeds, results.widths, columns)

    def arrays(batches: Iterator[Tuple[pa.Array, ...]]) -> Iterator[pa.Array]:  # noqa: UP006
        return run(predictor, batches)

    functions: Any = F  # Spark's types do not list this one.
    expression: Column = functions.arrow_udf(arrays, results.spark_type)(*columns)
    return expression


def run(predictor: Predictor, batches: Iterator[Any]) -> Iterator[pa.Array]:
    """Yields the results of batches of Arrow columns, in chunks of limited size. Runs in a Spark task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    device = task_device(predictor.use_gpu)
    module: nn.Module | None = None
    threads = torch.get_num_threads()
    # Tasks share the host, so each uses only its own cores.
    torch.set_num_threads(count_cores(context) if context is not None else threads)
    try:
        module = (
            cached_module(predictor) if device == "cpu" else predictor.load(device, cache=_cache_folder())
        )
        # Grows once the bytes per row are known.
        num_rows = predictor.batch_size
        for batch in batches:
            # If there is only one column, Spark passes a bare array.
            columns = batch if isinstance(batch, tuple) else (batch,)
            if predictor.packs:
                columns = (*columns[0].flatten(), *columns[1:])
            start, stop = 0, len(columns[0])
            while True:
                chunk = [column.slice(start, num_rows) for column in columns]
                start += num_rows
                result, row_bytes = _run_chunk(predictor, module, chunk, device)
                yield result
                if row_bytes:
                    passes = CHUNK_BYTES // (row_bytes * predictor.batch_size)
                    num_rows = predictor.batch_size * max(1, passes)
                if start >= stop:
                    break
    finally:
        torch.set_num_threads(threads)
        module = None
        release_gpu()


def inputs_of(predictor: Predictor, chunk: list[pa.Array]) -> tuple[list[Array], Array | None]:
    """Returns the network's inputs for some rows, and the mask of valid rows; None if all are valid."""
    valid: Array | None = None
    if predictor.keeps_rows:
        valid = np.array(chunk.pop().to_numpy(zero_copy_only=False))
    for index, feed in enumerate(predictor.feeds):
        chunk[index], problems = feed.read(chunk[index])
        if not problems:
            continue
        if valid is None:
            raise unread_error(feed.name, next(iter(problems.values())))
        valid[list(problems)] = False
    if valid is not None and valid.all():
        valid = None
    if valid is not None:
        chunk = [column.filter(pa.array(valid)) for column in chunk]
    return make_inputs(predictor.feeds, chunk), valid


def _run_chunk(
    predictor: Predictor, module: nn.Module, chunk: list[pa.Array], device: str
) -> tuple[pa.Array, int]:
    """Returns the results, and the number of bytes per row of inputs and outputs; 0 if no row is valid."""
    rows = len(chunk[0])
    columns, valid = inputs_of(predictor, chunk)
    outputs = predictor.predict(module, columns, device)
    row_bytes = sum(array.nbytes for array in (*columns, outputs)) // max(1, len(outputs))
    results = predictor.results.to_arrow(outputs, with_vectors=predictor.gives_vectors)
    if valid is not None:
        results = results.take(pa.array(np.cumsum(valid) - 1, mask=~valid))
    if len(results) != rows:
        raise RuntimeError(f"{rows} rows got {len(results)} predictions; report this bug of ringspark")
    return results, row_bytes


def _cache_folder() -> str | None:
    # Spark removes this folder with the executor.
    from pyspark import SparkFiles, TaskContext

    return SparkFiles.getRootDirectory() if TaskContext.get() is not None else None
