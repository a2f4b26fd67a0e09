"""Divides a network of the transformers library into links for a pipeline: embeddings, each block, the head.

Every link runs the `forward` of the whole network, but modules of other links are replaced by cheap ones. So
the library's own code computes masks, positions and the order of the blocks on each stage. A link returns the
hidden states, the values that blocks carry to the next block, the encoder's result, and the network's
arguments.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.extras.hugging_face.experts import fill_rows, fills_rows
from ringspark.extras.hugging_face.stacks import Stack, ancestors, find_stacks
from ringspark.models.chain import Link, belongs_to
from ringspark.models.meta_device import copy_to_meta
from ringspark.models.outputs import as_outputs
from ringspark.models.whole_rows import WholeRows

# Class of a block -> its outputs that the next block takes: (index in the returned tuple, position of the
# argument, name of the argument).
_CARRIED = {"T5Block": ((1, 2, "position_bias"), (2, 5, "encoder_decoder_position_bias"))}
_NUM_CARRIED = 2


def links(network: nn.Module) -> list[Link]:
    """Returns the links of the network. Raises ValueError if its blocks form no chain."""
    name, stacks = type(network).__name__, find_stacks(network)
    if not stacks:
        raise ValueError(
            f"a pipeline needs a chain of blocks, and {name} has no list of blocks of a class in "
            "its _no_split_modules; leave 'pipeline' out of parallelism"
        )
    if isinstance(getattr(network, "rows", None), WholeRows):
        raise ValueError(
            f"the rows of {name} are divided by parallelism's 'sequence', and later stages do not know "
            "their length; set 'sequence' or 'pipeline' to 1"
        )
    is_pair = len(stacks) == 2 and getattr(getattr(network, "config", None), "is_encoder_decoder", False)
    if len(stacks) > 1 and not is_pair:
        raise ValueError(
            f"a pipeline needs one chain of blocks, or an encoder and a decoder, and {name} has "
            f"{', '.join(stack.path for stack in stacks)}; leave 'pipeline' out of parallelism"
        )
    before = [_own_modules(stack, stacks[:number]) for number, stack in enumerate(stacks)]
    blocks = [stack.path for stack in stacks]
    rest = [part for part in _leaves(network) if not _is_inside(part, [*blocks, *itertools.chain(*before)])]
    # Tables of rotary positions have no parameters, and every block needs them.
    everywhere = tuple(part for part in rest if _holds_only_buffers(network, part))
    rest = [part for part in rest if part not in everywhere]
    after = [[part for part in rest if _is_inside(part, [stack.trunk])] for stack in stacks[:-1]]
    after.append([part for part in rest if part not in itertools.chain(*after)])
    found: list[Link] = []
    for number, stack in enumerate(stacks):
        parts = (*(after[number - 1] if number else ()), *before[number], *everywhere)
        title = "embeddings" if number == 0 else f"{stack.trunk}.embeddings"
        found.append(Link(title, _Part(network, stacks, number, None), parts))
        for block in range(stack.length):
            own = (stack.block(block), *everywhere)
            found.append(Link(stack.block(block), _Part(network, stacks, number, block), own))
    head = _Part(network, stacks, len(stacks), None)
    found.append(Link("head", head, (*after[-1], *everywhere)))
    return found


def _own_modules(stack: Stack, earlier: list[Stack]) -> list[str]:
    """Returns the modules before the stack that do not belong to an earlier stack."""
    known = [other.trunk for other in earlier] + [name for other in earlier for name in other.before]
    return [name for name in stack.before if not _is_inside(name, known)]


def _leaves(network: nn.Module) -> list[str]:
    """Returns the names of layers with tensors; names single tensors if the module also has submodules."""
    found = []
    for name, module in network.named_modules():
        own = [key for key, _ in [*module._parameters.items(), *module._buffers.items()]]
        if own and name and not module._modules:
            found.append(name)
        else:
            found += [f"{name}.{key}".lstrip(".") for key in own if getattr(module, key) is not None]
    return found


def _is_inside(name: str, modules: list[str]) -> bool:
    return any(belongs_to(name, module) for module in modules)


def _holds_only_buffers(network: nn.Module, part: str) -> bool:
    layer = dict(network.named_modules()).get(part)
    return layer is not None and not any(True for _ in layer.parameters())


class _StopError(Exception):
    """Ends a forward pass with the value of a link."""

    def __init__(self, value: Any) -> None:
        super().__init__("a link of a pipeline ended")
        self.value = value


class _Part:
    """Runs one link: the embeddings of stack `stack`, or its block `block`; after the last stack the head."""

    def __init__(self, network: nn.Module, stacks: list[Stack], stack: int, block: int | None) -> None:
        self.network, self._stacks, self._stack, self._block = network, stacks, stack, block
        kinds = [type(network.get_submodule(own.block(0))).__name__ for own in stacks]
        self._carried = [_CARRIED.get(kind, ()) for kind in kinds]
        # A stage removes the modules of other stages, but the forward pass goes through them.
        self._shells = {
            path: _shell(network.get_submodule(path))
            for own in stacks
            for inner in (own.path, *own.before)
            for path in ancestors(inner)
        }
        trunks = {own.trunk for own in stacks}
        embeddings = [path for own in stacks for path in own.before if path not in trunks]
        self._empty = {path: copy_to_meta(network.get_submodule(path)) for path in embeddings}

    def __call__(self, *values: torch.Tensor | None) -> Any:
        is_empty = any(value is not None and not len(value) for value in values)
        if not is_empty or not fills_rows(self.network):
            return self._run(*values)
        found = self._run(*map(fill_rows, values))
        outputs = found if isinstance(found, tuple) else as_outputs(found)
        cut = tuple(None if value is None else value[:0] for value in outputs)
        return cut if len(cut) > 1 else cut[0]

    def _run(self, *values: torch.Tensor | None) -> Any:
        if self._stack == 0 and self._block is None:
            values = (*(None,) * (2 + _NUM_CARRIED), *values)
        state, inputs = values[: 2 + _NUM_CARRIED], values[2 + _NUM_CARRIED :]
        encoded: list[Any] = [state[-1]]
        with _replaced(self.network, self._replacements(state), self._shells):
            handle = None
            if self._block is None and 0 < self._stack < len(self._stacks):
                # The result of the encoder, which each block of the decoder needs.
                encoder = self.network.get_submodule(self._stacks[self._stack - 1].trunk)
                handle = encoder.register_forward_hook(
                    lambda _, inputs, output: encoded.__setitem__(0, output[0])
                )
            try:
                return type(self.network).forward(self.network, *inputs)
            except _StopError as stop:
                result = stop.value
            finally:
                if handle is not None:
                    handle.remove()
        outputs = result if isinstance(result, tuple) else (result,)
        given: list[Any] = [outputs[0], *(None,) * _NUM_CARRIED]
        if self._block is None:
            return *given, encoded[0], *map(_without_values, inputs)
        carried = self._carried[self._stack]
        for place, (index, _, _) in enumerate(carried):
            given[1 + place] = outputs[index]
        lost = [
            value for index, value in enumerate(outputs) if index and index not in [c[0] for c in carried]
        ]
        if any(value is not None for value in lost):
            raise ValueError(
                f"a pipeline passes on only the hidden states of a block, but {self._name()!r} of "
                f"{type(self.network).__name__} returns {len(outputs)} values; leave "
                "'pipeline' out of parallelism"
            )
        return *given, encoded[0], *inputs

    def _name(self) -> str:
        return self._stacks[self._stack].block(self._block or 0)

    def _replacements(self, state: tuple[torch.Tensor | None, ...]) -> dict[str, nn.Module]:
        hidden, stacks, number = state[0], self._stacks, self._stack
        found: dict[str, nn.Module] = {}
        # Stacks that are finished; the last one ends in this link if the link begins with its norm.
        ending = number - 1 if self._block is None else -1
        for index, stack in enumerate(stacks[: number + 1]):
            carried = self._carried[index]
            if index < number and index != ending:
                found[stack.trunk] = _Instead(partial(_finished, state[-1]))
            elif index == ending:
                found |= self._given(stack, hidden)
                found[stack.path] = _skipped(stack.length - 1, carried, partial(_skip, hidden, carried))
            elif self._block is None:
                found[stack.path] = _skipped(0, carried, *[_stop] * stack.length)
            else:
                found |= self._given(stack, hidden)
                block = self.network.get_submodule(self._name())
                here = partial(_run_block, block, state[: 1 + _NUM_CARRIED], carried)
                later = [_stop] * (stack.length - self._block - 1)
                found[stack.path] = _skipped(self._block, carried, here, *later)
        return found

    def _given(self, stack: Stack, hidden: torch.Tensor | None) -> dict[str, nn.Module]:
        return {path: _Given(hidden, self._empty[path]) for path in stack.before if path in self._empty}


class _Given(nn.Module):
    """Takes the place of embeddings on later stages; its result has only the right shape."""

    def __init__(self, value: torch.Tensor | None, empty: nn.Module) -> None:
        super().__init__()
        assert value is not None
        self.__dict__["_value"], self.__dict__["_embeddings"] = value.detach(), empty

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_embeddings"], name)

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        value: torch.Tensor = self.__dict__["_value"]
        return value


class _Instead(nn.Module):
    """Takes the place of a block or an encoder of another stage: calls `run` with its arguments."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._run(*inputs, **named)


def _skipped(number: int, carried: tuple[Any, ...], *runs: Callable[..., Any]) -> nn.ModuleList:
    """Returns a list of blocks: the first `number` return their arguments, the others call `runs`."""
    skips: list[Callable[..., Any]] = [partial(_skip, None, carried) for _ in range(number)]
    return nn.ModuleList(map(_Instead, [*skips, *runs]))


def _first(inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return inputs[0] if inputs else named["hidden_states"]


def _stop(*inputs: Any, **named: Any) -> Any:
    raise _StopError(_first(inputs, named))


def _skip(value: torch.Tensor | None, carried: tuple[Any, ...], *inputs: Any, **named: Any) -> Any:
    """Returns the value in place of a block's result; the block's argument if it is None."""
    value = _first(inputs, named) if value is None else value
    return (value, *(None,) * len(carried)) if carried else value


def _finished(encoded: Any, *inputs: Any, **named: Any) -> Any:
    """Returns an encoder's result on the stages of the decoder."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=encoded)


def _run_block(
    block: nn.Module, state: tuple[Any, ...], carried: tuple[Any, ...], *inputs: Any, **named: Any
) -> Any:
    """Runs a block of this stage on the values of the block before."""
    given = list(inputs)
    places = [(0, "hidden_states"), *(entry[1:] for entry in carried)]
    for value, (position, name) in zip(state, places, strict=False):
        if position < len(given):
            given[position] = value
        else:
            named[name] = value
    raise _StopError(block(*given, **named))


def _without_values(value: torch.Tensor | None) -> torch.Tensor | None:
    """Returns an argument for later links; only the embeddings read pixels, and all links masks."""
    if value is None or value.dim() <= 2 or not value.is_floating_point():
        return value
    return value.new_empty((len(value), 0))


def _shell(module: nn.Module) -> nn.Module:
    """Returns a copy of a container with only its submodules that hold no tensors."""
    shell = copy.copy(module)
    shell._parameters, shell._buffers = {}, {}
    shell._modules = {
        key: child
        for key, child in module._modules.items()
        if child is None or not (any(True for _ in child.parameters()) or any(True for _ in child.buffers()))
    }
    return shell


@contextmanager
def _replaced(
    network: nn.Module, modules: Mapping[str, nn.Module], shells: Mapping[str, nn.Module]
) -> Iterator[None]:
    """Puts modules at their names inside the context, and adds the containers that a stage lacks."""
    undone: list[tuple[dict[str, Any], str, Any]] = []

    def put(path: str, module: nn.Module) -> None:
        owner, _, key = path.rpartition(".")
        children: dict[str, Any] = network.get_submodule(owner)._modules
        undone.append((children, key, children.get(key, children)))
        children[key] = module

    try:
        for path in sorted(modules, key=lambda path: path.count(".")):
            if any(outer in modules for outer in ancestors(path)):
                continue
            for outer in ancestors(path):
                owner, _, key = outer.rpartition(".")
                if key not in network.get_submodule(owner)._modules:
                    shell = copy.copy(shells[outer])
                    shell._modules = dict(shell._modules)
                    shell.training = network.training
                    put(outer, shell)
            put(path, modules[path])
        yield
    finally:
        for children, key, before in reversed(undone):
            if before is children:
                del children[key]
            else:
                children[key] = before
