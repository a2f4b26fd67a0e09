"""Checks on the driver that the copies of a network that train and predict compute what the network does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ringspark.estimators.training.arguments import read_layout
from ringspark.estimators.training.batch_transforms import prepare_inputs, try_transform
from ringspark.estimators.training.build import build_optimizer
from ringspark.estimators.training.check.probe import PROBE_ROWS, random_samples
from ringspark.estimators.training.check.untouched import untouched
from ringspark.estimators.training.feed import zeros
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models.generators import keep_shared_generators, seed_constructor
from ringspark.models.meta_device import fill, find_changed_buffers, unsaved_buffers
from ringspark.models.network_copy import HOOKS
from ringspark.models.outputs import as_outputs
from ringspark.models.process_state import fork_generators, ignore_warnings
from ringspark.pipelines import ShardManifest

T = TypeVar("T")
Rows = tuple[torch.Tensor, ...]
# Output or gradient -> its value.
Pass = dict[str, torch.Tensor | None]

_log = logging.getLogger(__name__)

# Largest accepted difference, relative to the largest element of the expected tensor.
_TOLERANCE = 1e-4


def check_copy(config: TrainConfig, objects: UserObjects, copied: nn.Module, manifest: ShardManifest) -> None:
    """Raises ValueError if a training pass of the copy differs from one of `objects.module`."""
    module = objects.module

    # A pass would initialize the user's lazy layers.
    def train(rows: Rows) -> Pass:
        return _train(module, rows, copied)

    made = None if _is_lazy(module) else _try_rows(config, objects, manifest, train)
    if made is None:
        return
    rows, expected = made
    difference = _compare(expected, lambda: _train(copied, rows, module))
    # A network may also differ from itself, for example if it reads the time.
    if difference and not _compare(expected, lambda: train(rows)):
        raise ValueError(
            f"model {type(module).__name__} computes something else once it is pickled for the workers: "
            f"{difference}; let its functions use the network only through `self` and closures, or give its "
            "class as a ModelSpec"
        )


def check_groups(config: TrainConfig, given: UserObjects, copied: UserObjects) -> None:
    """Raises ValueError if a user's optimizer function groups the parameters of the copy differently."""
    if not callable(given.optimizer) or config.has_own_step or _is_lazy(given.module):
        return

    def groups(objects: UserObjects) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in objects.module.named_parameters()}
        chosen: Any = objects.optimizer
        with _unhooked(objects.module):
            made = build_optimizer(
                chosen, objects.module, config.parameter_groups, config.learning_rate, config.weight_decay
            )
        # Sorted, because the order within a group, which may come from a set, has no effect.
        return [sorted(names.get(id(p), "?") for p in group["params"]) for group in made.param_groups]

    try:
        with ignore_warnings():
            one, two = groups(given), groups(copied)
    except Exception as error:  # user code may raise anything; the optimizer check reports it
        _log.info("the optimizer function fails: %s", error)
        return
    if one != two:
        moved = [name for group, own in zip_longest(one, two, fillvalue=()) for name in {*group} - {*own}]
        raise ValueError(
            f"the optimizer function groups the parameters differently on the workers, for example "
            f"{sorted(moved)[:3]}: workers train a copy of the network, and id(parameter) and `is` miss "
            "its parameters; choose them by shape or by an attribute of the parameter, or set parameterGroups"
        )


def check_prediction(
    config: TrainConfig, objects: UserObjects, module: nn.Module, skeleton: nn.Module, manifest: ShardManifest
) -> None:
    """Raises ValueError if `skeleton`, a meta-device copy, cannot predict after a pass in training."""
    if _is_lazy(module) or _is_lazy(skeleton):
        return
    name, shapes, kept = f"model {type(module).__name__}", _shapes(module), unsaved_buffers(module)
    with untouched(module):
        made = _try_rows(config, objects, manifest, lambda rows: _forward(module.train(), rows))
        if made is None:
            return
        rows, outputs = made
        if changed := dict(_shapes(module).items() ^ shapes.items()):
            raise ValueError(
                f"{name} cannot predict once it is trained: its forward pass creates or resizes "
                f"{sorted(changed)}, which no untrained network can load; register them in the constructor, "
                "in their final shape, or with persistent=False"
            )
        try:
            if (prepare := objects.transform_in_prediction) is not None:
                with untouched(prepare) if isinstance(prepare, nn.Module) else nullcontext():
                    if isinstance(prepare, nn.Module):
                        prepare.eval()
                    rows = prepare_inputs(prepare, rows)
            with torch.no_grad():
                expected = _forward(module.eval(), rows)
        except Exception as error:  # user code may raise anything; `probe` has run real shapes
            _log.info("%s fails on random rows: %s", name, error)
            return
        labels = len(config.label_columns)
        if not config.has_own_step and len(outputs) != labels == len(expected):
            raise ValueError(
                f"{name} returns {len(outputs)} tensors in training for the labels "
                f"{list(config.label_columns)}; return one per label in training as in evaluation"
            )

        def predict() -> Pass:
            fill(skeleton, module.state_dict())
            with torch.no_grad():
                return _forward(skeleton.eval(), rows)

        difference = _compare(expected, predict)
        # `fit` warns about changed buffers that no checkpoint holds.
        if difference and not find_changed_buffers(kept, unsaved_buffers(module)):
            raise ValueError(
                f"{name} cannot predict once it is trained: loaded from its state_dict, "
                f"{difference}; keep all that training changes in parameters and registered buffers, and let "
                "no other attribute be a view of them"
            )


def _is_lazy(module: nn.Module) -> bool:
    return any(map(is_lazy, (*module.parameters(), *module.buffers())))


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items() if torch.is_tensor(value)}


def _try_rows(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, run: Callable[[Rows], T]
) -> tuple[Rows, T] | None:
    """Runs random rows, then rows whose integers are 0, if random ones are no ids; None if both fail."""
    labels = tuple(zeros(manifest.array(label), PROBE_ROWS) for label in config.label_columns)
    layout, transform = read_layout(manifest, config.input_columns), objects.transform_batch
    for zero_ids in (False, True):
        rows = random_samples(config.input_columns, manifest, PROBE_ROWS, zero_ids=zero_ids)
        try:
            if transform is not None:
                rows, _ = try_transform(transform, "transformBatch", rows, labels, layout)
            return rows, run(rows)
        except Exception as error:  # user code may raise anything, because random rows are not real data
            _log.info("the model fails on random rows: %s", error)
    return None


def _forward(module: nn.Module, rows: Sequence[torch.Tensor]) -> Pass:
    with fork_generators(), keep_shared_generators(), ignore_warnings():
        seed_constructor(0)
        outputs = as_outputs(module(*(values.clone() for values in rows)))
    return {f"output {number}": output for number, output in enumerate(outputs)}


def _train(module: nn.Module, rows: Rows, twin: nn.Module) -> Pass:
    """Runs a training pass and undoes its changes; `twin` is an equal network with the original weights."""
    with untouched(module, twin):
        found = _forward(module.train(), rows)
        generator = torch.Generator().manual_seed(0)
        sums = [
            (output.float() * torch.randn(output.shape, generator=generator)).sum()
            for output in found.values()
            if output is not None and output.requires_grad
        ]
        if sums:
            torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call]
        return found | {f"the gradient of {n!r}": p.grad for n, p in module.named_parameters()}


@contextmanager
def _unhooked(module: nn.Module) -> Iterator[None]:
    """Removes hooks that the block adds to parameters; the next fit of the module would pickle them."""
    kept = [(p, name, getattr(p, name)) for p in module.parameters() for name in HOOKS]
    copies = [dict(hooks) if hooks else None for _, _, hooks in kept]
    try:
        yield
    finally:
        for (parameter, name, hooks), content in zip(kept, copies, strict=True):
            if hooks is None:
                setattr(parameter, name, None)
            else:
                hooks.clear()
                hooks.update(content or {})


def _compare(expected: Pass, run: Callable[[], Pass]) -> str:
    """Describes the first difference of a pass, or its error; "" if there is none."""
    try:
        found = run()
        for name, one in expected.items():
            two = found.get(name)
            if one is None or two is None:
                if one is not two:
                    return f"{name} is {'missing' if two is None else 'there'}"
                continue
            if (one.shape, one.dtype, one.device) != (two.shape, two.dtype, two.device):
                return f"{name} is {two.dtype} {tuple(two.shape)} on {two.device}"
            one, two = (t.to_dense() if t.is_sparse else t for t in (one.detach(), two.detach()))
            one, two = (t.to(torch.complex128) if t.is_complex() else t.double() for t in (one, two))
            allowed = _TOLERANCE * float(one.abs().max()) if one.numel() else 0.0
            if not torch.allclose(one, two, _TOLERANCE, allowed, equal_nan=True):
                return f"{name} is off by {float((one - two).abs().max()):.3g}"
    except Exception as error:  # user code may raise anything
        return f"it fails with {type(error).__name__}: {error}"
    return ""
