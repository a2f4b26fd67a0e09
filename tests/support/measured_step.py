"""Peak memory and seconds of the trainer's step, without reading rows, to compare plans with."""

import json
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from peak_memory import peak_bytes
from small_training import bare_config
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.techniques import first_made, techniques_of
from ringspark.estimators.training.batch_sizes import Steps
from ringspark.estimators.training.callbacks import Callbacks
from ringspark.estimators.training.checkpoint.resume import Recovery
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.history import RunLog
from ringspark.estimators.training.make_heads import make_heads
from ringspark.estimators.training.observation.observation import Observation
from ringspark.estimators.training.optimizers.schedules import make_rates
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.precision import keep_norms_fp32
from ringspark.estimators.training.rank_network import wrap_network
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
SEQ, VOCAB = 64, 512


class MeasuredStep:
    """The trainer's step on one batch of one rank."""

    def __init__(
        self,
        config: TrainConfig,
        module: nn.Module,
        mesh: RankMesh,
        rows: tuple[torch.Tensor, torch.Tensor],
        opened: ExitStack,
    ) -> None:
        place, objects, status = torch.device("cpu"), UserObjects(), Status()
        inputs, labels = rows
        if config.precision != "fp32":
            keep_norms_fp32(module)
        stages = None
        if mesh.cuts_network:
            made = (each.shard(config, module, mesh, (inputs[:2],), place) for each in techniques_of(config))
            stages = first_made(made)
        apply_activation_checkpoint(module, segment_policy(config.gradient_checkpointing))
        self._sync = wrap_network(config, objects, module, mesh, place)
        steps = Steps(config.batch_sizes, 3 * config.batch_size)
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        state = TrainState(
            config,
            mesh,
            make_heads(config, objects),
            self._sync,
            make_rates("constant", self._sync.optimizer, steps.total, 0),
            Callbacks([]),
            opened.enter_context(RunLog(folder, writes=False)),
            opened.enter_context(Observation.of(config, mesh, place)),
            steps,
            place,
            objects,
            stages,
        )
        self._trainer = Trainer(config, mesh, state, Recovery(config, mesh, status), status)
        self._module, self._num_rows = module.train(), config.batch_size
        self._batch = Batch(inputs=(inputs,), labels=(labels,), weight=None)

    def __call__(self) -> None:
        self._trainer._train_step(self._batch, self._num_rows, 1)

    def peak(self) -> int:
        """Returns the peak bytes of a step, with the optimizer's state in place."""
        self()
        self()
        self._sync.optimizer.zero_grad()
        state = [value for entry in self._sync.optimizer.state.values() for value in entry.values()]
        buckets = [bucket.buffer for bucket in getattr(self._sync, "_buckets", [])]
        held = [*self._module.parameters(), *self._module.buffers(), *buckets, *_tensors(state)]
        return _num_bytes([*held, *self._batch.inputs, *self._batch.labels]) + peak_bytes(self)


def _tensors(values: Iterable[object]) -> list[torch.Tensor]:
    """Returns the tensors among values, also in lists and tuples."""
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


def draw_columns(model: ModelSpec, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and labels of one of the three networks; the MLP gets 64 times as many rows."""
    if model is MLP:
        inputs = torch.randn(64 * rows, 256)
    else:
        inputs = torch.randint(0, 512, (rows, 64)) if model is TRANSFORMER else torch.randn(rows, 3, 32, 32)
    return inputs, torch.randint(0, CLASSES, (len(inputs),))


def compare(model: ModelSpec, rows: int, **settings: Any) -> tuple[MemoryPlan, int]:
    """Returns the plan of one rank, and the measured peak of its step in bytes."""
    torch.manual_seed(0)
    columns = draw_columns(model, rows)
    plan = plan_memory(model, columns, **settings)
    given = {re.sub("([A-Z])", r"_\1", name).lower(): value for name, value in settings.items()}
    common = {"losses": ("cross_entropy",), "batch_size": len(columns[1]), "collective": "local"}
    config = bare_config(**common, **given)
    with ExitStack() as opened:
        mesh = RankMesh.of(LocalCollective())
        return plan, MeasuredStep(config, model.build(), mesh, columns, opened).peak()


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

    def config(self, parallelism: Mapping[str, Any], num_micro: int, ranks: int) -> TrainConfig:
        given = {"losses": (self.loss,), "batch_size": self.rows, "num_workers": ranks, "collective": "torch"}
        given |= {"parallelism": dict(parallelism), "gradient_accumulation": num_micro}
        return bare_config(model=self.spec, **given)

    def draw(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns inputs and labels of some rows."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for shape, dtype in (self.inputs, self.labels):
            if dtype == "int64":
                made.append(torch.randint(0, VOCAB, (rows, *shape), generator=generator))
            else:
                made.append(torch.randn((rows, *shape), generator=generator))
        return made[0], made[1]


def make_networks(rows: int, *, tiny: bool) -> list[Network]:
    """Returns a transformer, a wide MLP whose gradients are larger than its rows, and a mixture."""
    width, depth = (64, 2) if tiny else (256, 6)
    sizes = {"vocab_size": VOCAB, "max_seq_len": SEQ, "dim": width, "depth": depth, "num_heads": 4}
    wide = [128] * 4 if tiny else [2048] * 7
    ids = ((SEQ,), "int64")
    texts: dict[str, Any] = {"rows": rows, "inputs": ids, "labels": ids, "loss": "cross_entropy"}
    return [
        Network(name="transformer, many rows", spec=ModelSpec("transformer_lm", sizes), **texts),
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
            **texts,
        ),
    ]


@dataclass(frozen=True)
class Rounds:
    """Runs every mesh on each rank in interleaved rounds. Returns seconds by mesh and round, and peaks."""

    network: Network
    configs: list[TrainConfig]
    rounds: int
    steps: int

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        with ExitStack() as opened:
            made = [self._step(config, collective, opened) for config in self.configs]
            peaks = [step.peak() for step in made]
            seconds: list[list[float]] = [[] for _ in made]
            for _ in range(self.rounds):
                for taken, step in zip(seconds, made, strict=True):
                    own = []
                    for _ in range(self.steps):
                        collective.barrier()
                        start = time.perf_counter()
                        step()
                        collective.barrier()
                        own.append(time.perf_counter() - start)
                    taken.append(median(own))
        return json.dumps([seconds, peaks])

    def _step(self, config: TrainConfig, collective: Collective, opened: ExitStack) -> MeasuredStep:
        torch.manual_seed(0)
        mesh = RankMesh.of(collective, config.axes)
        # All ranks of a replica have the same rows.
        rows = self.network.draw(self.network.rows // config.num_copies, mesh.data.rank)
        return MeasuredStep(config, self.network.spec.build(), mesh, rows, opened)
