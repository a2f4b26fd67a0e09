"""Makes a `KerasNetwork` of the user's `keras.Model`, and refuses models that would train differently.

Keras' own `fit` adds regularizers and activity losses to the loss, and applies constraints after each step.
This training does not, so it refuses a model that has any. Workers and loaded stages rebuild the model from
its config, so the rebuilt model must predict the same as the user's object.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ringspark.extras.keras_models.library import find_custom, import_keras
from ringspark.extras.keras_models.network import (
    FROZEN,
    STATE,
    TRAINABLE,
    KerasNetwork,
    explain,
    pack_inputs,
)
from ringspark.models.outputs import as_outputs

_ROWS = 3
_TOLERANCE = 1e-4


def adapt(model: Any) -> KerasNetwork:
    """Returns the network of a built `keras.Model`, with its weights. Runs on the driver.

    Raises ValueError if the model is not built, has another backend, or has parts that would be ignored.
    """
    kind = type(model).__name__
    if type(model).__module__.startswith("tf_keras"):
        raise ValueError(
            f"model {kind} is of tf_keras, which is Keras 2; build it with Keras 3 and set the environment "
            "variable KERAS_BACKEND=torch"
        )
    keras = import_keras()
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"model is the Keras object {kind}; give a keras.Model, such as "
            "keras.Sequential([keras.Input((4,)), layer])"
        )
    if not model.built or not hasattr(model, "weights"):
        raise ValueError(
            f"Keras model {model.name!r} is not built; begin with a keras.Input, or call model.build((None, "
            "number_of_features)) first"
        )
    _refuse_ignored(model)
    config = _to_config(keras, model)
    network = KerasNetwork(config, _name_variables(model), find_custom(config))
    with torch.no_grad():
        for (name, _), variable in zip(network.variables, model.weights, strict=True):
            if tuple(network._tensor(name).shape) != tuple(variable.shape):
                raise _other_model(model)
            network._tensor(name).copy_(variable.value)
    _compare(keras, model, network)
    if getattr(model, "compiled", False):
        warnings.warn(
            f"compile() of Keras model {model.name!r} has no effect: set loss, optimizer and metrics of the "
            "estimator",
            UserWarning,
            stacklevel=2,
        )
    return network


def _refuse_ignored(model: Any) -> None:
    def refuse(what: str, remedy: str) -> ValueError:
        return ValueError(f"{what}, which this training would ignore; {remedy}")

    for layer in model._flatten_layers():
        if getattr(layer, "activity_regularizer", None) is not None:
            raise refuse(
                f"Keras layer {layer.name!r} has an activity_regularizer",
                "return the activations as another output and give it a loss",
            )
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"Keras layer {layer.name!r} is stateful, but batches are in random order; set stateful=False"
            )
    for variable in model.weights:
        if variable.trainable and variable.regularizer is not None:
            raise refuse(
                f"Keras variable {variable.path!r} has a regularizer", "leave it out and set weightDecay"
            )
        if variable.trainable and variable.constraint is not None:
            raise refuse(f"Keras variable {variable.path!r} has a constraint", "leave it out")
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(f"Keras variable {variable.path!r} is quantized; do not call quantize()")
    function = getattr(model, "_functional", None) or model
    for name in ("_inputs_struct", "_outputs_struct"):
        structure = getattr(function, name, None)
        entries = structure if isinstance(structure, list | tuple) else [structure]
        if any(isinstance(entry, Mapping | list | tuple) for entry in entries):
            raise ValueError(
                f"Keras model {model.name!r} has named or nested {name[1:-7]}, but columns go by position; "
                "give keras.Model([input_1, input_2], [output_1, ...])"
            )


def _to_config(keras: Any, model: Any) -> dict[str, Any]:
    kind = type(model).__name__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about lambdas, which the rebuild refuses
            config = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
    except Exception as error:  # a user's get_config may raise anything
        raise ValueError(explain(error, {"class_name": kind}, {})) from error
    config.pop("compile_config", None)
    return dict(config)


def _name_variables(model: Any) -> list[tuple[str, str]]:
    """Returns a unique name and the role of each variable; the name is its path in Keras."""
    layers = model._flatten_layers()
    # These lists contain frozen weights too, but never moving statistics.
    weights = {id(variable) for layer in layers for variable in layer._trainable_variables}
    named: dict[str, str] = {}
    for variable in model.weights:
        path = variable.path.replace(".", "_")
        # With a slash, it is never the name of an attribute.
        path = path if "/" in path else f"variables/{path}"
        name, number = path, 1
        while name in named:
            number += 1
            name = f"{path}_{number}"
        frozen = FROZEN if id(variable) in weights else STATE
        named[name] = TRAINABLE if variable.trainable else frozen
    return list(named.items())


def _compare(keras: Any, model: Any, network: KerasNetwork) -> None:
    """Raises ValueError if the rebuilt network predicts something else than the user's object."""
    tensors = [network._tensor(name) for name, _ in network.variables]
    if any(tensor.is_meta for tensor in tensors) or (inputs := _sample(model)) is None:
        return
    device = str(model.weights[0].value.device) if model.weights else "cpu"
    network.eval()
    try:
        with torch.no_grad(), keras.device(device), keras.StatelessScope(collect_losses=True):
            there = [tensor.to(device) for tensor in inputs]
            expected = as_outputs(model(*pack_inputs(model, there), training=False))
    except Exception:  # the sample may not fit the model's inputs; `fit` tries the real columns
        return
    finally:
        network.train()
    with torch.no_grad():
        found = as_outputs(network.eval()(*inputs))
        network.train()
    for one, other in zip(expected, found, strict=True):
        if not torch.allclose(one.cpu(), other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
            raise _other_model(model)


def _other_model(model: Any) -> ValueError:
    return ValueError(
        f"Keras model {model.name!r} computes something else after it is rebuilt from its config; let "
        "get_config() return every argument of each custom layer, and set attributes only in the constructor"
    )


def _sample(model: Any) -> list[torch.Tensor] | None:
    """Returns a few rows in the shapes of the model's inputs, or None if the shapes are unknown."""
    function = getattr(model, "_functional", None) or model
    if getattr(function, "inputs", None):
        shapes = [(tuple(entry.shape), str(entry.dtype)) for entry in function.inputs]
    else:
        built = (model.get_build_config() or {}).get("input_shape")
        if not built or not all(size is None or isinstance(size, int) for size in built):
            return None
        shapes = [(tuple(built), "float32")]
    generator = torch.Generator().manual_seed(0)
    rows = []
    for shape, dtype in shapes:
        sizes = [_ROWS, *(_ROWS if size is None else size for size in shape[1:])]
        values = torch.rand(sizes, generator=generator)
        rows.append(values if "float" in dtype else (values > 0.5).long())
    return rows
