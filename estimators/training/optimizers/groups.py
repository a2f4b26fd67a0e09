"""Parameter groups by patterns over parameter names, each with its own rate and decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any

from torch import nn

from ringspark.estimators.names import nearest
from ringspark.estimators.parallel.layout import layout_of

# Keys of one entry of `parameterGroups`, and torch.optim's names for them.
GROUP_KEYS = {"params": "params", "learningRate": "lr", "weightDecay": "weight_decay"}


def check_groups(groups: object) -> list[dict[str, Any]]:
    """Returns `parameterGroups` as JSON values, "params" always a list; raises ValueError if malformed.

    A group is {"params": patterns, "learningRate": 1e-5, "weightDecay": 0.0}, with one or more shell patterns
    (*, ?, [...]) over parameter names; the other keys are optional.
    """
    if isinstance(groups, Mapping | str) or not isinstance(groups, Sequence):
        raise ValueError(f"parameterGroups must be a list of dicts, got {type(groups).__name__}")
    return [_check_group(index, group) for index, group in enumerate(groups)]


def _check_group(index: int, group: object) -> dict[str, Any]:
    if not isinstance(group, Mapping):
        raise ValueError(f"parameterGroups[{index}] must be a dict, got {type(group).__name__}")
    for key in group:
        if key not in GROUP_KEYS:
            raise ValueError(
                f"parameterGroups[{index}] takes the keys {list(GROUP_KEYS)}, "
                f"got {key!r}{nearest(str(key), GROUP_KEYS)}"
            )
    given = group.get("params")
    patterns = [given] if isinstance(given, str) else given
    is_list = isinstance(patterns, Sequence) and all(isinstance(p, str) and p for p in patterns)
    if not is_list or not patterns:
        raise ValueError(
            f"parameterGroups[{index}] needs 'params', a pattern over names of parameters "
            f"('encoder.*') or a list of patterns, got {given!r}"
        )
    checked: dict[str, Any] = {"params": list(patterns)}
    for key in ("learningRate", "weightDecay"):
        if key not in group:
            continue
        value = group[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not is_number or value < 0 or (key == "learningRate" and value == 0):
            bound = "above 0" if key == "learningRate" else "0 or above"
            raise ValueError(f"parameterGroups[{index}] needs a {key} {bound}, got {value!r}")
        checked[key] = float(value)
    return checked


def group_parameters(
    module: nn.Module, groups: object, learning_rate: float | None = None, weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """Splits a module's trainable parameters into groups in torch.optim's form.

    The first group that matches a parameter gets it; the remaining parameters form a last group. Each rank of
    a sharded network has the groups of the whole network, some of them empty. Raises ValueError if a pattern
    matches no trainable parameter, or only parameters of earlier groups.
    """
    named: dict[str, nn.Parameter | None] = {n: p for n, p in module.named_parameters() if p.requires_grad}
    layout = layout_of(module)
    if layout is not None:
        here = {layout.full_name(name): parameter for name, parameter in named.items()}
        named = {name: here.get(name) for name in layout.trained}
    given = {"lr": learning_rate, "weight_decay": weight_decay}
    defaults = {key: value for key, value in given.items() if value is not None}
    left = dict(named)
    result: list[dict[str, Any]] = []
    for index, group in enumerate(check_groups(groups)):
        own: list[nn.Parameter] = []
        earlier = dict(left)
        for pattern in group["params"]:
            _check_pattern(index, pattern, named, earlier)
            matched = [left.pop(name) for name in list(left) if fnmatchcase(name, pattern)]
            own += [parameter for parameter in matched if parameter is not None]
        stated = {GROUP_KEYS[key]: value for key, value in group.items() if key != "params"}
        result.append({"params": own, **defaults, **stated})
    if left:
        result.append({"params": [p for p in left.values() if p is not None], **defaults})
    return result


def _check_pattern(index: int, pattern: str, named: Iterable[str], left: Iterable[str]) -> None:
    if not any(fnmatchcase(name, pattern) for name in named):
        names = list(named)
        raise ValueError(
            f"parameterGroups[{index}] has the pattern {pattern!r}, which matches no trainable parameter"
            f"{nearest(pattern, names) or f'; they are {names[:10]}'}"
        )
    if not any(fnmatchcase(name, pattern) for name in left):
        raise ValueError(
            f"parameterGroups[{index}] has the pattern {pattern!r}, whose parameters all belong to an "
            "earlier group, and the first match wins; put the narrower pattern first"
        )
