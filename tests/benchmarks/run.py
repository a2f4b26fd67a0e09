"""Runs the benchmarks, each in a process of its own, and prints their tables.

    python tests/benchmarks/run.py
    python tests/benchmarks/run.py fit_rate transform_rate --repeats 9
    make bench ARGS="gang_startup"

Nothing is asserted: times depend on the machine, and the tests hold the numbers that do not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import harness

HERE = Path(__file__).resolve().parent
BENCHMARKS = {
    "read_rate": "reading rows/s of the engines against Petastorm's loader and bare pyarrow",
    "write_rate": "seconds of write_shards against Spark's own Parquet writer",
    "killed_writers": "what readers find after a write_shards was killed at 20 moments",
    "gang_startup": "seconds until a gang of 2 has joined and parted",
    "warm_fit": "seconds of a whole small fit in a warm session",
    "fit_rate": "training rows/s against the bare PyTorch loop",
    "transform_rate": "prediction rows/s against an identity through mapInArrow",
    "big_model": "save, load and transform of a 3 GiB model with 1 GiB of driver memory",
    "digits": "accuracy through Pipeline and CrossValidator against scikit-learn's MLPClassifier",
    "precision": "final metrics and loss curves of bf16 and fp16 against fp32, on flights and digits",
    "checkpoint_overhead": "seconds of the flights job with a checkpoint every 100 steps against none",
    "sharding": "bytes, traffic and steps/s of each sharding on 2 ranks",
    "worker_parity": "weights of 2 workers against those of 1, and of a rerun",
    "bad_inputs": "what a user reads for each bad input, and after how many seconds",
    "plan_memory": "planned against measured peak memory of one optimizer step",
    "plan_scale": "seconds and memory of an epoch's plan for a million row groups",
    "shuffle_quality": "how far an epoch's order is from a full permutation",
    "checkpoint_memory": "bytes saved, peak and recomputed FLOPs of 4 to 256 blocks with checkpointing",
    "memory_techniques": "bytes, time and largest depth of a transformer under each memory technique",
    "gpu_transformer": "tokens/s and peak memory on a CUDA device against the plain PyTorch loop",
    "seeds": "the flights demo over 3 seeds against gradient boosting",
}


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    listed = "\n".join(f"  {name:<19} {what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        description="Measure, and print the tables.",
        epilog=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="benchmarks to run; without any, all")
    harness.add_options(parser)
    return parser


def main() -> int:
    """Runs what the command line names; 1 if any of them failed."""
    parser = build_parser()
    args = parser.parse_args()
    names: list[str] = args.names or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    options = [
        text
        for key in ("repeats", "rows", "root")
        if (value := getattr(args, key)) is not None
        for text in (f"--{key}", str(value))
    ]
    failed = [
        name
        for name in names
        if subprocess.run([sys.executable, str(HERE / f"{name}.py"), *options], check=False).returncode
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
