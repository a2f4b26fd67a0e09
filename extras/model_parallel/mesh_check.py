"""Checks on the driver that a network sharded over a mesh computes the same as the whole network.

Threads run all ranks of one replica on random rows: one evaluation pass and one training step. Without this
check workers could silently train another network, for example if `forward` reads a sharded layer's weights
itself. Dropout and noise never cause a refusal. The driver holds up to four times the weights during the
check.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.in_process import RankError, run_in_turns
from ringspark.estimators.options.mesh import MODEL_AXES
from ringspark.estimators.parallel import SyncSettings, synchronize_gradients
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.arguments import read_layout
from ringspark.estimators.training.batch_transforms import try_transform
from ringspark.estimators.training.check.probe import PROBE_ROWS, random_samples, samples
from ringspark.estimators.training.feed import Batch, zeros
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.sums import MicroBatchOutput
from ringspark.estimators.training.passes import Passes, WholePasses
from ringspark.estimators.training.precision import LossScaler
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.step import Recipe
from ringspark.extras.model_parallel.pipeline.trainer_passes import PipelinedPasses
from ringspark.extras.model_parallel.shard_network import shard_network
from ringspark.extras.model_parallel.tensor.loss import scores_of
from ringspark.models.adapters import find_library
from ringspark.models.batch_norm import accept_single_rows
from ringspark.models.generators import keep_shared_generators, seed_rank
from ringspark.models.meta_device import copy_module
from ringspark.pipelines import ShardManifest

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")

# Largest accepted difference, relative to the largest element of the expected tensor (single elements may be
# small differences of large numbers). Shards sum in another order, which changes fp32 results by about 1e-6;
# real mistakes differ by 1e-2 and more.
TOLERANCE = 1e-3
# Accepted difference of a gradient, relative to the largest element of all gradients: some gradients are zero
# except for rounding, such as a bias's before a softmax.
ZERO_TOLERANCE = 1e-5
# Relative change of the weights, to see how much rounding changes the results of an ill-conditioned network.
_ROUNDING = 8 * torch.finfo(torch.float32).eps

# Option of `parallelism` -> remedy if the network does not work with it.
_REMEDIES = {
    "plan": "a 'column' layer passes on a shard of its outputs, which only a 'row' layer takes: name both "
    "layers of each pair in the plan, with nothing in between that mixes features, or use 'column_joined'",
    "tensor": "let forward call the sharded layers and not read their weights itself, or leave 'tensor' out "
    "of parallelism",
    "pipeline": "let links() return everything that forward does, in the same order, or leave 'pipeline' out "
    "of parallelism",
    "sequence": "let each layer that uses several tokens get them from the network's `rows`, or leave "
    "'sequence' out of parallelism",
    "expert": "leave 'expert' out of parallelism",
}


class _Key(NamedTuple):
    """Identifies an output or a gradient."""

    mode: str  # "training" or "evaluation"
    micro_batch: int | None  # None for a gradient
    name: str  # in messages


_Results = dict[_Key, torch.Tensor]


class _Difference(NamedTuple):
    key: _Key
    size: float  # largest difference between the result and the expected one
    scale: float  # largest expected element


def check_mesh(config: TrainConfig, objects: UserObjects, manifest: ShardManifest, module: nn.Module) -> None:
    """Raises ValueError if the ranks' outputs or gradients differ from the whole network's, or a rank fails.

    `module` is the whole network, on the CPU.
    """
    name, mesh = type(module).__name__, config.parallelism
    remedy = "; ".join(
        words
        for key, words in _REMEDIES.items()
        if (mesh.plan is not None and key == "plan") or (key in MODEL_AXES and mesh.size(key) > 1)
    )
    with keep_shared_generators():
        for zero_ids in (False, True):
            check = _MeshCheck(config, objects, manifest, zero_ids)
            try:
                expected = check.compute_whole(module)
                break
            except Exception as error:  # user code may raise anything, because random rows are not real data
                failure = error
        else:
            _log.warning(
                "parallelism %s is not checked, because %s fails on random rows: %s", mesh, name, failure
            )
            return
        if config.axes["expert"] > 1:
            check.run_without_rows(module)
        try:
            differences = check.compare(module, expected)
        except RankError as error:
            cause = error.__cause__
            raise ValueError(
                f"model {name} does not run under parallelism={mesh} ({type(cause).__name__}: {cause}); "
                f"{remedy}"
            ) from cause
        if differences:
            # Another seed and rounding errors may change the whole network's results about as much.
            again = check.compute_whole(_with_rounding_errors(module), seed=1)
            moved = {d.key: d.size for d in _differences(expected, again, tolerance=0.0)}
            differences = [d for d in differences if d.size > 10 * moved.get(d.key, 0.0)]
    if differences:
        # A difference in an output also explains the differences in gradients.
        of_outputs = [d for d in differences if d.key.micro_batch is not None]
        worst = max(of_outputs or differences, key=lambda d: d.size / max(d.scale, 1e-30))
        raise ValueError(
            f"model {name} under parallelism={mesh} does not compute the same as the whole network: in "
            f"{worst.key.mode} mode, {worst.key.name} is off by {worst.size:.3g}, and its largest element "
            f"should be {worst.scale:.3g}; {remedy}"
        )


class _MeshCheck:
    """Compares the same passes of the whole network and of all ranks."""

    def __init__(
        self, config: TrainConfig, objects: UserObjects, manifest: ShardManifest, zero_ids: bool
    ) -> None:
        self._sizes = dict(config.axes) | {"data": 1, "shard": 1}
        # With experts, one rank has no rows in the second micro-batch, only other ranks' tokens.
        num_micro = 2 if self._sizes["expert"] > 1 else min(config.gradient_accumulation, 2)
        self._config = replace(
            config,
            precision="fp32",
            on_non_finite="stop",
            activation_compression="none",  # codecs round shards in another way than the whole
            activation_offload="none",
            gradient_accumulation=num_micro,
            batch_size=max(config.batch_size, num_micro * config.num_workers),
            batch_size_schedule=(),
        )
        self._num_rows = PROBE_ROWS * num_micro * self._sizes["expert"]
        names, self._layout = config.input_columns, read_layout(manifest, config.input_columns)
        given = random_samples(names, manifest, self._num_rows, zero_ids=zero_ids)
        # Arguments of `forward` in training and in prediction.
        self._training_inputs = self._prediction_inputs = given
        if objects.transform_batch is not None:
            labels = tuple(zeros(manifest.array(label), self._num_rows) for label in config.label_columns)
            self._training_inputs, _ = try_transform(
                objects.transform_batch, "transformBatch", given, labels, self._layout
            )
        if (prepare := objects.transform_in_prediction) is not None:
            self._prediction_inputs, _ = try_transform(
                prepare, "transformInPrediction", given, None, self._layout
            )
        # To measure the cost of pipeline stages; None balances the stages by parameters.
        self._costs = None if objects.transform_batch is not None else samples(names, manifest)
        self._heads = [Head(label=name, loss=_projected) for name in config.label_columns]
        self._training = self._deal(self._training_inputs)
        self._prediction = self._deal(self._prediction_inputs)

    def compute_whole(self, module: nn.Module, seed: int = 0) -> _Results:
        network = _with_shared_weights(module)
        buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
        sync = GradientSync(network, _optimizer(network))
        passes = self._whole_passes(sync)
        found: _Results = {}
        for share in range(len(self._training)):
            # Each share starts from the same running statistics: a rank sees only its own share.
            with torch.no_grad():
                for buffer, start in buffers:
                    buffer.copy_(start)
            found |= self._run(passes, sync, share, seed)
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                found[_gradient_of(name)] = _dense_gradient(parameter)
        return found

    def run_without_rows(self, module: nn.Module) -> None:
        """Raises ValueError if the network fails on a batch without rows, as expert parallelism may give."""
        network = _with_shared_weights(module).eval()
        if (support := find_library(network)) is not None:
            support.prepare_experts(network)
        try:
            with torch.no_grad():
                network(*(values[:0] for values in self._prediction_inputs))
        except Exception as error:
            raise ValueError(
                f"model {type(module).__name__} cannot take a batch without rows ({error}), but a worker "
                "along 'expert' runs one if the last batch is short; write x.flatten(1) instead of "
                "x.view(x.shape[0], -1), or leave 'expert' out of parallelism"
            ) from error

    def compare(self, module: nn.Module, expected: _Results) -> list[_Difference]:
        """Runs all ranks of the mesh; returns their differences from `expected`. Raises RankError."""
        found = run_in_turns(math.prod(self._sizes.values()), partial(self._compare, module, expected))
        return [difference for own in found for difference in own]

    def _compare(self, module: nn.Module, expected: _Results, world: Collective) -> list[_Difference]:
        mesh = RankMesh.of(world, self._sizes)
        network = _with_shared_weights(module)
        num_micro = self._config.gradient_accumulation
        pipeline = shard_network(network, mesh, self._config.parallelism, num_micro, self._costs, _CPU)
        sync = synchronize_gradients(network, _optimizer, mesh, SyncSettings(micro_batches=num_micro))
        passes: Passes
        if pipeline is not None:
            passes = PipelinedPasses(pipeline, self._recipe(sync), sync, mesh)
        else:
            passes = self._whole_passes(sync)
        found = self._run(passes, sync, mesh.data.rank, 0)
        sync.reduce()
        layout = layout_of(network)
        assert layout is not None
        own = dict(expected)
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                key = _gradient_of(layout.full_name(name))
                found[key], own[key] = _dense_gradient(parameter), layout.shard(name, expected[key])
        return list(_differences(own, found, TOLERANCE))

    def _run(self, passes: Passes, sync: GradientSync, share: int, seed: int) -> _Results:
        """Returns evaluation and training outputs for data rank `share`; leaves gradients in `.grad`."""
        seed_rank(seed, 0, 0)
        found: _Results = {}
        sync.network.eval()
        own = self._prediction[share]
        with torch.no_grad():
            for batch in own:
                found |= _outputs("evaluation", passes.evaluate(batch, keeps_outputs=True))
            for _ in range(self._config.gradient_accumulation - len(own)):
                passes.evaluate_without_rows(self._prediction_inputs)
        sync.module.train()
        rows, num_rows = self._training[share], float(self._num_rows)
        with _ConstantNoise():  # type: ignore[no-untyped-call]
            seen = passes.train(rows, num_rows, inputs=self._training_inputs, keeps_outputs=True)
            for _ in range(passes.steps_in_flight):
                passes.drain()
        return found | _outputs("training", seen)

    def _recipe(self, sync: GradientSync) -> Recipe:
        criterion = Criterion(self._heads, _CPU, scores_of(sync.network))
        return Recipe(config=self._config, criterion=criterion, scaler=LossScaler("fp32", _CPU), device=_CPU)

    def _whole_passes(self, sync: GradientSync) -> WholePasses:
        return WholePasses(self._recipe(sync), sync, lambda batch: nullcontext(), lambda *_: None)

    def _deal(self, inputs: tuple[torch.Tensor, ...]) -> list[list[Batch]]:
        """Returns each data rank's micro-batches; the last of several data ranks gets one fewer."""
        num_micro, num_shares = self._config.gradient_accumulation, self._sizes["expert"]
        rows = torch.arange(self._num_rows) // PROBE_ROWS  # number of the micro-batch
        batch = Batch(inputs=inputs, labels=(rows,) * len(self._heads), weight=None, layout=self._layout)
        micro_batches = batch.split(num_micro * num_shares)
        dealt = [micro_batches[n * num_micro : (n + 1) * num_micro] for n in range(num_shares)]
        if num_shares > 1:
            dealt[-1].pop()
        return dealt


class _ConstantNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by constants, so that shards and the whole tensor get the same values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            values, probability, is_training = args
            if is_training and probability < 1:
                return values / (1 - probability), torch.ones_like(values, dtype=torch.bool)
        result = func(*args, **kwargs)
        if name in _NOISE:
            result.fill_(_NOISE[name])
        return result


_NOISE = dict.fromkeys(("bernoulli_", "bernoulli", "randn", "randn_like", "normal_"), 1.0)
_NOISE |= dict.fromkeys(("rand", "rand_like", "uniform_"), 0.5)


def _projected(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Returns a loss per row that weights each element of the output differently."""
    factors = torch.randn(output.shape[1:], generator=torch.Generator().manual_seed(0))
    return (output * factors).flatten(1).mean(1) if output.dim() > 1 else output * factors


def _with_shared_weights(module: nn.Module) -> nn.Module:
    """Copies the network and its buffers, but shares the parameters' memory."""
    shared = {id(parameter.untyped_storage()) for parameter in module.parameters()}
    network = copy_module(module, take=lambda own: own if id(own) in shared else own.clone())
    accept_single_rows(network)
    return network


def _with_rounding_errors(module: nn.Module) -> nn.Module:
    network = copy_module(module)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + _ROUNDING * torch.randn_like(parameter))
    return network


def _optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer that never steps; `GradientSync` finds the trained parameters in it."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return torch.optim.SGD(parameters or [torch.zeros(1)], lr=0.0)


def _dense_gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _gradient_of(name: str) -> _Key:
    return _Key("training", None, f"the gradient of {name!r}")


def _outputs(mode: str, seen: Sequence[MicroBatchOutput]) -> _Results:
    return {
        _Key(mode, int(label[0]), f"output {number}"): output
        for micro_batch in seen
        for number, (output, label) in enumerate(micro_batch.pairs)
    }


def _differences(expected: _Results, found: _Results, tolerance: float) -> Iterator[_Difference]:
    """Yields the differences above the tolerance, which is relative to the largest expected element."""
    most = max((_largest(v) for key, v in expected.items() if key.micro_batch is None), default=0.0)
    for key, values in found.items():
        wanted = expected[key]
        scale = _largest(wanted)
        if values.shape != wanted.shape:
            raise ValueError(
                f"in {key.mode} mode {key.name} has shape {tuple(values.shape)}, but "
                f"{tuple(wanted.shape)} in the whole network"
            )
        # Equal infinite elements and NaN in both count as 0.
        is_same = (wanted == values) | (wanted.isnan() & values.isnan())
        size = _largest((wanted - values).masked_fill(is_same, 0.0).nan_to_num(nan=math.inf), math.inf)
        allowed = tolerance * scale
        if key.micro_batch is None and tolerance:
            allowed = max(allowed, ZERO_TOLERANCE * most)
        if size > allowed:
            yield _Difference(key, size, scale)


def _largest(values: torch.Tensor, infinite: float = 0.0) -> float:
    """Returns the largest absolute value, or 0 if there are none. Counts NaN as 0, infinity as `infinite`."""
    sizes = values.detach().abs().nan_to_num(nan=0.0, posinf=infinite)
    return float(sizes.max()) if sizes.numel() else 0.0
