"""Refusals of the jobs' command lines."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bad_input_table.place import BadInput, Place, RefusedError, gone

R = BadInput

# fmt: off
JOB_LINES = [
    R("etl: fraction of 2", lambda p: p.job("etl", "--fraction", "2"),
      "--fraction", "at most 1, got '2'", RefusedError),
    R("etl: results there", lambda p: p.job("etl", "--no-overwrite", "--output", with_results(p)),
      "there are results in", "give --overwrite or another --output", RefusedError),
    R("train: no rows", lambda p: p.job("train", "--data", p.prepared()),
      "no rows at", "run examples/flights/etl.py", RefusedError),
    R("train: no worker", lambda p: p.job("train", "--num-workers", "0"),
      "--num-workers", "must be at least 1, got 0", RefusedError),
    R("train: text as a rate", lambda p: p.job("train", "--learning-rate", "x"),
      "--learning-rate", "must be a number, got 'x'", RefusedError),
    R("train: misspelt option", lambda p: p.job("train", "--epoch", "1"),
      "--epoch 1", "see --help", RefusedError),
    R("train: unknown precision", lambda p: p.job("train", "--precision", "fp8"),
      "--precision", "must be 'fp32', 'bf16' or 'fp16', got 'fp8'", RefusedError),
    R("demo: text as epochs", lambda p: p.job("demo", "--epochs", "x"),
      "--epochs", "must be a whole number, got 'x'", RefusedError),
    R("train: restarts below 0", lambda p: p.job("train", "--max-restarts", "-1"),
      "--max-restarts", "0 means no restart", RefusedError),
    R("train: unfinished run",
      lambda p: p.job("train", "--data", with_unfinished_run(p)),
      "current holds an unfinished run", "give --resume to continue it, --no-resume", RefusedError),
    R("score: no model", lambda p: p.job("score", "--data", p.prepared()),
      "no model at", "run examples/flights/train.py", RefusedError),
    R("shards: no command", lambda p: p.job("shards"), "required: COMMAND", "see --help", RefusedError),
    R("shards: no shards", lambda p: p.job("shards", "verify", p.prepared()),
      "holds no shards", "write", RefusedError),
    R("shards: one is missing",
      lambda p: p.job("shards", "verify", p.prepared("shards", gone("_shards*/*.parquet"))),
      "is missing", "write the shards again", RefusedError),
    R("shards: no such entry", lambda p: p.job("shards", "remove", p.prepared(), "ab"),
      "ab", ";", RefusedError),
    R("shards: no root", lambda p: p.job("shards", "list"),
      "^ringspark shards list: .*required: ROOT", "see --help", RefusedError),
    R("shards: nothing to remove", lambda p: p.job("shards", "remove", "x"),
      "one of the arguments KEY --all is required", "see --help", RefusedError),
    R("shards: a key and all", lambda p: p.job("shards", "remove", "x", "1", "--all"),
      "not allowed with argument KEY", "see --help", RefusedError),
]
# fmt: on


def with_unfinished_run(place: Place) -> str:
    """Returns a job's folder that has a checkpoint of a training."""

    def damage(folder: Path) -> None:
        (folder / "train").mkdir()
        pq.write_table(pa.table({"label": [0, 1]}), folder / "train" / "rows.parquet")
        run = folder / "runs" / "current"
        (run / "checkpoints" / "step-0000000001").mkdir(parents=True)
        for name in ("owner.json", "run.json", "checkpoints/step-0000000001/checkpoint.json"):
            (run / name).write_text("{}")

    return place.prepared("", damage)


def with_results(place: Place) -> str:
    place.prepared("", lambda folder: (folder / "train").mkdir())
    return str(place.root / "given")
