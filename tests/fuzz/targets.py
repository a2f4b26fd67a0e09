"""Fuzz targets: a valid input and the documented errors of each parser."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from registries import has_extras

import etl
import score
from ringspark.estimators import TorchRegressionModel, TorchRegressor
from ringspark.estimators.launch.heartbeat import Beat
from ringspark.estimators.parallel.shard_spec import CheckpointShards, ShardSpec, join_shards
from ringspark.estimators.run.folder import Begun, RunFolder
from ringspark.estimators.training import history
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.record import FileSum, Position, Record
from ringspark.estimators.training.checkpoint.shards import locate_tensors, name_files
from ringspark.estimators.training.checkpoint.weights import CheckpointInfo, parse_info, save_checkpoint
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.column_stats import ColumnStats
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Padded, Scalar, Vocabulary
from ringspark.pipelines.manifest import ShardFile
from ringspark.pipelines.table_files import TableFile, TableSource

SPEC = ModelSpec("mlp", {"in_features": 2, "hidden": [4], "out_features": 1})
EPOCH = history.EpochRecord(
    epoch=1, steps=3, rows=96, seconds=0.5, learning_rate=0.01, train_loss=0.25, validation_loss=None
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One parser.

    Attributes:
        good: Valid input.
        parse: Parses bytes.
        errors: Documented errors; any other error is a defect.
        is_json: Whether `good` can also be changed as JSON.
    """

    good: bytes
    parse: Callable[[bytes], object]
    errors: tuple[type[BaseException], ...] = (ValueError,)
    is_json: bool = True


PIECES = [torch.zeros(6, 4), torch.zeros(3, 4)]


def _of_parts(record: Record) -> bytes:
    """Returns a matrix of three blocks: one rank has two rows of each, the other one has one."""
    spread = CheckpointShards(ShardSpec("tensor", 0, blocks=3), (9, 4), (0, 1))
    files = {name: FileSum(bytes=8, sha256="00") for name in name_files("model.safetensors", 2, "abc")}
    spreads = {"model.safetensors": {"w": spread}}
    return replace(record, num_parts=2, spreads=spreads, token="abc", files=files).to_json().encode()


def _joined(text: bytes) -> None:
    """Joins the shards if they claim to be complete."""
    spreads = Record.from_json(text).spreads.get("model.safetensors", {})
    places = locate_tensors([{"w": (piece.dtype, tuple(piece.shape))} for piece in PIECES], spreads)
    assert join_shards([PIECES[part] for part in places["w"]], spreads["w"].cut).shape == spreads["w"].shape


def targets(folder: Path) -> dict[str, Target]:
    """Returns all targets. Args: folder: For parsers that read files."""
    config = TrainConfig(
        shards_uri="/s", run_uri="/r", input_columns=("x",), label_columns=("y",), model=SPEC.to_json()
    )
    record = Record(
        position=Position(epoch=1, step=3, finished_epochs=1, history=(EPOCH,)),
        optimizer="AdamW",
        files={"model.safetensors": FileSum(bytes=8, sha256="00")},
    )
    beat = Beat(token="t", rank=0, host="h", task=0, pid=1, launch=0, phase="x", ticks=1, beats=1)
    progress = history.TrainingProgress(epoch=1, epochs=2, step=3, num_steps=6, rows=96, seconds=0.5)
    info = CheckpointInfo(epoch=1, step=3, num_bytes=100, num_tensors=2)
    run = RunFolder.__new__(RunFolder)
    run.uri = str(folder / "run")
    return {
        "manifest": Target(good=_manifest(), parse=lambda text: ShardManifest.from_json(text, "/shards")),
        "manifest of a table": Target(
            good=_table_manifest(), parse=lambda text: ShardManifest.from_json(text, "/run").row_groups
        ),
        **({"thrift": _thrift()} if has_extras() else {}),
        "checkpoint.json": Target(
            good=json.dumps(asdict(info)).encode(), parse=lambda text: parse_info(text, "/checkpoint")
        ),
        "training.json": Target(good=record.to_json().encode(), parse=Record.from_json),
        "training.json of parts": Target(good=_of_parts(record), parse=_joined),
        "config.json": Target(good=config.to_json().encode(), parse=_text(TrainConfig.from_json)),
        "model spec": Target(good=SPEC.to_json().encode(), parse=_text(ModelSpec.from_json)),
        "history.json": Target(good=json.dumps([asdict(EPOCH)] * 2).encode(), parse=history.parse_history),
        "progress.json": Target(
            good=json.dumps(asdict(progress)).encode(),
            parse=_file(folder / "run" / "progress.json", lambda: history.read_progress(run.uri)),
        ),
        "run.json": Target(
            good=json.dumps(asdict(Begun(identity={"settings": {"epochs": 1}}))).encode(),
            parse=_file(folder / "run" / "run.json", run.identity),
        ),
        "heartbeat": Target(good=json.dumps(asdict(beat)).encode(), parse=Beat.from_json),
        "safetensors": Target(good=_tensors(), parse=_tensor_file(folder), is_json=False),
        **_stages(folder),
        **{
            f"{job.__name__}.py": Target(
                good=json.dumps(options).encode(), parse=_command(job), errors=(SystemExit, ValueError)
            )
            for job, options in (
                (etl, ["--output", "d"]),
                (score, ["--data", "d"]),
            )
        },
    }


def _manifest() -> bytes:
    stats = {"x": ColumnStats(rows=5, values=5, minimum=0, maximum=4, mean=2.0)}
    manifest = ShardManifest(
        uri="/shards",
        columns=(
            Column(name="x", kind=Scalar(dtype="int64"), source="bigint"),
            Column(name="s", kind=Vocabulary(words=("a", "b")), source="string"),
            Column(name="p", kind=Padded(dtype="float32", length=3), source="array<float>"),
        ),
        files=tuple(
            ShardFile(path=f"part-{i}.parquet", split="train", num_bytes=10, sha256="00", row_groups=(3, 2))
            for i in range(2)
        ),
        stats={"train": stats},
    )
    return manifest.to_json().encode()


def _table_manifest() -> bytes:
    table = TableFile(state="mtime=1", window_rows=20_000, values={"x": 3})
    file = ShardFile(
        path="x=3/a.parquet", split="train", num_bytes=10, sha256="", row_groups=(3, 90_000), table=table
    )
    column = Column(name="x", kind=Scalar(dtype="int64"), source="bigint")
    source = TableSource(uri="/table", format="delta", version=7)
    return ShardManifest(uri="/run", columns=(column,), files=(file,), table=source).to_json().encode()


def _thrift() -> Target:
    from ringspark.extras.external_tables.in_place import thrift_compact as thrift

    place = {1: (thrift.I64, 4), 2: (thrift.I32, 100), 3: (thrift.I64, 20_000)}
    rows = (thrift.LIST, (thrift.STRUCT, [place] * 3))
    good = thrift.write_struct(
        {1: rows, 3: (thrift.BINARY, b"x"), 20: (thrift.LIST, (thrift.I64, [1 << 40]))}
    )
    return Target(good=good, parse=thrift.read_struct, is_json=False)


def _tensors() -> bytes:
    file = io.BytesIO()
    tensor_file.write({"a": torch.ones(2, 3), "b": torch.zeros(5, dtype=torch.int64)}, file)
    return file.getvalue()


def _tensor_file(folder: Path) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        # A new name each time, because the last tensors may still map the old file.
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".safetensors") as file:
            file.write(data)
            file.flush()
            return {name: tensor.sum() for name, tensor in tensor_file.read(file.name).items()}

    return parse


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(data.decode())


def _file(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    path.parent.mkdir(parents=True, exist_ok=True)

    def parse(data: bytes) -> object:
        path.write_bytes(data)
        return read()

    return parse


def _stages(folder: Path) -> dict[str, Target]:
    """Returns the files of a saved estimator and of a saved model."""
    estimator, model = folder / "estimator", folder / "model"
    TorchRegressor(model=SPEC, featuresCol="x", labelCol="y").write().overwrite().save(str(estimator))
    save_checkpoint(str(folder / "weights"), SPEC.build())
    trained = TorchRegressionModel(model=SPEC)._set_trained(str(folder / "weights"), [(1,)], None)
    trained.write().overwrite().save(str(model))
    cases = {}
    for cls, stage in ((TorchRegressor, estimator), (TorchRegressionModel, model)):
        for name in ("ringspark.json", "metadata/part-00000"):
            path = stage / name
            good = path.read_bytes()
            cases[f"{cls.__name__} {name}"] = Target(
                good=good, parse=_stage_file(cls, str(stage), path, good)
            )
    return cases


def _stage_file(
    cls: type[TorchRegressor] | type[TorchRegressionModel], stage: str, path: Path, good: bytes
) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        path.write_bytes(data)
        try:
            return cls.load(stage)
        finally:
            path.write_bytes(good)

    return parse


def _command(job: object) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            values = data.decode("latin-1").split()
        words = [str(word) for word in values] if isinstance(values, list) else [str(values)]
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return job.build_parser().parse_args(words)

    return parse
