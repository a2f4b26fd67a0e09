"""Trains a network on the encoded shards, and saves it as one pipeline with the features.

    python jobs/train.py --data artifacts/flights
    spark-submit --py-files dist/ringspark.zip jobs/train.py --data s3a://bucket/flights

The job reads `shards` and `features` below `--data`, as jobs/etl.py wrote them. It writes `model`, a Spark
ML PipelineModel (features + network), and `history.json`, one entry per epoch.

The training keeps its checkpoints in `runs/current`. After any process of a job died, the same command with
`--resume` goes on from the last checkpoint, and `--no-resume` starts anew. Without either, the job refuses
to throw the unfinished run away.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from ringspark.jobs import cli
from ringspark.pipelines import ShardManifest, storage


def build_parser() -> cli.JobParser:
    """The job's options."""
    parser = cli.JobParser("train", "Train the entity-embedding network on the shards of jobs/etl.py.")
    parser.add_argument("--data", default=cli.DEFAULT_ROOT, metavar="URI", help="folder that etl wrote")
    parser.add_argument("--output", metavar="URI", help="saved pipeline; without it DATA/model")
    parser.add_argument("--num-workers", type=cli.positive_int, default=2, help="workers that train together")
    parser.add_argument(
        "--members", type=cli.positive_int, default=3, help="networks of the ensemble; time grows with it"
    )
    parser.add_argument("--epochs", type=cli.positive_int, default=5, help="passes over the training rows")
    parser.add_argument(
        "--batch-size", type=cli.positive_int, default=1024, help="rows per step over all workers"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak of the one-cycle schedule")
    parser.add_argument("--weight-decay", type=float, default=1e-2, help="of AdamW")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the passes")
    parser.add_argument(
        "--gradient-checkpointing",
        default="none",
        metavar="POLICY",
        help="activations to recompute: none, sqrt, all or a number of segments",
    )
    parser.add_argument(
        "--gradient-accumulation", type=cli.positive_int, default=1, help="micro-batches per step"
    )
    parser.add_argument(
        "--collective", choices=["horovod", "torch"], help="without it horovod where it is installed"
    )
    parser.add_argument(
        "--reader", choices=["petastorm", "arrow"], help="without it petastorm where it is installed"
    )
    parser.add_argument("--use-gpu", action="store_true", help="one GPU per worker")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of rows")
    _add_recovery(parser)
    parser.add_master()
    return parser


def _add_recovery(parser: cli.JobParser) -> None:
    group = parser.add_argument_group("when something fails")
    group.add_argument(
        "--run", metavar="URI", help="folder of this one training; without it DATA/runs/current"
    )
    group.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="go on with the run of that folder, or start anew; without either an unfinished run is kept and "
        "the job refuses to start",
    )
    group.add_argument(
        "--checkpoint-every-steps",
        type=cli.positive_int,
        metavar="N",
        help="optimizer steps between two checkpoints; without it none by steps",
    )
    group.add_argument(
        "--checkpoint-every-seconds",
        type=cli.seconds,
        default=600.0,
        metavar="S",
        help="seconds between two checkpoints, 0 for none by the clock",
    )
    group.add_argument(
        "--max-restarts", type=cli.count, default=3, metavar="N", help="times that lost workers are replaced"
    )
    group.add_argument(
        "--min-workers",
        type=cli.positive_int,
        metavar="N",
        help="workers to go on with where there is no room for more; without it --num-workers",
    )
    group.add_argument(
        "--timeout-seconds",
        type=cli.seconds,
        default=600.0,
        metavar="S",
        help="after which a worker that makes no progress counts as lost",
    )


def run(args: argparse.Namespace) -> None:
    """Trains and saves. Runs on the driver.

    Raises:
        ValueError: There is nothing to train on, or an option cannot be used.
    """
    data = storage.normalize(args.data)
    shards = storage.join(data, "shards")
    # Checked before Spark starts, so that a wrong folder does not cost half a minute.
    ShardManifest.load(shards)
    run_uri = storage.normalize(args.run) if args.run else storage.join(data, "runs", "current")
    from ringspark.estimators.run.folder import make_way

    make_way(run_uri, args.resume)
    from pyspark.ml import PipelineModel

    from ringspark.estimators import TorchClassifier, WorkerError
    from ringspark.jobs import flights
    from ringspark.models import ModelSpec

    with cli.spark("ringspark train", args.master):
        features = PipelineModel.load(storage.join(data, "features"))
        cardinalities, num_numeric = flights.feature_sizes(features)
        estimator = TorchClassifier(
            model=ModelSpec(
                "tabular_ensemble",
                {
                    "members": args.members,
                    "cardinalities": cardinalities,
                    "num_numeric": num_numeric,
                    "hidden": [256, 128],
                    "out_features": 1,
                    "dropout": 0.2,
                    "embedding_dropout": 0.1,
                },
            ),
            loss="bce_with_logits_per_member",
            inputCols=["categorical", "numeric"],
            numWorkers=args.num_workers,
            epochs=args.epochs,
            batchSize=args.batch_size,
            optimizer="adamw",
            lrSchedule="one_cycle",
            learningRate=args.learning_rate,
            weightDecay=args.weight_decay,
            precision=args.precision,
            gradientCheckpointing=args.gradient_checkpointing,
            gradientAccumulation=args.gradient_accumulation,
            collective=args.collective,
            reader=args.reader,
            useGpu=args.use_gpu,
            seed=args.seed,
            runUri=run_uri,
            resume=bool(args.resume),
            checkpointEverySteps=args.checkpoint_every_steps,
            checkpointEverySeconds=args.checkpoint_every_seconds,
            maxRestarts=args.max_restarts,
            minWorkers=args.min_workers,
            timeoutSeconds=args.timeout_seconds,
        )
        print(
            f"train: {args.num_workers} workers, {estimator.getCollective()} over shards read by "
            f"{estimator.getReader()}, {args.precision}",
            flush=True,
        )
        try:
            model = estimator.fitOnShards(shards)
        except WorkerError as error:
            # The message holds the worker's trace; the driver's is left out.
            raise SystemExit(f"train: error: {error}") from None
        output = storage.normalize(args.output) if args.output else storage.join(data, "model")
        PipelineModel([*features.stages, model]).write().overwrite().save(output)
        summary = model.summary
        history = [asdict(record) for record in summary.epochs]
        storage.write_atomic(storage.join(data, "history.json"), json.dumps(history, indent=1).encode())
    print(f"train: pipeline saved to {output}")
    cli.print_rate("train", summary.rows, summary.seconds)


if __name__ == "__main__":
    sys.exit(cli.main(build_parser(), run))
