"""Loads the initial weights of a training from safetensors files: the setting `pretrained`.

A URI names a file; a folder as Hugging Face saves it, with `model.safetensors` or an index of several files;
or a saved ringspark model. Rank 0 reads the tensors and sends them to the others as initial weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatchcase

import torch
from torch import nn

from ringspark.estimators.names import nearest
from ringspark.estimators.options.finetuning import Pretrained
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.weights import WEIGHTS, local_file
from ringspark.models.deferred_init import InitialWeights
from ringspark.models.lora import matrix_names
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import parse_object

INDEX = f"{WEIGHTS}.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NAMES_SHOWN = 5

_OF_INITIAL = (
    "leave model unset to train the initial model's own network, or load some of its weights by "
    "pretrained={'uri': ..., 'ignore': [...]}"
)

Shapes = dict[str, tuple[int, ...]]


def check_pretrained(setting: Pretrained, module: nn.Module, *, is_initial: bool = False) -> None:
    """Raises ValueError if there is no such checkpoint, or its names and shapes are not the network's.

    Runs on the driver and reads no tensors. `is_initial`: the checkpoint has the weights of `initialModel`.
    """
    found: Shapes = {}
    for uri in find_files(setting.uri):
        found |= _read_shapes(uri)
    _choose(setting, found, module, is_initial)


def load_pretrained(setting: Pretrained, module: nn.Module, tick: Callable[[], None]) -> None:
    """Copies the checkpoint's tensors into the module. Raises like `check_pretrained`. Runs on rank 0."""
    headers = {uri: _read_shapes(uri) for uri in find_files(setting.uri)}
    names = _choose(setting, {k: v for header in headers.values() for k, v in header.items()}, module)
    state = module.state_dict()
    for uri, header in headers.items():
        folder, _, name = uri.rpartition("/")
        with local_file(folder, name, tick) as path, torch.no_grad():
            tensors = tensor_file.read(path)
            for key in sorted(names & header.keys()):
                state[key].copy_(tensors[key])
                tick()


def open_pretrained(
    setting: Pretrained, module: nn.Module, first: InitialWeights, tick: Callable[[], None]
) -> InitialWeights:
    """Returns initial weights that come from the checkpoint, or from `first` if the checkpoint has none.

    Reads a parameter when it is needed, and copies buffers into the module at once. Raises like
    `check_pretrained`. Runs on rank 0, for a module with deferred initialization.
    """
    headers = {uri: _read_shapes(uri) for uri in find_files(setting.uri)}
    names = _choose(setting, {k: v for header in headers.values() for k, v in header.items()}, module)
    opened = _PretrainedWeights(first)
    for uri, header in headers.items():
        folder, _, name = uri.rpartition("/")
        path = opened.downloads.enter_context(local_file(folder, name, tick))
        opened.paths |= dict.fromkeys(names & header.keys(), path)
    state = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name in names:
            if not state[name].is_meta:
                state[name].copy_(opened.read(name))
    # One name of a tied tensor is enough.
    keys = {id(state[name]): name for name in sorted(names)}
    opened.keys = {n: keys[id(state[n])] for n in first.tensors if id(state[n]) in keys}
    return opened


class _PretrainedWeights(InitialWeights):
    """Initial weights in a checkpoint's files, of which one at a time is mapped."""

    def __init__(self, first: InitialWeights) -> None:
        super().__init__(first._recorder, first.tensors)
        self.downloads = ExitStack()
        self.paths: dict[str, str] = {}  # by the tensor's name in the file
        self.keys: dict[str, str] = {}  # parameter -> the tensor's name in the file
        self._path, self._mapped = "", dict[str, torch.Tensor]()

    def read(self, key: str) -> torch.Tensor:
        if self._path != self.paths[key]:
            self._mapped = {}
            self._path, self._mapped = self.paths[key], tensor_file.read(self.paths[key])
        return self._mapped[key]

    def initialize(self, name: str) -> torch.Tensor:
        key = self.keys.get(name)
        if key is None:
            return super().initialize(name)
        like = self.tensors[name]
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(self.read(key))


def _choose(setting: Pretrained, found: Shapes, module: nn.Module, is_initial: bool = False) -> set[str]:
    """Returns the names of the tensors to load; raises ValueError if the checkpoint does not fit."""
    uri, ignore = storage.redact(setting.uri), setting.ignore
    subject = f"initialModel in {uri}" if is_initial else f"pretrained {uri}"
    of_adapters = matrix_names(module)
    own = {n: t for n, t in module.state_dict(keep_vars=True).items() if n not in of_adapters}
    for pattern in ignore:
        if not any(fnmatchcase(name, pattern) for name in (*own, *found)):
            raise ValueError(
                f"pretrained ignores {pattern!r}, which matches no name in {uri} or the model"
                f"{nearest(pattern, own) or f'; the model has {list(own)[:_NAMES_SHOWN]}'}"
            )

    def is_used(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in ignore)

    names = {name for name in own.keys() & found.keys() if is_used(name)}
    # One name of a tied tensor is enough.
    covered = {id(own[name]) for name in names}
    missing = [name for name in own if is_used(name) and id(own[name]) not in covered]
    unexpected = [name for name in found if is_used(name) and name not in own]
    if not names or (setting.strict and (missing or unexpected)):
        raise ValueError(
            f"{subject} is not of model {type(module).__name__}: it lacks {_few(missing)}, and has "
            f"{_few(unexpected)}, which the model lacks; "
            + (
                _OF_INITIAL
                if is_initial
                else "list the names to skip in 'ignore', as in {'uri': ..., 'ignore': ['head.*']}, or set "
                "'strict': False"
            )
        )
    if different := sorted(name for name in names if found[name] != tuple(own[name].shape)):
        first = different[0]
        raise ValueError(
            f"{subject} has {first!r} of shape {list(found[first])}, but the model's has shape "
            f"{list(own[first].shape)}; "
            + (
                _OF_INITIAL
                if is_initial
                else f"set 'ignore': [{_few(different)}] to skip the tensors that differ, or build the model "
                "with the sizes of the pretrained one"
            )
        )
    return names


def _few(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(map(repr, names[:_NAMES_SHOWN]))}{more}"


def find_files(uri: str) -> list[str]:
    """Returns the safetensors files behind the setting `pretrained`."""
    # Hugging Face's cache holds links to its files.
    return [os.path.realpath(found) if storage.is_local(found) else found for found in _find_files(uri)]


def _find_files(uri: str) -> list[str]:
    shown = storage.redact(uri)
    if uri.endswith(_PICKLES):
        raise ValueError(f"pretrained {shown} {_CONVERT}")
    if uri.endswith(".safetensors"):
        if not storage.exists(uri):
            raise ValueError(f"pretrained {shown} does not exist; give a .safetensors file or its folder")
        return [uri]
    names = storage.list_names(uri) if storage.exists(uri) else []
    if WEIGHTS in names:
        return [storage.join(uri, WEIGHTS)]
    if INDEX in names:
        files = _read_index(storage.join(uri, INDEX))
        if missing := [name for name in files if name not in names]:
            raise ValueError(
                f"pretrained {storage.join(shown, missing[0])} is missing, but its index lists it; copy it "
                "again"
            )
        return [storage.join(uri, name) for name in files]
    saved = storage.join(uri, "weights", WEIGHTS)
    if "weights" in names and storage.exists(saved):
        return [saved]
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise ValueError(f"pretrained {storage.join(shown, pickles[0])} {_CONVERT}")
    raise ValueError(
        f"pretrained {shown} holds no {WEIGHTS}; give a .safetensors file, a folder with one as Hugging Face "
        "saves it, or a saved model"
    )


_CONVERT = (
    "is a pickle, which can run code when it is read; convert it once: "
    "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"
)


def _read_index(uri: str) -> list[str]:
    names = parse_object(storage.read_bytes(uri)).get("weight_map")
    files = sorted(set(names.values())) if isinstance(names, dict) else []
    if not files or any(not isinstance(f, str) or "/" in f or not f.endswith(".safetensors") for f in files):
        raise ValueError(
            f"pretrained {storage.redact(uri)} is damaged: this index must name .safetensors files in its "
            "own folder; copy it again"
        )
    return files


def _read_shapes(uri: str) -> Shapes:
    with storage.open_file(uri, "rb") as file:
        try:
            entries, _ = tensor_file.read_header(file)
            return {name: tuple(entry["shape"]) for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"pretrained {storage.redact(uri)} is no readable safetensors file ({error}); copy it again"
            ) from error
