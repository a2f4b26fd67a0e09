"""One contract for every type in KINDS: from a Spark column to the arrays of a batch."""

import datetime
import decimal
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.ml.linalg import SparseVector, Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType, _parse_datatype_string
from spark_tables import time_zone

from ringspark.pipelines import (
    Binary,
    Column,
    HashBuckets,
    Image,
    Kind,
    Padded,
    Ragged,
    ShardManifest,
    Sparse,
    Struct,
    Tokens,
    Vector,
    Vocabulary,
    open_reader,
    write_shards,
)
from ringspark.pipelines.kinds import KINDS, TableColumn, TableRow, kind_from_json
from ringspark.pipelines.kinds.values import to_arrow
from ringspark.pipelines.kinds.vector import is_vector
from ringspark.pipelines.local_rows import LocalInput, read_column
from ringspark.pipelines.nulls import hide_nan
from ringspark.pipelines.readers import Batch
from ringspark.pipelines.rows import RaggedRows

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("no_thread_left")]

ROWS = 53
NUMBERS = np.arange(ROWS)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Example:
    """A column of a DataFrame, and the expected batch of all its rows in order.

    Attributes:
        values: Python values, one per row.
        type: Spark's type, as text or as a DataType.
        arrays: Expected arrays; the key is a suffix of the column's name.
        choice: The user's entry in `columns`; None for none.
        default: Expected kind without a choice.
    """

    values: Sequence[Any]
    type: Any
    arrays: Arrays = field(default_factory=dict)
    choice: Kind | None = None
    default: str = "scalar"

    @property
    def tag(self) -> str:
        return self.choice.tag if self.choice else self.default


def _vectors(sparse: bool) -> list[Any]:
    rows = []
    for row in NUMBERS.tolist():
        # Dense and sparse vectors in one column, as VectorAssembler makes them; some sparse vectors are
        # empty.
        pairs = {i: row + i / 2 for i in range(6) if (row * 7 + i) % 5 == 0}
        dense = [pairs.get(i, 0.0) for i in range(6)]
        rows.append(Vectors.sparse(6, pairs) if sparse and row % 3 else Vectors.dense(dense))
    return rows


def _dense(dtype: str) -> np.ndarray:
    return np.array([vector.toArray() for vector in _vectors(True)], dtype=dtype)


def _csr(dtype: str) -> Arrays:
    indptr, indices, data = [0], [], []
    for vector in _vectors(True):
        is_sparse = isinstance(vector, SparseVector)
        indices += vector.indices.tolist() if is_sparse else list(range(6))
        data += vector.values.tolist()
        indptr.append(len(data))
    return {
        ".indptr": np.array(indptr, np.int64),
        ".indices": np.array(indices, np.int32),
        ".data": np.array(data, dtype),
    }


def _lists() -> list[list[int]]:
    return [list(range(row, row + row % 5)) for row in NUMBERS.tolist()]


def _padded(length: int, value: int) -> np.ndarray:
    return np.array([row + [value] * (length - len(row)) for row in _lists()], dtype=np.int64)


def tokenizer(**words: int) -> Any:
    """A whole-word tokenizer with unknown, start and end tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({"[PAD]": 0, "?": 1, "<": 2, ">": 3, **words}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.BertProcessing((">", 3), ("<", 2))
    return made


def _texts() -> list[str]:
    return [" ".join(["a", "b", "zebra", "a"][: row % 5]) for row in NUMBERS.tolist()]


def _tokens(length: int) -> Arrays:
    ids = {"a": 4, "b": 5}
    rows = [[2, *[ids.get(word, 1) for word in text.split()][: length - 2], 3] for text in _texts()]
    return {
        ".ids": np.array([row + [0] * (length - len(row)) for row in rows], np.int64),
        ".mask": np.array([[i < len(row) for i in range(length)] for row in rows]),
    }


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _png(row: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.full((3, 4, 3), row, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def _examples() -> dict[str, Example]:
    """Returns examples by column name, at least one for every kind."""
    day, moment = datetime.date(1969, 12, 30), datetime.datetime(1969, 12, 31, 23, 59, 59, 999_999)
    utc = moment.replace(tzinfo=datetime.timezone.utc)
    shift = [datetime.timedelta(days=row, microseconds=row) for row in NUMBERS.tolist()]
    micros = NUMBERS * (86_400_000_000 + 1) - 1
    words = [["b", "a", "c", "b", "", "b c", "a"][row % 7] for row in range(ROWS)]
    counted = sorted(set(words), key=lambda word: (-words.count(word), word))
    cube = NUMBERS[:, None, None, None] * 100 + np.arange(24).reshape(2, 3, 4)
    raw = (NUMBERS[:, None] * 3 + np.arange(3)).astype("<f4")
    flags, third = NUMBERS % 2 == 0, NUMBERS % 3 == 0
    lists = _lists()
    lengths = np.array(list(map(len, lists)))
    pixels = NUMBERS[:, None, None, None].astype(np.uint8)
    scalars = {
        "int8": (NUMBERS - 20, "tinyint", np.int8),
        "int16": (NUMBERS, "smallint", np.int16),
        "int32": (NUMBERS, "int", np.int32),
        "int64": (NUMBERS + 2**53 + 1, "bigint", np.int64),
        "float": ((NUMBERS / 3).astype(np.float32), "float", np.float32),
        "double": (NUMBERS / 3, "double", np.float64),
        "flag": (third, "boolean", bool),
    }
    table_row = TableRow(
        (
            TableColumn(name="number", center=1.0),
            TableColumn(name="word", type="string", form="words", words=("b", "c")),
            TableColumn(name="level", form="levels", levels=(1.0,)),
        )
    )

    def ids(known: dict[str, int], other: int) -> Arrays:
        return {"": np.array([known.get(word, other) for word in words])}

    return {
        **{name: Example(v.tolist(), sql, {"": v.astype(t)}) for name, (v, sql, t) in scalars.items()},
        "date": Example([day + step for step in shift], "date", {"": (NUMBERS - 2).astype(np.int32)}),
        "moment": Example([utc + step for step in shift], "timestamp", {"": micros}),
        "clock": Example([moment + step for step in shift], "timestamp_ntz", {"": micros}),
        "price": Example(
            [decimal.Decimal(row) / 100 for row in NUMBERS.tolist()], "decimal(15,2)", {"": NUMBERS / 100}
        ),
        "array": Example(
            [[float(row), row / 2] for row in NUMBERS.tolist()],
            "array<float>",
            {"": np.stack([NUMBERS, NUMBERS / 2], 1).astype("f4")},
            default="array",
        ),
        "flags": Example(
            np.stack([flags, third], 1).tolist(),
            "array<boolean>",
            {"": np.stack([flags, third], 1)},
            default="array",
        ),
        "cube": Example(cube.tolist(), "array<array<array<bigint>>>", {"": cube}, default="array"),
        "ragged": Example(
            lists,
            "array<bigint>",
            {".values": np.concatenate(lists).astype(np.int64), ".offsets": np.cumsum([0, *lengths])},
            Ragged(),
        ),
        "padded": Example(lists, "array<bigint>", {"": _padded(4, -1), ".length": lengths}, Padded(value=-1)),
        "long": Example(lists, "array<bigint>", {"": _padded(9, 0), ".length": lengths}, Padded(length=9)),
        "vector": Example(_vectors(True), VectorUDT(), {"": _dense("f4")}, default="vector"),
        "exact": Example(_vectors(True), VectorUDT(), {"": _dense("f8")}, Vector("float64")),
        "all_dense": Example(_vectors(False), VectorUDT(), {"": _dense("f4")}, default="vector"),
        "struct": Example(
            [(row % 2 == 0, (2.0**53 - row, decimal.Decimal(row) / 8), row - 20) for row in NUMBERS.tolist()],
            "struct<flag:boolean,in:struct<large:double,price:decimal(9,3)>,byte:tinyint>",
            {"": np.stack([flags, 2.0**53 - NUMBERS, NUMBERS / 8, NUMBERS - 20], 1)},
            default="struct",
        ),
        "moments": Example(
            [(moment + step, utc + step, 2**53 + 1) for step in shift],
            "struct<clock:timestamp_ntz,moment:timestamp,id:bigint>",
            {"": np.stack([micros, micros, 0 * micros + 2**53 + 1], 1)},
            default="struct",
        ),
        "small": Example(
            [(row % 2 == 0, row - 20, row / 8) for row in NUMBERS.tolist()],
            "struct<flag:boolean,byte:tinyint,single:float>",
            {"": np.stack([flags, NUMBERS - 20, NUMBERS / 8], 1).astype("f4")},
            default="struct",
        ),
        "sparse": Example(_vectors(True), VectorUDT(), _csr("f4"), Sparse()),
        "counted": Example(
            words, "string", ids({word: i for i, word in enumerate(counted)}, -1), Vocabulary()
        ),
        "known": Example(words, "string", ids({"c": 0, "b": 1}, 2), Vocabulary(("c", "b"))),
        "hashed": Example(words, "string", {}, HashBuckets(8, 5)),
        "text": Example(_texts(), "string", _tokens(6), Tokens.of(tokenizer(a=4, b=5), 8)),
        "short_text": Example(
            _texts(), "string", _tokens(4), Tokens.of(tokenizer(a=4, b=5), 4, padding="max_length")
        ),
        "row": Example(
            [(None if row % 5 == 0 else row / 4, words[row], row % 3) for row in NUMBERS.tolist()],
            "struct<number:double,word:string,level:int>",
            {
                ".numbers": np.where(NUMBERS % 5, NUMBERS / 4 - 1, np.nan).clip(-8, 8).astype("f4")[:, None],
                ".ids": np.stack([ids({"b": 1, "c": 2}, 0)[""], NUMBERS % 3 == 1], 1),
            },
            table_row,
        ),
        "raw": Example(
            [row.tobytes() for row in raw], "binary", {"": raw}, Binary("raw", shape=(3,), dtype="float32")
        ),
        "npy": Example(
            [_npy(planes[0]) for planes in cube],
            "binary",
            {"": cube[:, 0]},
            Binary("npy", shape=(3, 4), dtype="int64"),
        ),
        "image": Example(
            [_png(row) for row in range(ROWS)],
            "binary",
            {"": np.broadcast_to(pixels, (ROWS, 3, 4, 3))},
            Binary("image", shape=(3, 4, 3)),
        ),
        "picture": Example(
            [_png(row) for row in range(ROWS)],
            "binary",
            {"": np.broadcast_to((pixels / 255).astype("f4") - 0.5, (ROWS, 3, 2, 2))},
            Image(2, 2, mean=(0.5,)),
        ),
    }


def frame(spark: Any, examples: dict[str, Example], partitions: int = 3) -> Any:
    fields = [
        StructField(name, _parse_datatype_string(e.type) if isinstance(e.type, str) else e.type)
        for name, e in examples.items()
    ]
    rows = list(zip(*(example.values for example in examples.values()), strict=True))
    return spark.createDataFrame(rows, StructType(fields)).coalesce(partitions)


@pytest.fixture(scope="module")
def examples(spark: Any) -> dict[str, Example]:
    return _examples()


@pytest.fixture(scope="module")
def shards(
    spark: Any, examples: dict[str, Example], tmp_path_factory: pytest.TempPathFactory
) -> ShardManifest:
    choices = {name: e.choice for name, e in examples.items() if e.choice is not None}
    with time_zone(spark, "America/New_York"):
        return write_shards(
            frame(spark, examples),
            str(tmp_path_factory.mktemp("kinds") / "s"),
            columns=choices,
            row_group_rows=8,
        )


def _in_order(batch: Batch, rows: np.ndarray, examples: dict[str, Example]) -> None:
    """Checks that a batch holds exactly these rows of the examples, bit for bit."""
    for name, example in examples.items():
        for suffix, expected in example.arrays.items():
            values = batch[name + suffix]
            if example.tag == "ragged" or example.tag == "sparse":
                continue
            expected = expected[rows]
            if name == "text":
                longest = int(example.arrays[".mask"][rows].sum(1).max())
                expected = expected[:, :longest]
            assert values.dtype == expected.dtype, name
            assert values.tobytes() == expected.tobytes(), name
        if example.tag in ("ragged", "sparse"):
            key = ".offsets" if example.tag == "ragged" else ".indptr"
            offsets, mine = example.arrays[key], batch[name + key]
            assert mine.dtype == np.int64
            assert mine.tobytes() == np.cumsum([0, *np.diff(offsets)[rows]]).tobytes()
            for suffix, expected in example.arrays.items():
                if suffix != key:
                    parts = [expected[offsets[row] : offsets[row + 1]] for row in rows]
                    assert batch[name + suffix].dtype == expected.dtype
                    assert batch[name + suffix].tobytes() == np.concatenate(parts).tobytes(), name


def test_every_kind_has_an_example(examples: dict[str, Example]) -> None:
    assert {example.tag for example in examples.values()} == set(KINDS)


NAN = float("nan")
ODD = {"double": [NAN], "array": [[NAN, None]], "padded": [[None, 1], []], "hashed": ["é"], "flags": [[None]]}


def _to_file(batches: Iterator[Any]) -> Iterator[Any]:
    table, file = pa.Table.from_batches(batches), io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    yield pa.RecordBatch.from_pydict({"file": [file.getvalue()]})


@pytest.fixture(scope="module")
def selected(spark: Any, shards: ShardManifest, examples: dict[str, Example]) -> list[tuple[Any, ...]]:
    """Returns columns, their values, Spark's Arrow arrays of the values, and the arrays of `select`."""
    values = {name: [*e.values, *(ODD.get(name, []) + [None] * 3)[:3]] for name, e in examples.items()}
    rows = frame(spark, {name: replace(e, values=values[name]) for name, e in examples.items()}, 1)
    pairs = []
    for name in rows.columns:
        source, data_type = F.col(name), rows.schema[name].dataType
        given = F.unwrap_udt(source) if is_vector(data_type) else source
        pairs += [given, shards.column(name).kind.select(source, data_type)]
    table = rows.select(*(each.alias(f"v{i}") for i, each in enumerate(pairs)))
    # Not `toArrow`, which refuses null structs with fields that cannot be null.
    (row,) = table.mapInArrow(_to_file, "file binary").collect()
    arrays = [column.combine_chunks() for column in pa.ipc.open_stream(row.file).read_all().columns]
    columns = [shards.column(name) for name in rows.columns]
    return list(zip(columns, values.values(), arrays[::2], arrays[1::2], strict=True))


def _plain(values: Any) -> str:
    is_moment = pa.types.is_timestamp(values.type)
    return repr((values.cast(pa.timestamp("us", "UTC")) if is_moment else values).to_pylist())


@pytest.mark.parametrize("tag", KINDS)
def test_values_are_read_without_spark_as_spark_selects_them(tag: str, selected: list[Any]) -> None:
    for column, values, given, wanted in (each for each in selected if each[0].kind.tag == tag):
        kind, source = kind_from_json(column.kind.to_json()), column.source  # as a served model has it
        assert _plain(kind.read_values(given, source)) == _plain(wanted), column.name
        # pandas has no null but NaN. A struct is a dict there, as in JSON.
        pandas = pd.Series(given.to_pylist() if tag in ("struct", "table_row") else values, dtype=object)
        assert _plain(hide_nan(kind.read_values(pandas, source))) == _plain(hide_nan(wanted)), column.name
        item = LocalInput(name="x", kind=kind, source=source)
        assert not any(len(array) for array in read_column(item, pandas[:0]).arrays.values())
        wrong, refused = [datetime.timedelta(1)], []
        for each in (pa.array(wrong), pd.Series(wrong, dtype=object)):
            with pytest.raises(ValueError, match=r"timedelta\(days=1\)") as error:
                kind.read_values(each, source)
            refused.append(str(error.value))
        assert refused[0] == refused[1]


def test_the_manifest_says_what_a_batch_holds(shards: ShardManifest, examples: dict[str, Example]) -> None:
    batch = next(open_reader(shards, batch_size=20, engine="arrow").batches(0))
    names = []
    for column in shards.columns:
        assert column.kind.tag == examples[column.name].tag
        described = column.kind.arrays(column.name)
        assert tuple(described) == column.kind.batch_names(column.name)
        for name, array in described.items():
            names.append(name)
            assert batch[name].dtype == array.dtype
            shape = batch[name].shape[1:]
            assert shape <= array.shape if array.varies else shape == array.shape
            assert (len(batch[name]) == 20) is array.per_row or not array.per_row
        assert column.kind.row_bytes > 0
        assert str(column.kind)
    assert list(batch) == names


def test_kinds_survive_json(shards: ShardManifest) -> None:
    for column in shards.columns:
        assert Column.from_values(json.loads(json.dumps(column.to_json()))) == column
    with pytest.raises(ValueError, match=r"has unknown type 'graph'; known: scalar, .*; upgrade ringspark"):
        Column.from_values({"name": "x", "source": "", "kind": "graph"})


def test_every_value_comes_back_bit_for_bit(shards, examples, engine):
    (batch,) = open_reader(shards, batch_size=100, engine=engine, shuffle=False).batches(0)
    _in_order(batch, NUMBERS, examples)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_rows_stay_together_in_the_shuffle(shards, examples, engine, num_shards):
    seen = []
    for shard in range(num_shards):
        reader = open_reader(shards, None, shard, num_shards, batch_size=7, seed=3, engine=engine)
        for batch in reader.batches(2):
            rows = batch["int32"].astype(np.int64)
            _in_order(batch, rows, examples)
            seen += rows.tolist()
    assert sorted(seen) == NUMBERS.tolist()


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_cached_row_groups_give_the_same_batches(shards, examples, engine, cache):
    reader = open_reader(shards, batch_size=7, seed=3, engine=engine, cache=cache)
    for epoch in range(3):
        for batch in reader.batches(epoch):
            _in_order(batch, batch["int32"].astype(np.int64), examples)


def test_a_subset_of_columns_reads_no_other(shards: ShardManifest, engine: str) -> None:
    (batch,) = open_reader(shards, ["sparse", "padded"], batch_size=99, engine=engine).batches(0)
    assert list(batch) == ["sparse.indptr", "sparse.indices", "sparse.data", "padded", "padded.length"]


def test_describe_is_a_table_of_all_columns(shards: ShardManifest) -> None:
    lines = shards.describe().splitlines()
    assert f"53 rows, {len(shards.files)} files, {len(shards.row_groups)} row groups" in lines[0]
    assert lines[1].split() == [
        *("split", "column", "in", "a", "batch"),
        *("rows", "nulls", "min", "max", "mean", "std"),
    ]
    assert len(lines) == 2 + len(shards.columns)
    by_name = {line.split()[1]: line for line in lines[2:]}
    assert by_name["cube"].split()[2:7] == ["int64[2,", "3,", "4]", "53", "0"]
    # Text columns show the number of tokens.
    assert by_name["text"].split()[2:8] == ["int64[8", "tokens]", "53", "0", "2", "6"]
    assert by_name["int32"].split()[2:] == ["int32", "53", "0", "0", "52", "26", "15.4434"]


@pytest.mark.parametrize(
    ("type_", "choice", "message"),
    [
        ("int", Struct(), "column 'x' has type int, not a struct"),
        ("struct<a:int>", Struct(fields=(("a",), ("b",))), "'x' lacks the field 'b' in struct<a:int>; build"),
        ("string", Sparse(), "not a vector"),
        ("array<array<int>>", Ragged(), "flatten it first"),
        ("array<int>", Padded(length=0), "of Padded for column 'x' must be a whole number above 0, got 0"),
        ("array<int>", Padded(value=float("nan")), "value of Padded for column 'x' must be a int32, got nan"),
        ("array<int>", Padded(value=0.5), "value of Padded for column 'x' must be a int32, got 0.5"),
        ("array<int>", Ragged("float32"), "holds int32, but dtype='float32' is set; cast it in Spark first"),
        ("int", Binary("raw", shape=(1,)), "type int, not binary"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_with_the_remedy(spark, tmp_path, type_, choice, message):
    df = spark.createDataFrame([], f"x {type_}")
    with pytest.raises(ValueError, match=message):
        write_shards(df, str(tmp_path / "s"), columns=None if choice is None else {"x": choice})
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("values", "type_", "choice", "message"),
    [
        (
            [[[1], [2]], [[1, 2], [3, 4]]],
            "array<array<int>>",
            None,
            "arrays of 1 to 2 elements in dimension 1",
        ),
        ([[1, 2, 3]], "array<int>", Padded(length=2), "up to 3 elements, but length=2 is set"),
        ([[]], "array<int>", None, "holds only empty arrays"),
        ([b"1234"], "binary", Binary("raw", shape=(3,)), "column 'x' holds uint8 of shape"),
        ([b"1234"], "binary", Binary("image", shape=(3, 3)), "4 bytes that decoder 'image' cannot read"),
        ([b"1234"], "binary", Binary("npy", shape=(3, 3)), "4 bytes that decoder 'npy' cannot read"),
    ],
)
def test_data_that_does_not_fit_leaves_an_error_alone(spark, tmp_path, values, type_, choice, message):
    df = spark.createDataFrame([(value,) for value in values], f"x {type_}")
    with pytest.raises(ValueError, match=message):
        write_shards(df, str(tmp_path / "s"), columns=None if choice is None else {"x": choice})
    assert not (tmp_path / "s").exists()


def test_a_vector_of_too_many_zeros_is_refused_with_the_remedy(spark: Any, tmp_path: Any) -> None:
    df = spark.createDataFrame([(Vectors.sparse(1 << 20, {3: 1.0}),)], ["v"])
    with pytest.raises(ValueError, match=r"^column 'v' holds sparse vectors of size 1048576, .*Sparse\(\)"):
        write_shards(df, str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()
    manifest = write_shards(df, str(tmp_path / "s"), columns={"v": Sparse()})
    assert manifest.column("v").kind == Sparse(size=1 << 20)


def test_null_vectors_are_kept_as_zeros_with_a_mask(spark: Any, tmp_path: Any) -> None:
    rows = [(Vectors.dense([1.0, 2.0]),) * 2, (None, None), (Vectors.sparse(2, {1: 3.0}),) * 2]
    schema = StructType([StructField(name, VectorUDT()) for name in ("v", "s")])
    df = spark.createDataFrame(rows, schema).coalesce(1)
    manifest = write_shards(df, str(tmp_path / "s"), columns={"s": Sparse()}, handle_invalid="keep")
    (batch,) = open_reader(manifest, engine="arrow", shuffle=False).batches(0)
    assert batch["v"].tolist() == [[1, 2], [0, 0], [0, 3]]
    assert batch["v.isnull"].tolist() == batch["s.isnull"].tolist() == [False, True, False]
    assert batch["s.indptr"].tolist() == [0, 2, 2, 3]
    assert batch["s.data"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("rest", [[1, None], None], ids=str)
def test_a_kept_row_that_only_holds_a_null_must_have_the_shape_of_the_others(spark, tmp_path, rest):
    df = spark.createDataFrame([([1, 2, 3],), ([4, None, 6],), (None,), (rest,)], "a array<int>").coalesce(1)
    if rest is not None:
        with pytest.raises(ValueError, match="column 'a' has arrays of 2 to 3 elements"):
            write_shards(df, str(tmp_path / "s"), handle_invalid="keep")
        return
    manifest = write_shards(df, str(tmp_path / "s"), handle_invalid="keep")
    (batch,) = open_reader(manifest, engine="arrow", shuffle=False).batches(0)
    assert batch["a"].tolist() == [[1, 2, 3], [4, 0, 6], [0, 0, 0], [0, 0, 0]]
    assert batch["a.isnull"].tolist() == [False, True, True, True]


def test_npy_of_either_byte_order_is_read_and_no_pickle() -> None:
    kind = Binary("npy", shape=(2,), dtype="float32")
    rows = kind.decode(kind.encode(pa.array([_npy(np.array([1, 2], ">f4"))])).arrays)
    assert isinstance(rows, RaggedRows)
    values = kind.finish("x", rows)["x"]
    assert values.dtype == np.float32
    assert values.dtype.isnative
    assert values.tolist() == [[1, 2]]
    pickled = _npy(np.array([{"a": 1}, None], dtype=object))
    for bad in (b"", b"PK", pickled):
        with pytest.raises(ValueError, match="bytes that decoder 'npy' cannot read"):
            kind.encode(pa.array([bad]))


def test_sparse_rows_with_more_values_than_indices_are_refused() -> None:
    parts = pa.array([[0, 1], [2]], pa.list_(pa.int32())), pa.array([[1.0], [2.0, 3.0]])
    with pytest.raises(ValueError, match="has rows whose number of indices differs from"):
        Sparse(dtype="float64", size=3).decode(parts)


def test_an_image_that_ends_too_early_is_named_when_it_is_read() -> None:
    buffer = io.BytesIO()
    from PIL import Image

    Image.fromarray(np.arange(48 * 48 * 3, dtype=np.uint8).reshape(48, 48, 3)).save(buffer, "JPEG")
    kind = Binary("image", shape=(48, 48, 3))
    half = kind.encode(pa.array([buffer.getvalue()[: len(buffer.getvalue()) // 2]]))
    rows = kind.decode(half.arrays)
    assert isinstance(rows, RaggedRows)
    with pytest.raises(RuntimeError, match=r"column 'x' holds \d+ bytes that decoder 'image' cannot read"):
        kind.finish("x", rows)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Vocabulary(words=[1]), "words of Vocabulary must be strings"),
        (lambda: Vocabulary(words="abc"), "must be a list of strings"),
        (lambda: HashBuckets(5, seed=2**63), "seed of HashBuckets must be a whole number of 64 bits"),
        (lambda: HashBuckets(0), "num_buckets of HashBuckets must be at least 1"),
        (lambda: Binary("raw", shape=(1,), dtype="foo"), "dtype of Binary must be a NumPy dtype"),
        (lambda: Binary("pickle", shape=(1,)), "decoder of Binary must be one of raw, npy, image"),
        (lambda: Binary("image", shape=(1,)), "needs shape"),
    ],
)
def test_settings_that_no_column_could_have_are_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "data_type",
    [
        pa.list_(pa.list_(pa.float64(), 2), 2),
        pa.list_(pa.list_(pa.float64(), 2)),
        pa.large_list(pa.list_(pa.float64(), 2)),
    ],
)
def test_lists_of_one_size_are_read_at_any_depth(data_type: Any) -> None:
    values = pa.array([[[1.0, 2.0], [3.0, 4.0]]], data_type)
    assert to_arrow(values).type == pa.list_(pa.list_(pa.float64()))
    assert to_arrow(values).to_pylist() == values.to_pylist()
