"""An optimizer's state by the names of the parameters, whole: the same for any number of ranks.

Tensors of a parameter's shape (momentum, second moments) are what sharding cuts; the rest, such as a
count of steps, belongs to the parameter as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# Parameter name -> key of the optimizer's own -> value. Numbers of a parameter are tensors or plain.
StateValue = torch.Tensor | bool | int | float | str | None
OptimizerState = dict[str, dict[str, StateValue]]


def names_of(module: nn.Module) -> dict[torch.Tensor, str]:
    """Each parameter's name; the first one where it is tied."""
    return {parameter: name for name, parameter in module.named_parameters()}


def state_by_name(module: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """The state of an optimizer that holds the module's parameters themselves. Runs on every rank.

    Parts of tensors that lie on several ranks (`DTensor`) are put together one by one, on the CPU.
    """
    names = names_of(module)
    result: OptimizerState = {}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    # In one order on all ranks: putting together is a collective call.
    for parameter in sorted(held, key=lambda p: names[p]):
        state = optimizer.state.get(parameter)
        if state:
            result[names[parameter]] = {
                key: whole(checked(names[parameter], key, state[key])) for key in sorted(state)
            }
    return result


def load_by_name(module: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Puts `state_by_name`'s result into an optimizer that holds the module's parameters themselves."""
    names = names_of(module)
    check_known(state, names.values())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = state.get(names[parameter])
            if values is not None:
                optimizer.state[parameter] = {
                    key: placed(value, parameter, group) for key, value in values.items()
                }


def placed(value: StateValue, parameter: torch.Tensor, group: Mapping[str, Any]) -> StateValue:
    """A copy of a state's value where the optimizer expects it: this rank's part of it, on its device."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape and hasattr(parameter, "full_tensor"):
        return part_of(value, parameter)
    if value.dim() == 0 and not (group.get("capturable") or group.get("fused")):
        # Counts of steps stay on the CPU, from where an optimizer reads them without waiting.
        return value.clone()
    return value.to(parameter.device, copy=True)


def whole(value: StateValue) -> StateValue:
    """All of a tensor of which this rank may have a part only. Runs on every rank."""
    if isinstance(value, torch.Tensor) and hasattr(value, "full_tensor"):
        full: torch.Tensor = value.full_tensor()
        return full.detach().cpu()
    return value.detach() if isinstance(value, torch.Tensor) else value


def part_of(value: torch.Tensor, like: Any) -> torch.Tensor:
    """This rank's part of `value`, cut as the `DTensor` `like` is; nothing travels."""
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    # A rank that holds all of a dimension would otherwise share the memory of `value`.
    return part.clone()


def checked(name: str, key: str, value: object) -> StateValue:
    """The value, if it is one that can be saved.

    Raises:
        ValueError: It is neither a dense tensor nor a plain number or text.
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
        ValueError: It names a parameter that is not there.
    """
    unknown = sorted(set(state) - set(names))
    if unknown:
        raise ValueError(
            f"the optimizer state is of another network: it has {unknown[0]!r}, which this one lacks; "
            "give the model that was trained"
        )
