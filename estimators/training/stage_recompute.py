"""Which activations a stage of a pipeline recomputes: what the policy says of the whole network's blocks.

A stage may have one of the blocks, or none, where the network has enough of them for the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

Policy = str | int | tuple[str, ...]


def policy_of_stage(policy: Policy, blocks: Sequence[str], stage: nn.Module) -> Policy:
    """Returns the policy for `apply_activation_checkpoint` on one rank's stages.

    Args:
        policy: That of the whole network.
        blocks: `block_names` of the whole network.
        stage: What is left of it on this rank.
    """
    known = {name for name, _ in stage.named_modules(remove_duplicate=False)}
    here = tuple(name for name in blocks if name in known)
    if isinstance(policy, tuple):
        return tuple(name for name in policy if name in known) or "none"
    if policy == "all":
        return here or "none"
    # Segments of consecutive blocks, of which the last keeps its activations: of one block nothing is left.
    if len(here) < 2:
        return "none"
    return min(policy, len(here)) if isinstance(policy, int) else policy
