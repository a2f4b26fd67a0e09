"""`plan_memory` against the measured peak of the trainer's step, in several configurations.

The measured value is the peak of torch's CPU allocations during one optimizer step in steady state. It is the
sum of the existing tensors (parameters, buffers, optimizer state and batch) and of every allocation and
release in the step, as `torch.profiler` records them. The values are counted, not timed.

    python tests/benchmarks/plan_memory.py --chart docs/plan_memory.png

`--rows` is the batch size.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import harness
import torch
from peak_memory import peak_bytes

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel import STRATEGIES, SyncSettings
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.batch_sizes import Steps
from ringspark.estimators.training.build import build_optimizer
from ringspark.estimators.training.callbacks import Callbacks
from ringspark.estimators.training.checkpoint.resume import Recovery
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.history import RunLog
from ringspark.estimators.training.make_heads import make_heads
from ringspark.estimators.training.observation.observation import Observation
from ringspark.estimators.training.optimizers.schedules import make_rates
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.precision import keep_norms_fp32
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects, segment_policy
from ringspark.estimators.training.train_state import TrainState
from ringspark.estimators.training.trainer import Trainer
from ringspark.extras.planning.memory.plan import plan_memory
from ringspark.extras.planning.memory.report import MemoryPlan
from ringspark.models import ModelSpec, apply_activation_checkpoint

CLASSES = 10
MLP = ModelSpec("mlp", {"in_features": 256, "hidden": [512] * 12, "out_features": CLASSES})
_TRANSFORMER = {"vocab_size": 512, "max_seq_len": 64, "dim": 128, "depth": 9, "num_heads": 4}
TRANSFORMER = ModelSpec("transformer_classifier", _TRANSFORMER | {"out_features": CLASSES, "dropout": 0.1})
RESNET = ModelSpec("resnet", {"in_channels": 3, "out_features": CLASSES, "depths": [3, 3, 3], "width": 16})
ROWS_FACTOR = {MLP: 64, TRANSFORMER: 1, RESNET: 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network with some settings; Params by name."""

    model: ModelSpec
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        changed = ", ".join(str(value) for value in self.settings.values())
        return f"{self.model.target.split('_')[0]}: {changed or 'fp32'}"

    def columns(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows *= ROWS_FACTOR[self.model]
        inputs = {
            MLP: lambda: torch.randn(rows, 256),
            TRANSFORMER: lambda: torch.randint(0, 512, (rows, 64)),
            RESNET: lambda: torch.randn(rows, 3, 32, 32),
        }[self.model]()
        return inputs, torch.randint(0, CLASSES, (rows,))


def case(model: ModelSpec, **settings: object) -> Case:
    return Case(model=model, settings=settings)


CASES = (
    case(MLP),
    case(MLP, precision="bf16"),
    case(MLP, gradientCheckpointing="sqrt", optimizer="sgd"),
    case(MLP, activationCompression="bits"),
    case(MLP, gradientAccumulation=4, optimizer="adafactor"),
    case(TRANSFORMER),
    case(TRANSFORMER, precision="bf16"),
    case(TRANSFORMER, precision="fp16"),
    case(TRANSFORMER, gradientCheckpointing="all"),
    case(TRANSFORMER, gradientCheckpointing="sqrt"),
    case(TRANSFORMER, gradientCheckpointing="sqrt", precision="bf16"),
    case(TRANSFORMER, gradientAccumulation=4),
    case(TRANSFORMER, activationCompression="int8"),
    case(TRANSFORMER, activationOffload="disk"),
    case(TRANSFORMER, optimizer="adafactor"),
    case(RESNET, optimizer="sgd"),
    case(RESNET, precision="bf16"),
    case(RESNET, gradientCheckpointing="all"),
    case(RESNET, gradientAccumulation=4),
)


def measured(config: TrainConfig, model: ModelSpec, inputs: torch.Tensor, labels: torch.Tensor) -> int:
    """Returns the peak of one step of the trainer, with the optimizer's state in place."""
    device = torch.device("cpu")
    module = model.build()
    if config.precision != "fp32":
        keep_norms_fp32(module)
    if config.gradient_checkpointing != "none":
        apply_activation_checkpoint(module, segment_policy(config.gradient_checkpointing))
    collective = LocalCollective()
    sync = STRATEGIES["data_parallel"]().prepare(
        module,
        lambda net: build_optimizer(config.optimizer, net, (), config.learning_rate, config.weight_decay),
        RankMesh.of(collective),
        SyncSettings(micro_batches=config.gradient_accumulation),
    )
    batch = Batch(inputs=(inputs,), labels=(labels,), weight=None)
    with tempfile.TemporaryDirectory() as folder:
        mesh, status, log = RankMesh.of(collective), Status(), RunLog(folder, writes=False)
        steps = Steps(config.batch_sizes, 3 * config.batch_size)
        rates = make_rates("constant", sync.optimizer, steps.total, 0)
        heads = make_heads(config, UserObjects())
        observation = Observation.of(config, mesh, device)
        train_state = TrainState(
            config, mesh, heads, sync, rates, Callbacks([]), log, observation, steps, device, UserObjects()
        )
        trainer = Trainer(config, mesh, train_state, Recovery(config, mesh, status), status)
        module.train()

        def step() -> None:
            trainer._train_step(batch, batch.num_rows, 1)

        step()
        step()
        sync.optimizer.zero_grad()
        state = [v for entry in sync.optimizer.state.values() for v in entry.values()]
        held = [*module.parameters(), *module.buffers(), *_tensors(state), inputs, labels]
        return _num_bytes(held) + peak_bytes(step)


def _tensors(values: Iterable[object]) -> list[torch.Tensor]:
    """Yields the tensors among values, also in lists and tuples."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def compare(entry: Case, rows: int) -> tuple[MemoryPlan, int]:
    """Returns the planned and measured bytes of a case."""
    torch.manual_seed(0)
    inputs, labels = entry.columns(rows)
    plan = plan_memory(entry.model, (inputs, labels), **entry.settings)  # type: ignore[arg-type]
    config = TrainConfig(
        shards_uri="",
        run_uri="",
        input_columns=("x",),
        label_columns=("y",),
        losses=("cross_entropy",),
        batch_size=len(labels),
        collective="local",
        reader="arrow",
        **{re.sub("([A-Z])", r"_\1", name).lower(): value for name, value in entry.settings.items()},  # type: ignore[arg-type]
    )
    return plan, measured(config, entry.model, inputs, labels)


def save_chart(path: str, names: Sequence[str], planned: Sequence[int], peaks: Sequence[int]) -> None:
    """Bars of planned and measured peaks side by side, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.38 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(names))
    axes.barh([y - 0.2 for y in places], [n / 2**20 for n in planned], height=0.4, label="planned")
    axes.barh([y + 0.2 for y in places], [n / 2**20 for n in peaks], height=0.4, label="measured")
    for y, plan, peak in zip(places, planned, peaks, strict=True):
        axes.text(max(plan, peak) / 2**20, y, f" {plan / peak:.3f}", va="center", fontsize=8)
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.01)
    axes.set_xlabel("MiB at the peak of one step; the number is planned / measured")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Prints the table. Draws a chart if a path is given."""
    args = harness.parse(__doc__, rows=(16, 4))
    lines, results = [], []
    for entry in CASES:
        plan, peak = compare(entry, args.rows)
        results.append((entry.name, plan.peak, peak))
        sizes = [f"{count / 2**20:.2f}" for count in (plan.peak, peak)]
        lines.append([entry.name, *sizes, f"{plan.peak / peak:.3f}"])
        print(*lines[-1], flush=True)
    harness.print_table(
        "plan_memory: peak of one optimizer step, MiB", ["", "planned", "measured", "ratio"], lines
    )
    if args.chart:
        save_chart(args.chart, *zip(*results, strict=True))


if __name__ == "__main__":
    main()
