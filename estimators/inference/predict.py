"""Batched inference as a Spark SQL expression.

Only the model's input columns go to Python; every other column stays in the JVM, untouched. The
expression is lazy and has a declared type and no state, so it serves batch and streaming alike. Little
travels, because the weights stay on the store. A Python worker maps them once for the tasks that follow each
other (see `module_cache`), and the workers of a host share the pages (see `training.checkpoint`). On a GPU,
whose memory other tasks need, they stay for one task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Iterator, Tuple  # noqa: UP035 (arrow_udf reads these hints)

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.columns.feeds import Feed, make_inputs, unread_error
from ringspark.estimators.inference import pandas_batches
from ringspark.estimators.inference.device import task_device
from ringspark.estimators.inference.module_cache import ModuleCache
from ringspark.estimators.inference.results import Results
from ringspark.estimators.training.arguments import InputLayout, count_rows, slice_rows
from ringspark.estimators.training.batch_transforms import PreparedNetwork
from ringspark.estimators.training.checkpoint.weights import map_checkpoint, stream_checkpoint
from ringspark.estimators.training.device_memory import release_gpu
from ringspark.estimators.training.feed import Array
from ringspark.estimators.training.settings.choices import WeightOffload
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta
from ringspark.models.outputs import as_outputs

# Bytes of inputs and outputs of the rows that are predicted at a time, at least one forward pass. Spark 3.5
# bounds its batches by rows alone, and outputs may be wider than inputs.
PIECE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Everything that a Python worker needs to predict; it is small, because the weights stay on the store.

    Attributes:
        model: `ModelSpec` as JSON, or the user's module without weights, as `user_code.dumps` gives it.
        weights_uri: Folder of the checkpoint.
        prepare: The user's function that prepares the inputs, as `user_code.dumps` gives it; empty for none.
        weights_id: Identity of the checkpoint; another id means other weights in the same folder.
        feeds: Makers of the input arrays, one for each argument of `forward`.
        layout: Which of them hold rows of varying length.
        results: Conversion of the outputs to columns.
        output_widths: Values per row of each output (product of its shape).
        batch_size: Rows per forward pass.
        use_gpu: Whether to compute on a GPU.
        offload: Whether all weights are loaded at once, "none", or each where it is used, "disk".
        keeps_rows: Whether one more column follows, which is false for rows that get no prediction.
        gives_vectors: Whether vectors leave Python as such, see `takes_vectors`; the driver decides for all.
    """

    model: str | bytes
    weights_uri: str
    weights_id: str
    feeds: tuple[Feed, ...]
    results: Results
    output_widths: tuple[int, ...]
    batch_size: int
    prepare: bytes = b""
    use_gpu: bool = False
    offload: WeightOffload = "none"
    keeps_rows: bool = False
    gives_vectors: bool = True
    layout: InputLayout = ()

    def load(self, device: str = "cpu", cache: str | None = None) -> nn.Module:
        """Returns the trained module in eval mode, which computes on `device`.

        Raises:
            ValueError: The folder no longer holds a checkpoint, or holds another model's.
        """
        module: nn.Module
        if isinstance(self.model, str):
            module = build_on_meta(ModelSpec.from_json(self.model).build)
        else:
            module = user_code.loads(self.model)
        # A task may start long after `transform` was called, when the folder holds another model.
        load = stream_checkpoint if self.offload == "disk" else map_checkpoint
        load(self.weights_uri, module, device, cache, expected_id=self.weights_id)
        if self.prepare:
            module = PreparedNetwork(user_code.loads(self.prepare), module, device)
        return module.eval()

    def predict(self, module: nn.Module, columns: Sequence[Array], device: str = "cpu") -> Array:
        """Returns the raw outputs side by side, (rows, sum of `output_widths`) float64."""
        num_rows = count_rows(columns, self.layout)
        outputs = np.empty((num_rows, sum(self.output_widths)), dtype=np.float64)
        with torch.inference_mode():
            for start in range(0, num_rows, self.batch_size):
                stop = min(start + self.batch_size, num_rows)
                piece = slice_rows(columns, self.layout, start, stop)
                inputs = [torch.from_numpy(column).to(device) for column in piece]
                left = 0
                for width, output in zip(self.output_widths, as_outputs(module(*inputs)), strict=True):
                    # Converted to float64 here, because fp32 would round whole numbers beyond 2^24.
                    values = output.cpu().double().reshape(stop - start, width)
                    outputs[start:stop, left : left + width] = values.numpy()
                    left += width
        return outputs


# Modules that this process has on the CPU, by (folder, checkpoint id, network). Two networks may use the same
# weights, as a copy of a model with another activation does.
modules: ModuleCache[nn.Module] = ModuleCache()


def cached_module(predictor: Predictor) -> nn.Module:
    """Returns the predictor's module for the CPU, from this process's cache if it is there."""
    key = (
        *(predictor.weights_uri, predictor.weights_id),
        *(predictor.model, predictor.prepare, predictor.offload),
    )
    return modules.get(key, lambda: predictor.load(cache=_cache_folder()))


def takes_vectors(spark: SparkSession) -> bool:
    """Whether Spark has a UDF over Arrow arrays (4.1), which takes vectors; its pandas UDF takes only arrays.

    The client of a Spark Connect server may be of another version than the server and its workers.
    """
    major, minor = str(spark.version).split(".")[:2]
    return hasattr(F, "arrow_udf") and (int(major), int(minor)) >= (4, 1)


def prediction_expression(predictor: Predictor, columns: Sequence[Column]) -> Column:
    """Returns the model applied to `columns`; the expression's type is the results' `spark_type`."""
    feeds, results = predictor.feeds, predictor.results
    if not predictor.gives_vectors:
        return pandas_batches.expression(partial(run, predictor), feeds, results.widths, columns)

    def arrays(batches: Iterator[Tuple[pa.Array, ...]]) -> Iterator[pa.Array]:  # noqa: UP006
        return run(predictor, batches)

    functions: Any = F  # Spark's types do not list this one.
    expression: Column = functions.arrow_udf(arrays, results.spark_type)(*columns)
    return expression


def run(predictor: Predictor, batches: Iterator[Any]) -> Iterator[pa.Array]:
    """Yields the results of batches of Arrow columns, in pieces of bounded size. Runs in a Spark task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    device = task_device(predictor.use_gpu)
    module: nn.Module | None = None
    threads = torch.get_num_threads()
    # Tasks share the host; a task that took all cores would slow the others down.
    torch.set_num_threads(context.cpus() if context is not None else threads)
    try:
        module = (
            cached_module(predictor) if device == "cpu" else predictor.load(device, cache=_cache_folder())
        )
        # The first rows tell how many bytes a row has.
        num_rows = predictor.batch_size
        for batch in batches:
            # If there is only one column, Spark passes a bare array.
            columns = batch if isinstance(batch, tuple) else (batch,)
            start, stop = 0, len(columns[0])
            while True:
                piece = [column.slice(start, num_rows) for column in columns]
                start += num_rows
                result, row_bytes = _run_piece(predictor, module, piece, device)
                yield result
                if row_bytes:
                    passes = PIECE_BYTES // (row_bytes * predictor.batch_size)
                    num_rows = predictor.batch_size * max(1, passes)
                if start >= stop:
                    break
    finally:
        torch.set_num_threads(threads)
        module = None
        release_gpu()


def inputs_of(predictor: Predictor, piece: list[pa.Array]) -> tuple[list[Array], Array | None]:
    """Returns the network's inputs for some rows, and which rows have any, (rows,); None if all have.

    Raises:
        ValueError: A value cannot be read, and the predictor has no rows to leave out.
    """
    valid: Array | None = None
    if predictor.keeps_rows:
        valid = np.array(piece.pop().to_numpy(zero_copy_only=False))
    for index, feed in enumerate(predictor.feeds):
        piece[index], problems = feed.read(piece[index])
        if not problems:
            continue
        if valid is None:
            raise unread_error(feed.name, next(iter(problems.values())))
        valid[list(problems)] = False
    if valid is not None and valid.all():
        valid = None
    if valid is not None:
        piece = [column.filter(pa.array(valid)) for column in piece]
    return make_inputs(predictor.feeds, piece), valid


def _run_piece(
    predictor: Predictor, module: nn.Module, piece: list[pa.Array], device: str
) -> tuple[pa.Array, int]:
    """Returns the results of some rows, and the bytes of a row's inputs and outputs; 0 if no row is valid."""
    columns, valid = inputs_of(predictor, piece)
    outputs = predictor.predict(module, columns, device)
    row_bytes = sum(array.nbytes for array in (*columns, outputs)) // max(1, len(outputs))
    results = predictor.results.to_arrow(outputs, with_vectors=predictor.gives_vectors)
    if valid is not None:
        results = results.take(pa.array(np.cumsum(valid) - 1, mask=~valid))
    return results, row_bytes


def _cache_folder() -> str | None:
    """Returns a folder of this task's executor, which Spark removes with it; None outside a task."""
    from pyspark import SparkFiles, TaskContext

    return SparkFiles.getRootDirectory() if TaskContext.get() is not None else None
