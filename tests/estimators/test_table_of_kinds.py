"""Every column type is trained on and scored; predictions equal those for tensors built by hand."""

import datetime
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image as Pillow
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import HashingTF
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from small_networks import outputs_of
from spark_tables import quiet, run_stream, values_of
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from ringspark.estimators import TorchRegressor
from ringspark.pipelines import Binary, HashBuckets, Image, Kind, Padded, Ragged, Sparse, Tokens, Vocabulary

# Each type is fitted once and then scored in three ways; all three modes of Spark would take minutes.
pytestmark = [pytest.mark.spark, pytest.mark.modes, pytest.mark.slow]

ROWS = 24
EPOCH = datetime.date(1970, 1, 1)
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A column type.

    Attributes:
        sql: Spark SQL that makes the column from `id`, 0 to 23.
        network: Builds a network from torch layers.
        tensors: Converts the column's values in Spark's rows to the network's inputs.
        kind: Entry in `columns`; None if the type is enough.
        convert: Converts the column to a vector.
        part: Suffix of the array that the network takes; all arrays if empty.
    """

    sql: str
    network: Callable[[], nn.Module]
    tensors: Callable[[Sequence[Any]], Tensors]
    kind: Kind | None = None
    convert: Callable[[Any], Any] = lambda table: table
    part: str = ""


def _floats(values: Sequence[Any]) -> Tensors:
    return (torch.tensor([float(value) for value in values]),)


def _ids(values: Sequence[Any]) -> Tensors:
    return (torch.tensor([int(value) for value in values]),)


def _arrays(values: Sequence[Any]) -> Tensors:
    return (torch.tensor([list(value) for value in values], dtype=torch.float32),)


def _line() -> nn.Module:
    """(batch,) -> (batch, 1)"""
    return nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 1))


def _flat(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(width, 1))


def _table(ids: int) -> Callable[[], nn.Module]:
    return lambda: nn.Embedding(ids, 1)


def _bag(ids: int) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(ids, 1, mode="sum")


def _microseconds(values: Sequence[Any]) -> Tensors:
    return _ids([value.microsecond for value in values])


def _numbers_of_structs(values: Sequence[Any]) -> Tensors:
    def numbers(value: Any) -> list[float]:
        day = (value.inner.day - EPOCH).days
        return [value.half, float(value.inner.flag), day, float(value.inner.price), value.byte]

    return (torch.tensor([numbers(value) for value in values]),)


def _words(values: Sequence[Any]) -> Tensors:
    # "a" is the most frequent word; "d" is not in the vocabulary of two words.
    return _ids([{"a": 0, "b": 1}.get(value, 2) for value in values])


def _padded(values: Sequence[Any]) -> Tensors:
    return (torch.tensor([[*map(float, value), *[0.0] * (3 - len(value))] for value in values]),)


def _ragged(values: Sequence[Any]) -> Tensors:
    lengths = torch.tensor([len(value) for value in values])
    return torch.tensor([i for value in values for i in value]), lengths.cumsum(0) - lengths


def _sparse(values: Sequence[Any]) -> Tensors:
    places = [list(map(int, value.indices)) for value in values]
    numbers = torch.tensor([float(x) for value in values for x in value.values])
    return *_ragged(places), numbers


def _png(shade: int) -> str:
    """Returns a PNG of 2 x 1 pixels in hexadecimal."""
    buffer = io.BytesIO()
    Pillow.frombytes("RGB", (1, 2), bytes(range(shade, shade + 6))).save(buffer, "PNG")
    return buffer.getvalue().hex()


def _files(values: Sequence[Any]) -> Tensors:
    shades = [torch.tensor(list(Pillow.open(io.BytesIO(value)).tobytes())) for value in values]
    return (torch.stack([shade.view(2, 1, 3).permute(2, 0, 1) / 255 for shade in shades]),)


def _structs(values: Sequence[Any]) -> Tensors:
    pixels = [torch.tensor(list(value.data)).view(2, 1, 3) for value in values]
    return (torch.stack([pixel.flip(2).permute(2, 0, 1) / 255 for pixel in pixels]),)


def _tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"-": 0, "?": 1, "a": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def _first_words(values: Sequence[Any]) -> Tensors:
    rows = [[2 if word == "a" else 1 for word in value.split()[:3]] for value in values]
    return (torch.tensor([row + [0] * (3 - len(row)) for row in rows]),)


def _hashed(table: Any) -> Any:
    named = table.withColumnRenamed("x", "words")
    return HashingTF(inputCol="words", outputCol="x", numFeatures=1 << 18).transform(named)


VECTOR = "array(cast(id as double), id % 3 / 2D)"
CASES = {
    "double": Case("id / 8D", _line, _floats),
    "float": Case("cast(id / 8 as float)", _line, _floats),
    "byte": Case("cast(id % 5 as tinyint)", _table(5), _ids),
    "int": Case("cast(id % 5 as int)", _table(5), _ids),
    "long": Case("id % 5", _table(5), _ids),
    "boolean": Case("id % 2 = 0", _line, _floats),
    "decimal": Case("cast(id / 8 as decimal(9, 3))", _line, _floats),
    "date": Case(
        "date_add(date'1970-01-01', cast(id % 7 as int))",
        _table(7),
        lambda days: _ids([(day - EPOCH).days for day in days]),
    ),
    "timestamp": Case("timestamp_micros(id % 7)", _table(7), _microseconds),
    "timestamp_ntz": Case(
        "timestamp_ntz'1970-01-01 00:00:00' + make_interval(0, 0, 0, 0, 0, 0, id % 7 / 1000000)",
        _table(7),
        _microseconds,
    ),
    "words": Case(
        "substr('aaabbbbaad', cast(id % 10 + 1 as int), 1)", _table(3), _words, Vocabulary(max_size=2)
    ),
    "hash": Case("concat('user ', id)", _table(1), lambda v: _ids([0] * len(v)), HashBuckets(1)),
    "array": Case("array(id / 8D, 1D)", _flat(2), _arrays),
    "array of arrays": Case("array(array(id / 8D, 1D), array(2D, 3D), array(0D, id % 2))", _flat(6), _arrays),
    "struct": Case(
        "named_struct('half', id / 2, 'inner', named_struct('flag', id % 2 = 0, 'day', "
        "date_add(date'1970-01-01', cast(id % 7 as int)), 'price', cast(id / 8 as decimal(9, 3))), "
        "'byte', cast(id % 5 as tinyint))",
        _flat(5),
        _numbers_of_structs,
    ),
    "padded": Case(
        "slice(array(1D, id / 8D, 2D), 1, cast(id % 4 as int))", _flat(3), _padded, Padded(length=3)
    ),
    "ragged": Case("slice(array(id % 5, 5L, 6L), 1, cast(id % 4 as int))", _bag(7), _ragged, Ragged()),
    "dense vector": Case(
        VECTOR, _flat(2), _arrays, convert=lambda table: table.withColumn("x", array_to_vector("x"))
    ),
    "sparse vector": Case(
        "slice(array('a', 'b', concat('c', id)), 1, cast(id % 4 as int))",
        _bag(1 << 18),
        _sparse,
        Sparse(),
        convert=_hashed,
    ),
    "text": Case(
        "slice(array('a', concat('b', id), 'a', 'a'), 1, cast(id % 5 as int))",
        lambda: nn.Sequential(nn.Embedding(3, 1), nn.Flatten(), nn.Linear(3, 1)),
        _first_words,
        Tokens.of(_tokenizer(), max_length=3, padding="max_length"),
        convert=lambda table: table.withColumn("x", F.array_join("x", " ")),
        part=".ids",
    ),
    "raw bytes": Case(
        "cast(array_join(array('a', char(97 + id % 3)), '') as binary)",
        lambda: nn.Sequential(nn.Embedding(256, 1), nn.Flatten(), nn.Linear(2, 1)),
        lambda values: (torch.tensor([list(value) for value in values]),),
        Binary("raw", shape=2),
    ),
    "image files": Case(f"unhex(if(id % 2 = 0, '{_png(3)}', '{_png(200)}'))", _flat(6), _files, Image(2, 1)),
    "image structs": Case(
        "named_struct('origin', 'a', 'height', 2, 'width', 1, 'nChannels', 3, 'mode', 16, "
        "'data', unhex(concat('0010203040', if(id % 2 = 0, '05', 'FF'))))",
        _flat(6),
        _structs,
        Image(2, 1),
    ),
}


@dataclass(frozen=True)
class Fitted:
    case: Case
    table: Any
    model: PipelineModel
    folder: Path


@pytest.fixture(scope="module", params=CASES)
def fitted(request, spark, tmp_path_factory):
    case, folder = CASES[request.param], tmp_path_factory.mktemp("kind")
    label = (F.col("id") % 5 / 4.0).alias("label")
    table = case.convert(spark.range(ROWS).select("id", F.expr(case.sql).alias("x"), label))
    return Fitted(case, table, Pipeline(stages=[make_estimator(case, folder)]).fit(table), folder)


def make_estimator(case: Case, folder: Path, **settings: Any) -> TorchRegressor:
    torch.manual_seed(1)
    columns = {} if case.kind is None else {"x": case.kind}
    common = {"model": case.network(), "inputCols": ["x" + case.part], "columns": columns}
    return quiet(TorchRegressor, folder / "runs", epochs=3, batchSize=8, **common, **settings)


# A network with bags of ids has no ONNX form.
@pytest.mark.extras
@pytest.mark.parametrize("runtime", [None, "torch"])
def test_a_served_model_gives_what_transform_gives(fitted, tmp_path, runtime):
    from ringspark.extras.serving import plain
    from ringspark.extras.serving.served_folder import write_served
    from ringspark.extras.serving.served_model import ServedModel

    write_served(fitted.model.stages[0], tmp_path / "served", runtime)
    rows = fitted.table.orderBy("id").select("x").collect()
    for model in (plain.load(str(tmp_path / "served")), ServedModel(fitted.model.stages[0])):
        found = model.predict(pd.DataFrame({"x": [row.x for row in rows]}))["prediction"]
        wanted = torch.tensor(values_of(fitted.model.transform(fitted.table)))
        assert torch.allclose(torch.tensor(found.tolist()), wanted, atol=1e-5)


def test_fit_sees_every_row_in_every_epoch(fitted):
    summary = fitted.model.stages[0].summary
    assert [*summary.history.rows] == [ROWS] * 3
    assert summary.history.train_loss.iloc[-1] < summary.history.train_loss.iloc[0]


@pytest.mark.slow
def test_two_workers_end_with_the_weights_of_one(fitted):
    estimator = make_estimator(fitted.case, fitted.folder, numWorkers=2, collective="torch")
    one, two = fitted.model.stages[0].module(), estimator.fit(fitted.table).module()
    for ours, theirs in zip(two.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_transform_gives_what_the_network_gives_for_the_values(fitted):
    values = [row.x for row in fitted.table.orderBy("id").collect()]
    wanted = outputs_of(fitted.model.stages[0].module(), *fitted.case.tensors(values)).flatten()
    assert torch.allclose(torch.tensor(values_of(fitted.model.transform(fitted.table))), wanted, atol=1e-5)


def test_a_saved_pipeline_predicts_the_same_where_nothing_may_be_unpickled(fitted):
    fitted.model.write().overwrite().save(str(fitted.folder / "model"))
    loaded = PipelineModel.load(str(fitted.folder / "model"))
    assert values_of(loaded.transform(fitted.table)) == values_of(fitted.model.transform(fitted.table))


def test_a_stream_is_scored_as_the_table_is(fitted):
    arriving = str(fitted.folder / "arriving")
    fitted.table.write.parquet(arriving)
    stream = fitted.table.sparkSession.readStream.schema(fitted.table.schema).parquet(arriving)
    found = run_stream(fitted.model.transform(stream).select("id", "prediction"), fitted.folder)
    assert values_of(found) == values_of(fitted.model.transform(fitted.table))
