"""`plan_parallelism` against the trainer's steps over every mesh of 4 ranks of this host: time and memory.

One gang holds all meshes of a network and runs their steps in interleaved rounds, so that a change of the
machine's speed affects all of them. The plan takes its own measurements before, so on a busy machine compare
times as shares of data parallelism's (`data 4`). A step is the trainer's step, with the strategy and the
pipeline of a training, without the reading of rows. The peak counts torch's allocations on the rank with the
most, as in the benchmark `plan_memory`. There are three networks: a transformer with many rows, a wide MLP
with few rows, whose gradients are larger than its rows, and a transformer of mixtures of experts. The plan
assumes an even load of the experts, but the router may be uneven.

    python tests/benchmarks/plan_parallelism.py --chart docs/plan_parallelism.png

`--rows` is the rows of the transformer's step over all ranks; `--steps` is the steps per mesh and round.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import harness
import torch
from peak_memory import peak_bytes
from plan_memory import _num_bytes, _tensors

from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.batch_sizes import Steps
from ringspark.estimators.training.callbacks import Callbacks
from ringspark.estimators.training.checkpoint.resume import Recovery
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.history import RunLog
from ringspark.estimators.training.make_heads import make_heads
from ringspark.estimators.training.observation.observation import Observation
from ringspark.estimators.training.optimizers.schedules import make_rates
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.rank_network import wrap_network
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.train_state import TrainState
from ringspark.estimators.training.trainer import Trainer
from ringspark.extras.model_parallel.shard_network import shard_network
from ringspark.extras.planning import plan_parallelism
from ringspark.extras.planning.meshes import ParallelismPlan
from ringspark.models import ModelSpec

RANKS = 4
SEQ, VOCAB = 64, 512


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network and its rows per step over all ranks."""

    name: str
    spec: ModelSpec
    rows: int
    inputs: tuple[tuple[int, ...], str]
    labels: tuple[tuple[int, ...], str]
    loss: str

    @property
    def batch(self) -> tuple[Any, Any]:
        return tuple(((self.rows, *shape), dtype) for shape, dtype in (self.inputs, self.labels))  # type: ignore[return-value]

    def config(self, parallelism: Mapping[str, Any], num_micro: int, ranks: int = RANKS) -> TrainConfig:
        return TrainConfig(
            shards_uri="",
            run_uri="",
            model=self.spec.to_json(),
            input_columns=("x",),
            label_columns=("y",),
            losses=(self.loss,),
            batch_size=self.rows,
            num_workers=ranks,
            parallelism=dict(parallelism),
            gradient_accumulation=num_micro,
            collective="torch",
            reader="arrow",
        )


def networks(rows: int, *, tiny: bool) -> list[Network]:
    width, depth = (64, 2) if tiny else (256, 6)
    sizes = {"vocab_size": VOCAB, "max_seq_len": SEQ, "dim": width, "depth": depth, "num_heads": 4}
    wide = [128] * 4 if tiny else [2048] * 7
    ids = ((SEQ,), "int64")
    return [
        Network(
            name="transformer, many rows",
            spec=ModelSpec("transformer_lm", sizes),
            rows=rows,
            inputs=ids,
            labels=ids,
            loss="cross_entropy",
        ),
        Network(
            name="wide perceptron, few rows",
            spec=ModelSpec("mlp", {"in_features": 256, "hidden": wide, "out_features": 1}),
            rows=16,
            inputs=((256,), "float32"),
            labels=((1,), "float32"),
            loss="mse",
        ),
        Network(
            name="mixtures of experts",
            spec=ModelSpec("transformer_lm", sizes | {"experts": {"num_experts": 8}}),
            rows=rows,
            inputs=ids,
            labels=ids,
            loss="cross_entropy",
        ),
    ]


@dataclass(frozen=True)
class Rounds:
    """Runs every mesh on each rank in interleaved rounds.

    Returns the step seconds by mesh and round, and peaks.
    """

    network: Network
    configs: list[TrainConfig]
    rounds: int
    steps: int

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
            made = [self._trainer(config, collective, folder, opened) for config in self.configs]
            peaks = []
            for trainer, batch, held in made:
                for _ in range(2):
                    trainer._train_step(batch, self.network.rows, 1)
                trainer._sync.optimizer.zero_grad()
                kept = _num_bytes([*held(), *_tensors(_state(trainer))])
                peaks.append(
                    kept + peak_bytes(lambda t=trainer, b=batch: t._train_step(b, self.network.rows, 1))
                )
            seconds: list[list[float]] = [[] for _ in made]
            for _ in range(self.rounds):
                for taken, (trainer, batch, _) in zip(seconds, made, strict=True):
                    own = []
                    for _ in range(self.steps):
                        collective.barrier()
                        start = time.perf_counter()
                        trainer._train_step(batch, self.network.rows, 1)
                        collective.barrier()
                        own.append(time.perf_counter() - start)
                    taken.append(median(own))
        return json.dumps([seconds, peaks])

    def _trainer(self, config: TrainConfig, collective: Collective, folder: str, opened: ExitStack) -> Any:
        place = torch.device("cpu")
        torch.manual_seed(0)
        mesh = RankMesh.of(collective, config.axes)
        module = self.network.spec.build()
        # All ranks of a replica have the same rows.
        inputs, labels = self._rows(config, mesh.data_rank)
        sample = (inputs[:2],)
        pipeline = None
        if mesh.cuts_network:
            num_micro = config.gradient_accumulation
            pipeline = shard_network(module, mesh, config.parallelism, num_micro, sample, place)
        sync = wrap_network(config, UserObjects(), module, mesh, place)
        log = opened.enter_context(RunLog(folder, writes=False))
        observation = opened.enter_context(Observation.of(config, mesh, place))
        status, steps = Status(), Steps(config.batch_sizes, 3 * config.batch_size)
        train_state = TrainState(
            config,
            mesh,
            make_heads(config, UserObjects()),
            sync,
            make_rates("constant", sync.optimizer, steps.total, 0),
            Callbacks([]),
            log,
            observation,
            steps,
            place,
            UserObjects(),
            pipeline,
        )
        module.train()
        batch = Batch(inputs=(inputs,), labels=(labels,), weight=None)
        buckets = [bucket.buffer for bucket in getattr(sync, "_buckets", [])]

        def held() -> list[torch.Tensor]:
            return [*module.parameters(), *module.buffers(), *buckets, inputs, labels]

        return Trainer(config, mesh, train_state, Recovery(config, mesh, status), status), batch, held

    def _rows(self, config: TrainConfig, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(data_rank)
        rows = self.network.rows // config.num_copies
        made = []
        for shape, dtype in (self.network.inputs, self.network.labels):
            size = (rows, *shape)
            if dtype == "int64":
                made.append(torch.randint(0, VOCAB, size, generator=generator))
            else:
                made.append(torch.randn(size, generator=generator))
        return made[0], made[1]


def _state(trainer: Trainer) -> list[object]:
    return [value for entry in trainer._sync.optimizer.state.values() for value in entry.values()]


def compare(
    network: Network, rounds: int, steps: int
) -> tuple[ParallelismPlan, list[list[float]], list[int]]:
    """Returns the plan, the seconds of the rounds of each mesh, and the largest peak of a rank."""
    # An idle gang is slow at first, so the plan is made after another gang has run.
    plan = plan_parallelism(network.spec, network.batch, RANKS, loss=network.loss, repeats=max(3, rounds))
    meshes = [mesh for mesh in plan.meshes if mesh.fits]
    plan = replace(plan, meshes=tuple(meshes))
    configs = [network.config(mesh.parallelism, mesh.num_micro) for mesh in meshes]
    work = Rounds(network, configs, rounds, steps)
    texts = run_spawned(RANKS, "torch", work, timeout_seconds=300)
    found = [json.loads(text) for text in texts]
    peaks = [max(peaks[index] for _, peaks in found) for index in range(len(meshes))]
    return plan, found[0][0], peaks


def report(network: Network, plan: ParallelismPlan, seconds: list[list[float]], peaks: list[int]) -> None:
    """Prints the table and the value of the choice."""
    taken = [median(own) for own in seconds]
    chosen = plan.chosen
    assert chosen is not None
    lines = []
    whole = next(index for index, mesh in enumerate(plan.meshes) if not mesh.cuts_network)
    for mesh, own, measured, peak in zip(plan.meshes, seconds, taken, peaks, strict=True):
        shares = (
            mesh.step_seconds / plan.meshes[whole].step_seconds,
            harness.median_ratio(own, seconds[whole]),
        )
        lines.append(
            [
                mesh.name + (" <- chosen" if mesh is chosen else ""),
                str(mesh.num_micro),
                f"{1e3 * mesh.step_seconds:.1f}",
                f"{1e3 * measured:.1f}",
                *(f"{share:.2f}" for share in shares),
                f"{shares[0] / shares[1]:.2f}",
                f"{mesh.peak / 2**20:.1f}",
                f"{peak / 2**20:.1f}",
                f"{mesh.peak / peak:.3f}",
            ]
        )
    header = ["mesh", "micro-batches", "step, ms", "measured", "of data parallelism", "measured", "ratio"]
    header += ["peak, MiB", "measured", "ratio"]
    harness.print_table(
        f"plan_parallelism: {network.name}, {network.rows} rows on {RANKS} ranks", header, lines
    )
    first = seconds[plan.meshes.index(chosen)]
    # Compares by the rounds' ratios, because medians of all rounds would depend on the machine's speed.
    best = min(range(len(taken)), key=lambda index: harness.median_ratio(seconds[index], seconds[whole]))
    worth = harness.median_ratio(first, seconds[best])
    print(plan.facts)
    print(
        f"first choice: {chosen.name}; best measured: {plan.meshes[best].name}; the choice takes {worth:.2f} "
        "of its time"
    )


def draw(path: str, results: Sequence[tuple[Network, ParallelismPlan, list[list[float]], list[int]]]) -> None:
    """Draws predicted and measured steps and peaks as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4 * len(results)), layout="constrained")
    axes = figure.subplots(len(results), 2, squeeze=False)
    for (network, plan, seconds, peaks), (times, sizes) in zip(results, axes, strict=True):
        names = [mesh.name for mesh in plan.meshes]
        places = range(len(names))
        whole = next(index for index, mesh in enumerate(plan.meshes) if not mesh.cuts_network)
        predicted_shares = [m.step_seconds / plan.meshes[whole].step_seconds for m in plan.meshes]
        measured_shares = [harness.median_ratio(own, seconds[whole]) for own in seconds]
        for at, predicted, measured, title in (
            (times, predicted_shares, measured_shares, "step, relative to data parallelism"),
            (sizes, [m.peak / 2**20 for m in plan.meshes], [p / 2**20 for p in peaks], "peak of a rank, MiB"),
        ):
            at.barh([y - 0.2 for y in places], predicted, height=0.4, label="predicted")
            at.barh([y + 0.2 for y in places], measured, height=0.4, label="measured")
            at.set_yticks(list(places), names)
            at.invert_yaxis()
            at.set_xlabel(title)
            at.set_title(network.name)
        times.legend()
    figure.savefig(path, format="png", dpi=110)


def main() -> None:
    options = harness.parse(__doc__, rows=(32, 16), steps=(3, 2))
    results = []
    for network in networks(options.rows, tiny=options.tiny):
        results.append((network, *compare(network, options.repeats, options.steps)))
        report(*results[-1])
    if options.chart:
        draw(options.chart, results)


if __name__ == "__main__":
    main()
