"""The whole state of an optimizer by parameter name, which is the same for any number of ranks.

Sharding cuts the tensors of a parameter's shape (momentum, second moments); the rest, such as a count of
steps, belongs to the parameter as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# Parameter name -> key of the optimizer -> value. A value is a tensor or a plain number or text.
StateValue = torch.Tensor | bool | int | float | str | None
OptimizerState = dict[str, dict[str, StateValue]]


def names_of(module: nn.Module) -> dict[torch.Tensor, str]:
    """Returns each parameter's name; for a tied parameter the first one."""
    return {parameter: name for name, parameter in module.named_parameters()}


def state_by_name(module: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Returns the state of an optimizer that holds the module's parameters themselves. Runs on every rank.

    The first rank joins the parts of tensors that several ranks have (`DTensor`), one at a time, on the CPU.
    """
    names = names_of(module)
    result: OptimizerState = {}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    # All ranks use the same order, because joining the parts is a collective call.
    for parameter in sorted(held, key=lambda p: names[p]):
        state = optimizer.state.get(parameter)
        if state:
            result[names[parameter]] = {
                key: whole(checked(names[parameter], key, state[key])) for key in sorted(state)
            }
    return result


def load_by_name(module: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Loads the result of `state_by_name` into an optimizer that holds the module's parameters themselves."""
    names = names_of(module)
    check_known(state, names.values())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = state.get(names[parameter])
            # Also where nothing was kept: a training may have gone back to before its first step.
            optimizer.state.pop(parameter, None)
            if values is not None:
                optimizer.state[parameter] = {
                    key: placed(value, parameter, group) for key, value in values.items()
                }


def placed(value: StateValue, parameter: torch.Tensor, group: Mapping[str, Any]) -> StateValue:
    """Returns a copy of this rank's part of a state's value, on the device where the optimizer expects it."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape and hasattr(parameter, "full_tensor"):
        return part_of(value, parameter)
    if value.dim() == 0 and not (group.get("capturable") or group.get("fused")):
        # Counts of steps stay on the CPU, where an optimizer reads them without waiting for the device.
        return value.clone()
    if value.shape == parameter.shape:
        # In the parameter's own order of memory, which fused kernels take for granted.
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value.to(parameter.device, copy=True)


def whole(value: StateValue) -> StateValue:
    """Returns on the first rank the whole of a tensor of which it may have a part. Runs on every rank.

    The others get their own part: `full_tensor` would give each of them a whole that none of them needs.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not hasattr(value, "full_tensor"):
        return value.detach()
    if hasattr(value, "fetch"):
        # A stand-in for a tensor that ranks of a mesh have in parts, see `model.layout`.
        return value.fetch()  # type: ignore[no-any-return]
    import torch.distributed as dist

    from ringspark.estimators.collectives.torch_collective import gather_on_root

    sharded: Any = value
    part: torch.Tensor = sharded.to_local().detach().cpu()
    mesh = sharded.device_mesh
    # The last dimension of the mesh has the parts; along another one, ranks have the same ones.
    *copy, _ = mesh.get_coordinate()
    if any(copy):
        return part
    # FSDP2 cuts the first dimension as `chunk` does: equal parts, then a smaller one, then empty ones.
    rows, size = len(value), mesh.size(mesh.ndim - 1)
    most = -(-rows // size)
    counts = [max(0, min(most, rows - rank * most)) * value.shape[1:].numel() for rank in range(size)]
    group = mesh.get_group(mesh.ndim - 1)
    pieces = gather_on_root(part.contiguous().reshape(-1), counts, group, dist.get_process_group_ranks(group))
    return torch.cat(pieces).reshape(value.shape) if pieces else part


def part_of(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Returns this rank's part of `value`, cut like the `DTensor` `like`; sends nothing."""
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    # Without the copy, a rank that holds all of a dimension would share the memory of `value`.
    return part.clone()


def checked(name: str, key: str, value: object) -> StateValue:
    """Returns the value, if it can be saved.

    Raises:
        ValueError: The value is neither a dense tensor nor a plain number or text.
    """
    is_plain = type(value) in (torch.Tensor, nn.Parameter) or hasattr(value, "full_tensor")
    if is_plain and getattr(value, "layout", None) is torch.strided:
        return value  # type: ignore[return-value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"the optimizer keeps {key!r} of parameter {name!r} as {type(value).__name__}, and a state is saved "
        "from dense tensors, numbers and texts; choose another optimizer"
    )


def check_known(state: OptimizerState, names: Any) -> None:
    """Refuses the state of another network.

    Raises:
        ValueError: The state names a parameter that the network does not have.
    """
    unknown = sorted(set(state) - set(names))
    if unknown:
        raise ValueError(
            f"the optimizer state is of another network: it has {unknown[0]!r}, which this one lacks; "
            "give the model that was trained"
        )
