"""Checks on the driver that the copy of a network that trains computes the same as the user's network."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ringspark.estimators.training.arguments import read_layout
from ringspark.estimators.training.batch_transforms import prepare_inputs, try_transform
from ringspark.estimators.training.check.probe import PROBE_ROWS, random_samples
from ringspark.estimators.training.feed import zeros
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models.generators import keep_shared_generators, seed_constructor
from ringspark.models.meta_device import fill, find_changed_buffers, unsaved_buffers
from ringspark.models.outputs import as_outputs
from ringspark.models.process_state import fork_generators, ignore_warnings
from ringspark.pipelines import ShardManifest

_log = logging.getLogger(__name__)

# Largest accepted difference, relative to the largest element of the expected tensor.
_TOLERANCE = 1e-4


class _Pass(NamedTuple):
    outputs: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor | None]


def check_copy(config: TrainConfig, objects: UserObjects, copied: nn.Module, manifest: ShardManifest) -> None:
    """Compares one training pass of `objects.module` and of its copy over random rows.

    Raises ValueError if they differ. Leaves both networks as they were.
    """
    module, name = objects.module, type(objects.module).__name__
    if _is_lazy(module):
        return  # a pass would initialize the user's layers
    for inputs in _training_rows(config, objects, manifest):
        try:
            expected = _run(module, inputs)
            break
        except Exception as error:  # user code may raise anything, because random rows are not real data
            _log.info("model %s fails on random rows: %s", name, error)
    else:
        return
    try:
        difference = _difference(expected, _run(copied, inputs))
    except Exception as error:
        difference = f"{type(error).__name__}: {error}"
    # A network may also differ from itself, for example if it draws from a generator of its own.
    if difference and not _difference(expected, _run(module, inputs)):
        raise ValueError(
            f"model {name} computes something else once it is pickled for the workers: {difference}; let its "
            "functions and attributes refer to the network only through `self` and closures, or give its "
            "class as a ModelSpec"
        )


def check_prediction(
    config: TrainConfig, objects: UserObjects, module: nn.Module, skeleton: nn.Module, manifest: ShardManifest
) -> None:
    """Raises ValueError if the trained network could not predict.

    Runs one forward pass in training mode, loads the state into `skeleton`, a network on the meta device as
    `transform` uses it, and compares the predictions. Leaves `module` as it was.
    """
    if _is_lazy(module) or _is_lazy(skeleton):
        return
    name, prepare = type(module).__name__, objects.transform_in_prediction
    shapes, kept = _shapes(module), unsaved_buffers(module)
    for inputs in _training_rows(config, objects, manifest):
        with untouched(module):
            try:
                outputs = _forward(module.train(), inputs)
            except Exception as error:  # as in `check_copy`
                _log.info("model %s fails on random rows: %s", name, error)
                continue
            if config.training_step is None and len(outputs) != len(config.label_columns):
                raise ValueError(
                    f"model {name} returns {len(outputs)} tensors in training for the labels "
                    f"{list(config.label_columns)}; return one per label in training as in evaluation"
                )
            if changed := dict(_shapes(module).items() ^ shapes.items()):
                raise ValueError(
                    f"model {name} cannot predict once it is trained: its forward pass creates or resizes "
                    f"{sorted(changed)}, which no untrained network can load; register them in the "
                    "constructor, in their final shape, or with persistent=False"
                )
            try:
                rows = prepare_inputs(prepare, inputs)
                with torch.no_grad():
                    expected = _forward(module.eval(), rows)
            except Exception as error:  # as above; `probe` has run real shapes
                _log.info("model %s fails on random rows: %s", name, error)
                return
            try:
                fill(skeleton, module.state_dict())
                with torch.inference_mode():
                    found = _forward(skeleton.eval(), rows)
                difference = _difference(_Pass(expected, {}), _Pass(found, {}))
            except Exception as error:
                difference = f"{type(error).__name__}: {error}"
            # `fit` warns about buffers that no checkpoint holds.
            if difference and not find_changed_buffers(kept, unsaved_buffers(module)):
                raise ValueError(
                    f"model {name} cannot predict once it is trained: loaded from its state_dict, "
                    f"{difference}; keep all that training changes in parameters and registered buffers, and "
                    "let no other attribute be a view of them"
                )
            return


def _is_lazy(module: nn.Module) -> bool:
    return any(map(is_lazy, (*module.parameters(), *module.buffers())))


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items() if torch.is_tensor(value)}


def _training_rows(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields random rows, then rows whose integers are 0: random ones may be no ids of the network."""
    labels = tuple(zeros(manifest.array(label), PROBE_ROWS) for label in config.label_columns)
    layout = read_layout(manifest, config.input_columns)
    for zero_ids in (False, True):
        rows = random_samples(config.input_columns, manifest, PROBE_ROWS, zero_ids=zero_ids)
        if objects.transform_batch is not None:
            try:
                rows, _ = try_transform(objects.transform_batch, "transformBatch", rows, labels, layout)
            except ValueError:
                continue  # `check_training` calls it on real shapes and names its error
        yield rows


def _forward(module: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with fork_generators(), keep_shared_generators(), ignore_warnings():
        seed_constructor(0)
        return as_outputs(module(*(values.clone() for values in inputs)))


def _run(module: nn.Module, inputs: Sequence[torch.Tensor]) -> _Pass:
    with untouched(module):
        outputs = _forward(module.train(), inputs)
        sums = []
        for output in outputs:
            if output.requires_grad:
                factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
                sums.append((output.float() * factors).sum())
        if sums:
            torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call]
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        return _Pass(tuple(output.detach().clone() for output in outputs), gradients)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restores the network after the block: modes, gradients, buffers, attributes and own generators."""
    layers = [(layer, _copy_state(vars(layer))) for layer in module.modules()]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    found = [v for layer, _ in layers for v in vars(layer).values() if isinstance(v, torch.Generator)]
    generators = [(generator, generator.get_state()) for generator in found]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for layer, state in layers:
            _restore(vars(layer), state)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for generator, drawn in generators:
            generator.set_state(drawn)


def _copy_state(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns each attribute with a copy of its content, if it is a collection."""
    kinds = (list, dict, set, OrderedDict)
    return {name: (v, v.copy() if type(v) in kinds else None) for name, v in attributes.items()}


def _restore(attributes: dict[str, Any], state: dict[str, tuple[Any, Any]]) -> None:
    attributes.clear()
    for name, (value, content) in state.items():
        attributes[name] = value
        if content is not None:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


def _difference(expected: _Pass, found: _Pass) -> str:
    """Describes the first difference; "" if there is none."""
    for number, (one, two) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        if is_off := _is_off(one, two):
            return f"output {number} {is_off}"
    for name, wanted in expected.gradients.items():
        given = found.gradients.get(name)
        if (wanted is None) != (given is None):
            return f"parameter {name!r} gets {'no' if given is None else 'a'} gradient"
        if wanted is not None and given is not None and (is_off := _is_off(wanted, given)):
            return f"the gradient of {name!r} {is_off}"
    return ""


def _is_off(one: torch.Tensor, two: torch.Tensor) -> str:
    if one.shape != two.shape or one.dtype != two.dtype or one.device != two.device:
        return f"is {two.dtype} {tuple(two.shape)} on {two.device} instead of {one.dtype} {tuple(one.shape)}"
    one, two = (t.to_dense() if t.layout != torch.strided else t for t in (one, two))
    if torch.allclose(one, two, _TOLERANCE, _TOLERANCE * float(one.abs().max() if one.numel() else 0), True):
        return ""
    return f"is off by {float((one.double() - two.double()).abs().max()):.3g}"
