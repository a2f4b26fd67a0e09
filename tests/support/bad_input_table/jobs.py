"""Refusals of the jobs' command lines."""

from bad_input_table.place import BadInput, Place, RefusedError, gone

R = BadInput

# fmt: off
JOB_LINES = [
    R("etl: fraction of 2", lambda p: p.job("etl", "--fraction", "2"),
      "--fraction", "at most 1, got '2'", RefusedError),
    R("etl: results there", lambda p: p.job("etl", "--no-overwrite", "--output", with_results(p)),
      "there are results in", "give --overwrite or another --output", RefusedError),
    R("demo: text as epochs", lambda p: p.job("demo", "--set", "params.epochs=x"),
      "--set params.epochs", "must be a whole number, got 'x'", RefusedError),
    R("score: no model", lambda p: p.job("score", "--data", p.prepared()),
      "no model at", "run ringspark train examples/flights/train.yaml", RefusedError),
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


def with_results(place: Place) -> str:
    place.prepared("", lambda folder: (folder / "train").mkdir())
    return str(place.root / "given")
