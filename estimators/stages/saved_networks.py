"""Networks in a stage's folder, without pickle: a description that builds the network, or a program.

A program only predicts, so only a fitted model has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.weights import local_file, replacing
from ringspark.models.layers import build_network
from ringspark.models.meta_device import build_on_meta
from ringspark.models.process_state import fork_generators
from ringspark.models.program import Program
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import parse_object

PROGRAM = "program"

# The names of a Param's files.
_start = "{}.safetensors".format
_program = "{}.program.json".format
_constants = "{}.constants.safetensors".format


def save_start(uri: str, param: str, module: nn.Module) -> None:
    with replacing(uri, _start(param)) as file:
        tensor_file.write(module.state_dict(), file)


def save_program(uri: str, param: str, program: Program) -> dict[str, Any]:
    storage.write_atomic(storage.join(uri, _program(param)), json.dumps(program.text).encode())
    constants = {name: tensor.contiguous().clone() for name, tensor in program.constants().items()}
    if constants:
        storage.write_atomic(storage.join(uri, _constants(param)), save(constants))
    return {PROGRAM: _program(param)}


def load_network(uri: str, param: str, description: Mapping[str, Any], *, is_fitted: bool) -> nn.Module:
    """Returns a Param's network; a fitted model's network gets its weights from a checkpoint later."""
    if PROGRAM in description:
        return _load_program(uri, param)
    if is_fitted:
        return build_on_meta(lambda: build_network(description))
    if not storage.exists(storage.join(uri, _start(param))):
        raise ValueError(f"{_start(param)} is missing")
    with fork_generators():
        module = build_network(description)
    with local_file(uri, _start(param)) as path:
        try:
            module.load_state_dict(tensor_file.read(path))
        except RuntimeError as error:
            raise ValueError(f"{_start(param)} holds other weights: {' '.join(str(error).split())}") from None
    return module


def _load_program(uri: str, param: str) -> Program:
    try:
        program = Program(parse_object(storage.read_bytes(storage.join(uri, _program(param)))))
        names = list(program.constants())
        constants = load(storage.read_bytes(storage.join(uri, _constants(param)))) if names else {}
        for name in names:
            program.put(name, constants[name])
    except FileNotFoundError:
        raise ValueError(f"{_program(param)} or {_constants(param)} is missing") from None
    except (SafetensorError, LookupError) as error:
        raise ValueError(f"{_constants(param)}: {type(error).__name__}: {error}") from error
    return program
