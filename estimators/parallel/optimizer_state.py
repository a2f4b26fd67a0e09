"""The whole optimizer state by parameter name, the same for any number of ranks.

Tensors of a parameter's shape are sharded; other values, such as a step count, belong to the whole
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

# Parameter name -> key of the optimizer -> value. A value is a tensor or a plain number or text.
StateValue = torch.Tensor | bool | int | float | str | None
OptimizerState = dict[str, dict[str, StateValue]]


# Name of a parameter -> rank of its shard group that gathers the parameter's tensors.
RootOf = Callable[[str], int]


def first_rank(name: str) -> int:
    return 0


# Stands in an `OptimizerState` for everything that belongs to no parameter; no module has this name.
NO_PARAMETER = "(optimizer)"


def common_state(optimizer: torch.optim.Optimizer) -> dict[str, StateValue]:
    """Returns what `state_dict()` has besides states of parameters and plain values; ":" joins keys."""
    found: dict[str, Any] = {}
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            is_dict = isinstance(value, dict)
            found |= {f"state:{key}:{k}": v for k, v in value.items()} if is_dict else {f"state:{key}": value}
    for index, group in enumerate(optimizer.param_groups):
        tensors = {k: v for k, v in group.items() if isinstance(v, torch.Tensor) and v.numel() != 1}
        found |= {f"group:{index}:{k}": v for k, v in tensors.items()}
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        others = optimizer.state_dict()
        found |= {f"{k}": v for k, v in others.items() if k not in ("state", "param_groups")}
    return {key: check_value(NO_PARAMETER, key, value) for key, value in found.items()}


def load_common(optimizer: torch.optim.Optimizer, values: Mapping[str, StateValue]) -> None:
    others = {key: value for key, value in values.items() if not key.startswith(("state:", "group:"))}
    if others:
        optimizer.load_state_dict(optimizer.state_dict() | others)
    for key in values.keys() - others.keys():
        kind, owner, *name = key.split(":", 2)
        place: Any = optimizer.param_groups[int(owner)] if kind == "group" else optimizer.state
        if kind == "state" and name:
            place = place[owner]
        last, value = name[0] if name else owner, values[key]
        if isinstance(value, torch.Tensor):
            present = place.get(last)
            value = value.to(present.device if isinstance(present, torch.Tensor) else "cpu", copy=True)
        place[last] = value


def parameter_names(module: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def state_by_name(
    module: nn.Module, optimizer: torch.optim.Optimizer, root_of: RootOf = first_rank
) -> OptimizerState:
    """Returns the state of an optimizer of the module's own parameters. Runs on every rank.

    The root of a parameter gathers `DTensor` shards, one tensor at a time, on the CPU.
    """
    names = parameter_names(module)
    result: OptimizerState = {}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    # In the same order on all ranks, because gathering is a collective call.
    for parameter in sorted(held, key=lambda p: names[p]):
        state = optimizer.state.get(parameter)
        name = names[parameter]
        if state:
            result[name] = {
                key: gather_value(check_value(name, key, state[key]), root_of(name)) for key in sorted(state)
            }
    if common := common_state(optimizer):
        result[NO_PARAMETER] = common
    return result


def load_by_name(module: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    names = parameter_names(module)
    check_known(state, [*names.values(), NO_PARAMETER])
    load_common(optimizer, state.get(NO_PARAMETER, {}))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = state.get(names[parameter])
            # Remove state also if there is none to load: a training may have returned to its start.
            optimizer.state.pop(parameter, None)
            if values is not None:
                optimizer.state[parameter] = {
                    key: place_value(value, parameter, group, key) for key, value in values.items()
                }


def place_value(value: StateValue, parameter: torch.Tensor, group: Mapping[str, Any], key: str) -> StateValue:
    """Returns a copy of this rank's shard of a value, on the device that the optimizer expects."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape and hasattr(parameter, "full_tensor"):
        return shard_like(value, parameter)
    is_count = value.dim() == 0 and (key == "step" or parameter.dim() > 0)
    if is_count and not (group.get("capturable") or group.get("fused")):
        # Step counts stay on the CPU: an optimizer reads them without waiting for the device.
        return value.clone()
    if value.shape == parameter.shape:
        # Fused kernels assume the parameter's memory format.
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value.to(parameter.device, copy=True)


def gather_value(value: StateValue, root: int = 0) -> StateValue:
    """Returns the whole tensor on rank `root`, and at most a shard on others. Runs on every rank.

    `root` is an index into the ranks that together hold all shards.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not hasattr(value, "full_tensor"):
        return value.detach()
    if hasattr(value, "fetch"):
        # A result of `ModelLayout.make_fetchable`.
        return value.fetch()  # type: ignore[no-any-return]
    from ringspark.estimators.collectives.torch_collective import gather_on_root

    sharded: Any = value
    shard: torch.Tensor = sharded.to_local().detach().cpu()
    mesh = sharded.device_mesh
    # Along the last dimension of the mesh ranks have different shards; along other dimensions, the same ones.
    *replica, _ = mesh.get_coordinate()
    if any(replica):
        return shard
    # FSDP2 shards the first dimension like `torch.chunk`: equal shards, a smaller one, then empty ones.
    rows, size = len(value), mesh.size(mesh.ndim - 1)
    most = -(-rows // size)
    counts = [max(0, min(most, rows - rank * most)) * value.shape[1:].numel() for rank in range(size)]
    shards = gather_on_root(shard.contiguous().reshape(-1), counts, mesh.get_group(mesh.ndim - 1), root)
    return torch.cat(shards).reshape(value.shape) if shards else shard


def shard_like(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Returns this rank's shard of `value`, sharded like the `DTensor` `like`; sends nothing."""
    from torch.distributed.tensor import distribute_tensor

    shard = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    # Without the copy, a rank that holds the whole dimension would share the memory of `value`.
    return shard.clone()


def check_value(name: str, key: str, value: object) -> StateValue:
    """Returns the value; refuses values that cannot be saved."""
    is_plain = type(value) in (torch.Tensor, nn.Parameter) or hasattr(value, "full_tensor")
    if is_plain and getattr(value, "layout", None) is torch.strided:
        return value  # type: ignore[return-value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    owner = "" if name == NO_PARAMETER else f" of parameter {name!r}"
    raise ValueError(
        f"the optimizer's state {key!r}{owner} is a {type(value).__name__}, but checkpoints hold only dense "
        "tensors, numbers and strings; store it as a tensor, or choose another optimizer"
    )


def check_known(state: OptimizerState, names: Any) -> None:
    """Raises ValueError if `state` belongs to another network: it has a parameter not in `names`."""
    unknown = sorted(set(state) - set(names))
    if unknown:
        raise ValueError(
            f"the optimizer state belongs to another network: it has {unknown[0]!r}, which this one lacks; "
            "give the model that was trained"
        )
