"""Converters of the stages' Params: from what a user writes to what a stage keeps, or one clear sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pyspark.ml.param import Param, Params, TypeConverters
from torch import nn

from ringspark.estimators.memory import parse_bytes
from ringspark.estimators.names import check_name, nearest
from ringspark.estimators.training.callbacks import Callback
from ringspark.estimators.training.objective.losses import check_loss_name
from ringspark.estimators.training.optimizers import check_groups
from ringspark.models import ModelSpec
from ringspark.pipelines import storage


def to_model(value: Any) -> ModelSpec | nn.Module:
    if isinstance(value, torch.jit.ScriptModule):
        raise TypeError(
            "model must be a ModelSpec or an nn.Module that can be copied, got a ScriptModule; give the "
            "nn.Module it was made from"
        )
    if isinstance(value, ModelSpec | nn.Module):
        return value
    raise TypeError(
        f"model must be a ModelSpec or an nn.Module, got {type(value).__name__}; "
        "pass an instance such as ModelSpec('mlp', {...}) or MyNet()"
    )


def to_uri(value: Any) -> str:
    """A folder's URI without credentials: Params are saved with the stage."""
    uri: str = TypeConverters.toString(value)
    storage.refuse_secrets(uri)
    return uri


def to_name_or_callable(kind: str, known: Sequence[str]) -> Any:
    def convert(value: Any) -> Any:
        if isinstance(value, str):
            check_name(kind, value, known)
            return value
        if callable(value):
            return value
        raise TypeError(f"{kind} must be a name or a callable, got {type(value).__name__}")

    return convert


def to_losses(value: Any) -> Any:
    """`loss`: a name, an `nn` loss or a callable, or a list of them."""
    if isinstance(value, list | tuple):
        return [to_losses(entry) for entry in value]
    if isinstance(value, str):
        if value != "auto":
            check_loss_name(value)
        return value
    if callable(value):
        return value
    raise TypeError(f"loss must be a name, a callable or a list of them, got {type(value).__name__}")


def to_callbacks(value: Any) -> list[Any]:
    callbacks = list(value) if isinstance(value, list | tuple) else [value]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            given = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise TypeError(
                f"callbacks must be instances of ringspark.estimators.Callback, got {given}; "
                "derive the class from it and pass an instance"
            )
    return callbacks


def to_groups(value: Any) -> list[dict[str, Any]]:
    return check_groups([value] if isinstance(value, dict) else value)


def to_names(kind: str) -> Any:
    """A list of names; one alone is taken as a list of one."""

    def convert(value: Any) -> list[str]:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{kind} must be a list of names, got {value!r}")
        return list(names)

    return convert


def to_count(name: str) -> Any:
    """A whole number of at least 1."""

    def convert(value: Any) -> int:
        count = TypeConverters.toInt(value)
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
        return count

    return convert


def to_interval(name: str) -> Any:
    """A number of seconds, 0 or above and finite."""

    def convert(value: Any) -> float:
        seconds = TypeConverters.toFloat(value)
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{name} must be 0 or above and finite, got {value}")
        return seconds

    return convert


def to_bytes(name: str) -> Any:
    """A number of bytes, also from a size as Spark writes it ("4g")."""

    def convert(value: Any) -> int:
        return parse_bytes(value, name)

    return convert


def to_choice(kind: str, *choices: str) -> Any:
    def convert(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{kind} must be one of {list(choices)}, got {value!r}")
        return str(value)

    return convert


def to_policy(value: Any) -> str | list[str]:
    """`gradientCheckpointing`: a name, a segment count as an int or a string, or names of submodules."""
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return list(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(
            "gradientCheckpointing must be a name, a segment count or a list of submodule names, "
            f"got {value!r}"
        )
    return str(value)


def param(name: str, doc: str, converter: Any) -> Param[Any]:
    return Param(Params._dummy(), name, doc, converter)


def set_params(stage: Params, keywords: dict[str, Any]) -> None:
    """Sets constructor keywords; None means unset.

    Raises:
        TypeError: A keyword is no Param; names the nearest one. Or its value has the wrong type.
    """
    names = [param.name for param in stage.params]
    for name in keywords:
        if name not in names:
            hint = nearest(name, names) or f"; its Params are {names}"
            raise TypeError(f"{type(stage).__name__} has no Param {name!r}{hint}")
    stage._set(**{name: value for name, value in keywords.items() if value is not None})
