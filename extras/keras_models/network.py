"""`KerasNetwork`: a `keras.Model` as a torch module.

A Keras model ignores `train()` and `eval()`, so a torch training would never use dropout. Its `state_dict()`
has each variable several times, and moving statistics are parameters. `KerasNetwork` passes
`training=self.training`. It has one parameter per weight, and one buffer per moving statistic.

The Keras model inside holds no weights. Every forward pass gives it the module's tensors in a
`keras.StatelessScope`. So sharding, `to()` and `load_state_dict()` may replace the tensors of the module.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ringspark.extras.keras_models.library import Custom, find_custom, import_keras, missing_names
from ringspark.models.adapters import AdaptedNetwork
from ringspark.models.generators import keep_shared_generators
from ringspark.models.process_state import fork_generators

TRAINABLE, FROZEN, STATE = "trainable", "frozen", "state"
"""Roles of variables: a parameter, a parameter without gradient, a buffer."""

# Activation -> losses that apply it themselves.
_APPLIED_BY = {"softmax": ("cross_entropy",), "sigmoid": ("bce_with_logits",)}


@dataclass(frozen=True)
class _Skeleton:
    """A Keras model without weights.

    Attributes:
        variables: The variables in the order of `KerasNetwork.variables`.
        seeds: States of the random seed generators, including the generator of calls without a seed.
        finalizers: Layers that compute constants from their variables, such as `Normalization`.
    """

    model: Any
    variables: list[Any]
    seeds: list[Any]
    finalizers: list[Any]


class KerasNetwork(AdaptedNetwork):
    """A `keras.Model` as a torch module.

    Args:
        config: The model as Keras serializes it.
        variables: Name and role of each of the model's `weights`, in order.
        custom: The user's classes and functions in `config`; `build` finds them in Keras' registry.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        variables: Sequence[tuple[str, str]],
        custom: Custom,
    ) -> None:
        super().__init__()
        self.config = dict(config)
        self.variables = [(name, role) for name, role in variables]
        self.custom = custom
        skeleton = self._build()
        for (name, role), variable in zip(self.variables, skeleton.variables, strict=True):
            value = variable.value.detach().clone()
            if role == STATE:
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value, requires_grad=role == TRAINABLE))
        self._skeleton = _without_weights(skeleton)

    def forward(self, *inputs: torch.Tensor) -> Any:
        keras, skeleton = import_keras(), self._skeleton
        tensors = [self._tensor(name) for name, _ in self.variables]
        values = [*zip(skeleton.variables, tensors, strict=True)]
        # Seeds come from Python's generator, so that torch's generator draws the same numbers as without.
        # In prediction the seeds are constant, so that predictions are reproducible.
        values += [
            (seed, torch.tensor([random.getrandbits(31) if self.training else 0, 0]))
            for seed in skeleton.seeds
        ]
        with (
            keras.device(str(inputs[0].device)),
            keras.StatelessScope(state_mapping=values, collect_losses=True) as scope,
        ):
            for layer in skeleton.finalizers:
                layer.finalize_state()
            try:
                output = skeleton.model(*pack_inputs(skeleton.model, inputs), training=self.training)
            except ValueError as error:
                # Keras prints the reason in bold, between lines about its own calls.
                reason = re.search(r"\x1b\[1m(.*?)\x1b\[0m", str(error), re.DOTALL)
                raise ValueError(" ".join((reason[1] if reason else str(error)).split())) from error
        if scope.losses:
            raise ValueError(
                f"Keras model {skeleton.model.name!r} calls add_loss(), which this training would ignore; "
                "return the value as another output and give it a loss"
            )
        if self.training:
            self._update(skeleton, scope)
        return output

    def to_keras(self) -> Any:
        """Returns a new `keras.Model` on the CPU with the weights of this module."""
        with import_keras().device("cpu"):
            skeleton = self._build()
            for (name, _), variable in zip(self.variables, skeleton.variables, strict=True):
                variable.assign(self._tensor(name).detach().cpu())
            for layer in skeleton.finalizers:
                layer.finalize_state()
        return skeleton.model

    def description(self) -> dict[str, Any]:
        return {"keras": self.config, "variables": [list(entry) for entry in self.variables]}

    def check_settings(self, task: str, losses: Sequence[str]) -> None:
        for activation, loss in zip(_last_activations(self._skeleton.model), losses, strict=False):
            if task == "regression" or activation not in _APPLIED_BY:
                continue
            if task == "classification" or loss in _APPLIED_BY[activation]:
                raise ValueError(
                    f"the Keras model ends with {activation}, but loss {loss!r} takes logits and applies "
                    f"{activation} itself; give the last layer no activation"
                )

    def _build(self) -> _Skeleton:
        keras = import_keras()
        from keras.src.random.seed_generator import global_seed_generator

        with (
            fork_generators(),
            keep_shared_generators(),
            # A copy may be made under fake tensors (a memory plan) or in inference mode.
            unset_fake_temporarily(),
            torch.inference_mode(False),
            keras.device("cpu"),
        ):
            try:
                # A copy, because Keras removes entries from a config that it reads.
                model = keras.saving.deserialize_keras_object(
                    copy.deepcopy(self.config), custom_objects=self.custom, safe_mode=True
                )
            except Exception as error:  # Keras and the user's constructor may raise anything
                raise ValueError(explain(error, self.config, self.custom)) from error
            weights = list(model.weights)
            known = {id(variable) for variable in weights}
            seeds = [variable for variable in model.variables if id(variable) not in known]
            seeds.append(global_seed_generator().state)
        if len(weights) != len(self.variables):
            raise ValueError(
                f"the config of Keras model {model.name!r} builds {len(weights)} variables, not "
                f"{len(self.variables)}; create all of them in the constructor or in build(), and use the "
                "version of Keras that saved it"
            )
        finalizers = [layer for layer in model._flatten_layers() if hasattr(layer, "finalize_state")]
        return _Skeleton(model, weights, seeds, finalizers)

    def _tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor | None = self._parameters.get(name)
        found = self._buffers[name] if found is None else found
        assert found is not None
        return found

    def _update(self, skeleton: _Skeleton, scope: Any) -> None:
        with torch.no_grad():
            for (name, role), variable in zip(self.variables, skeleton.variables, strict=True):
                if role == STATE:
                    buffer, value = self._tensor(name), scope.get_current_value(variable)
                    if value is not buffer:
                        buffer.copy_(value)

    # Keras copies and pickles a model only with its weights, so a copy builds the model again.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_skeleton"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # Here and not at first use, which may be inside a trace.
        self._skeleton = _without_weights(self._build())


def build(description: Mapping[str, Any]) -> KerasNetwork:
    """Builds a network from its `description()`; custom classes must be registered in this process."""
    config = description["keras"]
    return KerasNetwork(config, description["variables"], find_custom(config))


def pack_inputs(model: Any, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Returns the positional arguments of a Keras model for one tensor per column."""
    structure = getattr(getattr(model, "_functional", None) or model, "_inputs_struct", None)
    if structure is None:  # a subclass with its own call()
        named = [name for name in model.call_signature_parameters if name not in ("training", "mask")]
        return (list(inputs),) if len(named) == 1 < len(inputs) else tuple(inputs)
    expected = len(structure) if isinstance(structure, list | tuple) else 1
    if len(inputs) != expected:
        raise ValueError(f"the Keras model takes {expected} inputs, got {len(inputs)}")
    return (list(inputs),) if isinstance(structure, list | tuple) else (inputs[0],)


def explain(error: Exception, config: Mapping[str, Any], custom: Mapping[str, Any]) -> str:
    """Returns one sentence about a config that Keras cannot build."""
    name = config.get("class_name", "")
    if missing := missing_names(config, custom):
        return (
            f"Keras model {name} uses {', '.join(missing)}, which Keras has not registered in this process; "
            "decorate it with @keras.saving.register_keras_serializable(), and import its module first"
        )
    cause: BaseException = error
    while cause.__context__ is not None:
        cause = cause.__context__
    first = " ".join(str(cause).split()).split(". ")[0].rstrip(".")
    return (
        f"Keras model {name} cannot be rebuilt from its config ({type(cause).__name__}: {first[:200]}); use "
        "Keras layers, or registered classes with a get_config()"
    )


def _without_weights(skeleton: _Skeleton) -> _Skeleton:
    for variable in skeleton.variables:
        variable.value.data = variable.value.data.new_empty(0)
    return skeleton


def _last_activations(model: Any) -> list[str]:
    """Returns the name of the activation that computes each output; "" if unknown."""
    model = getattr(model, "_functional", None) or model
    if not getattr(model, "outputs", None):
        activation = getattr(model, "activation", None)
        return [type(model).__name__.lower() if activation is None else getattr(activation, "__name__", "")]
    found = []
    for output in model.outputs:
        operation, _, index = output._keras_history
        names = _last_activations(operation)
        # A layer may have several outputs, but it has one activation.
        found.append(names[min(index, len(names) - 1)])
    return found
