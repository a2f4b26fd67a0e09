"""Activation checkpointing: drop activations in the forward pass, recompute them in the backward.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost": a chain of n blocks cut into about
sqrt(n) segments stores the segments' inputs and, while it goes back, one segment's activations: memory
O(sqrt(n)) for one more forward pass. `torch.utils.checkpoint` (non-reentrant) does the recomputing.

Invariants: only the instance attribute `forward` of the chosen modules is replaced, so the module's
type, parameter names, state-dict keys and hooks stay; outputs and gradients stay bitwise the same,
dropout included; buffers that a module updates in its forward pass (running means) move once, not
twice; in evaluation, or without gradients, nothing is recomputed.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

Net = TypeVar("Net", bound=nn.Module)
Chain = nn.Sequential | nn.ModuleList


def apply_activation_checkpoint(net: Net, policy: str | int | Sequence[str]) -> Net:
    """Have some of `net`'s activations recomputed in the backward pass; changes `net` in place.

    Args:
        net: The network. Its chain is the `nn.Sequential` or `nn.ModuleList`, itself included, with the
            most blocks, that is items that hold parameters and, in a list, are made of several layers;
            the outermost of equals.
        policy: `"none"`; `"all"`, every block of the chain is recomputed by itself; `"sqrt"` or a number
            from 2, so many segments of consecutive blocks, the last of which keeps its activations
            because the backward pass needs them at once; or names of submodules, each recomputed as
            a whole.

    Returns:
        `net` itself.

    Raises:
        ValueError: If the policy is unknown, there is no chain to cut, or it was applied before.
    """
    if policy == "none":
        return net
    if any(isinstance(vars(module).get("forward"), _Recompute) for module in net.modules()):
        raise ValueError(
            f"gradientCheckpointing={policy!r}: {_name(net)} is checkpointed already; apply it once"
        )
    if isinstance(policy, str | int):
        # Networks side by side, such as an ensemble's, have a chain each.
        branches = getattr(net, "checkpoint_branches", lambda: [net])()
        for branch in branches:
            _apply_to_chain(branch, policy)
    else:
        for module in _find_named(net, list(policy)):
            _replace_forward(module, _RecomputeWhole(module))
    return net


def segment_bounds(num_blocks: int, num_segments: int) -> list[tuple[int, int]]:
    """Cut a chain into consecutive segments whose lengths differ by at most one; longer ones first."""
    size, extra = divmod(num_blocks, num_segments)
    starts = [i * size + min(i, extra) for i in range(num_segments + 1)]
    return list(itertools.pairwise(starts))


def _apply_to_chain(net: nn.Module, policy: str | int) -> None:
    setting = f"gradientCheckpointing={policy!r}"
    if isinstance(policy, bool) or (isinstance(policy, str) and policy not in ("all", "sqrt")):
        raise ValueError(
            f"{setting} is unknown; give 'none', 'all', 'sqrt', a number of segments, "
            "or a list of submodule names"
        )
    path, chain = _longest_chain(net, setting)
    if policy == "all":
        # Each once, also where a chain shares a block between two places.
        for block in dict.fromkeys(chain):
            _replace_forward(block, _RecomputeWhole(block))
        return
    # Two at least, since the last segment keeps its activations: one alone would change nothing.
    num_segments = max(2, round(math.sqrt(len(chain)))) if policy == "sqrt" else int(policy)
    if not 2 <= num_segments <= len(chain):
        raise ValueError(f"{setting} must be from 2 to {len(chain)}, the number of blocks in {path}")
    if isinstance(chain, nn.ModuleList):
        raise ValueError(
            f"{setting} needs segments of several blocks, but the loop over {path} is in the network's own "
            "forward; use 'all', which recomputes each block, or hold the blocks in an nn.Sequential"
        )
    _replace_forward(chain, _RecomputeSegments(chain, num_segments))


def _longest_chain(net: nn.Module, setting: str) -> tuple[str, Chain]:
    best: tuple[str, Chain] | None = None
    best_length = 1
    for name, module in net.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            blocks = [block for block in module if any(True for _ in block.parameters())]
            if isinstance(module, nn.ModuleList):
                # Its items may stand side by side (embedding tables, heads): only those made of several
                # layers are taken for blocks, and a single layer has little to recompute anyway.
                blocks = [block for block in blocks if any(True for _ in block.children())]
            length = len(blocks)
            if length > best_length:
                path = f"{_name(net)}.{name}" if name else _name(net)
                best, best_length = (path, module), length
    if best is None:
        raise ValueError(
            f"{setting} found no chain of blocks in {_name(net)}; it needs an nn.Sequential or nn.ModuleList "
            "of two or more items with parameters, or give a list of submodule names"
        )
    return best


def _find_named(net: nn.Module, names: list[str]) -> list[nn.Module]:
    if not names:
        raise ValueError("gradientCheckpointing=[] names no submodule; give 'none' to keep every activation")
    known = dict(net.named_modules())
    for name in names:
        if name not in known or not name:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see named_modules()"
            raise ValueError(
                f"gradientCheckpointing names {name!r}, which {_name(net)} does not have; {hint}"
            )
        if isinstance(known[name], nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"gradientCheckpointing names {name!r}, a container without a forward; name its items"
            )
    return [known[name] for name in dict.fromkeys(names)]


def _name(net: nn.Module) -> str:
    return type(net).__name__


def _replace_forward(module: nn.Module, forward: _Recompute) -> None:
    # nn.Module.__call__ looks up self.forward, so an instance attribute is enough, and hooks still run.
    module.forward = forward


class _Recompute:
    """Stands in for `module.forward`. A class, not a closure, so that networks deep-copy and pickle."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.original: Callable[..., Any] | None = vars(module).get("forward")

    def plain_forward(self) -> Callable[..., Any]:
        return self.original or functools.partial(type(self.module).forward, self.module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Lets `inspect.signature(net.forward)` see the arguments of the network's own forward."""
        return self.plain_forward()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.module.training and torch.is_grad_enabled():
            return self.recompute(*args, **kwargs)
        return self.plain_forward()(*args, **kwargs)

    def recompute(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _RecomputeWhole(_Recompute):
    """Keeps the module's inputs only."""

    def recompute(self, *args: Any, **kwargs: Any) -> Any:
        return _checkpoint(self.plain_forward(), [self.module], *args, **kwargs)


class _RecomputeSegments(_Recompute):
    """Keeps the input of each segment of an `nn.Sequential`, and all of the last segment."""

    def __init__(self, module: nn.Sequential, num_segments: int) -> None:
        super().__init__(module)
        self.num_segments = num_segments

    def recompute(self, *args: Any, **kwargs: Any) -> Any:
        (x,) = (*args, *kwargs.values())
        blocks = list(self.module.children())
        *first, (last_start, _) = segment_bounds(len(blocks), self.num_segments)
        for start, stop in first:
            segment = blocks[start:stop]
            x = _checkpoint(functools.partial(_run, segment), segment, x)
        return _run(blocks[last_start:], x)


def _run(blocks: Sequence[nn.Module], x: Any) -> Any:
    for block in blocks:
        x = block(x)
    return x


def _checkpoint(run: Callable[..., Any], modules: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    has_buffers = any(True for module in modules for _ in module.buffers())
    return checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=functools.partial(_contexts, modules) if has_buffers else noop_context_fn,
        **kwargs,
    )


def _contexts(
    modules: Sequence[nn.Module],
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), _spare_buffers(modules)


@contextlib.contextmanager
def _spare_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """While recomputing, let modules update copies of their buffers.

    Batch normalisation would otherwise take every batch into its running mean twice. The buffers are
    swapped, not written back: writing in place would trip autograd's version check on tensors that the
    forward pass saved.
    """
    owners = {id(owner): owner for module in modules for owner in module.modules()}
    kept = [(owner, dict(owner._buffers)) for owner in owners.values() if owner._buffers]
    for owner, buffers in kept:
        owner._buffers.update({name: b.clone() for name, b in buffers.items() if b is not None})
    try:
        yield
    finally:
        for owner, buffers in kept:
            owner._buffers.update(buffers)
