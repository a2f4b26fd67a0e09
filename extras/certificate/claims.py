"""The claims of one start of a training: settings, data, code and versions.

The digest of a function covers its bytecode, its constants and the functions that it names, so it is the same
for a pickled copy on a worker and for the imported original. It changes with the version of Python.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch

from ringspark.estimators.run.identity import identity_of, is_plain
from ringspark.estimators.training.run_environment import list_versions
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.serving.wheel_file import list_sources
from ringspark.pipelines import ShardManifest


def digest_objects(objects: UserObjects) -> str:
    """Returns the digest of the code behind the user's objects, and of the layers of the network."""
    lines: list[str] = []
    for role, value in _list_objects(objects):
        if value is None:
            continue  # a loss with a name is None
        lines.append(f"{role} {value!r}" if isinstance(value, torch.nn.Module) else role)
        seen: set[int] = set()  # a function may name itself
        for part in _list_parts(value):
            lines += _describe(part, seen)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _list_objects(objects: UserObjects) -> Iterator[tuple[str, Any]]:
    for field in fields(objects):
        value = getattr(objects, field.name)
        many = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else ()
        )
        yield from ((f"{field.name} {key}", each) for key, each in many)
        if not isinstance(value, dict | tuple):
            yield field.name, value


@cache
def digest_package() -> str:
    """Returns the digest of ringspark's Python source."""
    digest = hashlib.sha256()
    for name, text in list_sources():
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _list_parts(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.nn.Module):
        yield from sorted({type(layer) for layer in value.modules()}, key=lambda cls: cls.__qualname__)
    elif isinstance(value, functools.partial):
        yield value.func
    elif value is not None:
        yield value if isinstance(value, FunctionType | type) else type(value)


def _describe(value: Any, seen: set[int]) -> Iterator[str]:
    """Yields lines about a class or function, and about the user's functions that it names."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, type):
        yield f"class {value.__qualname__}"
        if _is_installed(value):
            return
        for base in value.__bases__:
            yield from _describe(base, seen)
        for name, member in sorted(vars(value).items()):
            member = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(member, FunctionType):
                yield from _describe(member, seen)
            elif is_plain(member) and not name.startswith("__"):
                yield f"{name} = {member!r}"
    elif isinstance(value, FunctionType):
        yield f"function {value.__qualname__}"
        if _is_installed(value):
            return
        yield from _describe_code(value.__code__)
        yield f"defaults {_list_plain(value.__defaults__)} {_list_plain(value.__kwdefaults__)}"
        for name in sorted(_list_names(value.__code__) & value.__globals__.keys()):
            found = value.__globals__[name]
            if isinstance(found, FunctionType | type):
                yield from _describe(found, seen)
            elif is_plain(found):
                yield f"{name} = {found!r}"


def _describe_code(code: CodeType) -> Iterator[str]:
    yield f"{code.co_name} {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_flags}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _describe_code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))  # its order changes with the hash seed
        else:
            yield repr(constant)


def _list_names(code: CodeType) -> set[str]:
    inner = [_list_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _list_plain(values: Any) -> Any:
    named = values.items() if isinstance(values, dict) else enumerate(values or ())
    return [(name, repr(value)) for name, value in named if is_plain(value)]


def _is_installed(value: Any) -> bool:
    """Whether the versions of libraries already identify this code."""
    name = getattr(value, "__module__", "") or ""
    if name.split(".")[0] in ("torch", "ringspark", *sys.stdlib_module_names):
        return True
    # A worker's main module is Spark's, but the code is of the driver's.
    file = "" if name == "__main__" else getattr(sys.modules.get(name), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(file.split("/"))


# Fields of the config that are places, which change when the run's folder moves.
PLACES = ("shards_uri", "run_uri")


def list_claims(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, device: torch.device
) -> dict[str, Any]:
    """Returns the claims, as JSON. Runs on the rank that writes.

    `config` holds seed, number of workers and mesh. `data` is the SHA-256 of the manifest, which has the
    SHA-256 of each file of rows.
    """
    settings = json.loads(config.to_json())
    return {
        "config": {name: value for name, value in settings.items() if name not in PLACES},
        "identity": identity_of(config, objects, manifest),
        "data": digest_manifest(manifest),
        "code": digest_objects(objects),
        "platform": describe_platform(device),
    }


def digest_manifest(manifest: ShardManifest) -> str:
    return hashlib.sha256(manifest.to_json().encode()).hexdigest()


def describe_platform(device: torch.device) -> dict[str, Any]:
    """Returns everything besides the settings that can change the last bits of a sum."""
    on_gpu = device.type == "cuda"
    return list_versions() | {
        "ringspark source": digest_package(),
        "machine": platform.machine(),
        "cpu kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
    }
