"""Activation checkpointing: drops activations in the forward pass, and recomputes them in the backward pass.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost": n blocks are divided into about sqrt(n)
segments, and only the input of each segment is stored. Only the calls of the chosen modules are replaced, so
types, `forward`, state-dict keys and hooks stay. On the CPU results are bitwise the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ringspark.models.checks import suggest
from ringspark.models.module_hooks import replace_forward
from ringspark.models.recompute import Segment

Net = TypeVar("Net", bound=nn.Module)
Chain = nn.Sequential | nn.ModuleList


def apply_activation_checkpoint(net: Net, policy: str | int | Sequence[str]) -> Net:
    """Changes `net` in place so that the backward pass recomputes some activations; returns `net`.

    Args:
        net: The network. Its chain is the `nn.Sequential` or `nn.ModuleList` with the most blocks; if
            several are equal, the first in `named_modules()`. A block is an item that has parameters; an item
            of a list must also have child modules. Tensors made between two blocks of a list are kept.
        policy: `"none"`; `"all"` recomputes every block separately; a number n from 2 divides the chain into
            n segments of consecutive blocks; `"sqrt"` takes the square root of the number of blocks as n; a
            list names the submodules to recompute. The last of n segments keeps its activations, because the
            backward pass starts there.

    Raises:
        ValueError: If the policy is unknown, if there is no chain, or if a policy was already applied.
    """
    if policy == "none":
        return net
    if any(isinstance(vars(module).get("_call_impl"), _ReplacedCall) for module in net.modules()):
        raise ValueError(
            f"gradientCheckpointing={policy!r}: {type(net).__name__} is checkpointed already; apply it once"
        )
    if isinstance(policy, str | int):
        # Each member of an ensemble has its own chain.
        branches = getattr(net, "checkpoint_branches", lambda: [net])()
        for branch in branches:
            _apply_to_chain(branch, policy)
    else:
        for module in _find_named(net, list(policy)):
            _Recompute(module)
    return net


def block_names(net: nn.Module) -> list[str]:
    """Returns the names of the modules that `"all"` recomputes; none if there is no chain of blocks."""
    names = {module: name for name, module in net.named_modules()}
    found: list[str] = []
    for branch in getattr(net, "checkpoint_branches", lambda: [net])():
        try:
            _, chain = _longest_chain(branch, "")
        except ValueError:
            continue
        found += [names[module] for block in chain for module in _callables(block)]
    return list(dict.fromkeys(found))


def compile_segments(net: nn.Module, mode: str | None) -> bool:
    """Compiles every recomputed module by torch.compile with `mode`; returns whether a module is recomputed.

    A module that contains recomputed submodules is not compiled: compiled code would skip the Python code
    that sets up the recomputation of the submodules.
    """
    calls = [vars(module).get("_call_impl") for module in net.modules()]
    recomputed = [call for call in calls if isinstance(call, _Recompute)]
    for call in recomputed:
        held = set(call.module.modules()) - {call.module}
        if not any(other.module in held for other in recomputed):
            call.compiled = torch.compile(call.module.forward, mode=mode, dynamic=True)
    return bool(recomputed)


def _apply_to_chain(net: nn.Module, policy: str | int) -> None:
    setting = f"gradientCheckpointing={policy!r}"
    if isinstance(policy, bool) or (isinstance(policy, str) and policy not in ("all", "sqrt")):
        raise ValueError(
            f"{setting} is unknown; give 'none', 'all', 'sqrt', a number of segments, "
            "or a list of submodule names"
        )
    path, chain = _longest_chain(net, setting)
    if policy == "all":
        # `dict.fromkeys`: a block may occur twice in the chain.
        for module in dict.fromkeys(module for block in chain for module in _callables(block)):
            _Recompute(module)
        return
    # At least two: the last segment keeps its activations, so a single one would change nothing.
    num_segments = max(2, round(math.sqrt(len(chain)))) if policy == "sqrt" else int(policy)
    if not 2 <= num_segments <= len(chain):
        raise ValueError(f"{setting} must be from 2 to {len(chain)}, the number of blocks in {path}")
    if net is chain and not _has_forward(net):
        raise ValueError(
            f"{setting} needs a network with a forward pass, but {path} has no forward; give the network "
            "that runs its blocks"
        )
    # Segments of nearly equal length; the longer ones come first.
    *recomputed, _ = np.array_split(np.arange(len(chain)), num_segments)
    places: dict[nn.Module, list[int | None]] = {}
    segments = [i for i, blocks in enumerate(recomputed) for _ in blocks]
    for block, segment in itertools.zip_longest(chain, segments):
        for module in _callables(block):
            places.setdefault(module, []).append(segment)
    for module, own in places.items():
        _Recompute(module, own)
    _MarkPass(net)


def _longest_chain(net: nn.Module, setting: str) -> tuple[str, Chain]:
    chains = {name: module for name, module in net.named_modules() if isinstance(module, Chain)}
    name = max(chains, key=lambda name: len(chain_blocks(chains[name])), default="")
    if not chains or len(chain_blocks(chains[name])) < 2:
        raise ValueError(
            f"{setting} found no chain of blocks in {type(net).__name__}; use an nn.Sequential or "
            "nn.ModuleList of at least two items with parameters, or give a list of submodule names"
        )
    return f"{type(net).__name__}.{name}".rstrip("."), chains[name]


def chain_blocks(chain: Chain) -> list[nn.Module]:
    """Returns the items of a chain that have parameters and, in a list, child modules."""
    blocks = [block for block in chain if any(True for _ in block.parameters())]
    if isinstance(chain, nn.ModuleList):
        # A list may hold parallel layers (embedding tables, heads), so only items of several layers count as
        # blocks. A single layer has little to recompute anyway.
        blocks = [block for block in blocks if any(True for _ in block.children())]
    return blocks


def _callables(block: nn.Module) -> list[nn.Module]:
    if _has_forward(block):
        return [block]
    return [module for child in block.children() for module in _callables(child)]


def _has_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _find_named(net: nn.Module, names: list[str]) -> list[nn.Module]:
    if not names:
        raise ValueError("gradientCheckpointing=[] names no submodule; give 'none' to keep every activation")
    known = dict(net.named_modules(remove_duplicate=False))
    for name in names:
        if name not in known or not name:
            hint = suggest(name, known) or "; see named_modules()"
            raise ValueError(
                f"gradientCheckpointing names {name!r}, which {type(net).__name__} does not have{hint}"
            )
        if not _has_forward(known[name]):
            raise ValueError(
                f"gradientCheckpointing names {name!r}, a container without a forward; name its items"
            )
    return list(dict.fromkeys(known[name] for name in names))


class _Pass:
    def __init__(self) -> None:
        self._places: dict[int, Iterator[int | None]] = {}
        self._place: int | None = None
        self._segment: Segment | None = None

    def segment_of(self, module: nn.Module, places: Sequence[int | None]) -> Segment | None:
        """Returns the segment of a call of `module`; None for the last segment, which keeps everything.

        If the module occurs several times in the chain, its calls are assumed to come in the chain's order.
        """
        place = next(self._places.setdefault(id(module), itertools.cycle(places)))
        if place != self._place:
            self._place, self._segment = place, None if place is None else Segment()
        return self._segment


_PASS: ContextVar[_Pass | None] = ContextVar("_PASS", default=None)


class _ReplacedCall:
    """Replaces the call of `module`, with its hooks; a class, so that networks can be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # nn.Module.__call__ looks up self._call_impl.
        vars(module)["_call_impl"] = self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module)._call_impl(self.module, *args, **kwargs)  # type: ignore[no-untyped-call]


class _MarkPass(_ReplacedCall):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _PASS.set(_Pass())
        try:
            return self.run(*args, **kwargs)
        finally:
            _PASS.reset(token)


class _Recompute(_ReplacedCall):
    """Recomputes the module's calls, separately or with the other calls of a segment.

    `places` has one entry for each occurrence of the module in the chain: the segment's number, or None for
    the last segment. If `places` is empty, each call is recomputed separately.
    """

    def __init__(self, module: nn.Module, places: Sequence[int | None] = ()) -> None:
        super().__init__(module)
        self.places = tuple(places)
        self.compiled: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The compiled function belongs to this module, not to a copy.
        return {**vars(self), "compiled": None}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with replace_forward(self.module, self.compiled) if self.compiled else nullcontext():
            return super().run(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.run(*args, **kwargs)
        current = _PASS.get()
        # A block that is called outside of the network's forward is a separate segment.
        segment = current.segment_of(self.module, self.places) if self.places and current else Segment()
        if segment is None:
            return self.run(*args, **kwargs)
        return segment.call(self.module, self.run, args, kwargs)
