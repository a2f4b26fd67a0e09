"""The setting that spreads one network over several workers: how many along each axis of the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringspark.estimators.names import nearest
from ringspark.estimators.training.settings.declaration import Setting

# The axes in the order in which users think of them.
AXES = ("data", "shard", "tensor", "pipeline", "expert", "sequence")
# Those along which a worker has a part of the network, or of every row.
MODEL_AXES = ("tensor", "pipeline", "expert", "sequence")
# Those of `parallel.model.pipeline.schedules`, which imports torch.
SCHEDULE_NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "pipedream", "2bw")
# Those of `parallel.model.sequence`, which imports torch.
CONTEXT_NAMES = ("ring", "gather", "ulysses")
# Those of `parallel.model.tensor.plan`, which imports torch.
BETWEEN_NAMES = ("whole", "parts")
# Option -> its default: the ways of the axes.
OPTIONS: dict[str, Any] = {
    "plan": None,
    "between": "whole",
    "schedule": "1f1b",
    "virtual": 1,
    "cuts": (),
    "time_chunks": 1,
    "context": "ring",
}
# Option -> the axis of which it is a way; 'time_chunks' without its axis is refused.
AXIS_OF_OPTION = {
    "plan": "tensor",
    "between": "tensor",
    "schedule": "pipeline",
    "virtual": "pipeline",
    "cuts": "pipeline",
    "context": "sequence",
}

# Has the planner choose; never in the config of a training, which has what was chosen.
AUTO = "auto"


def _parallelism(value: Any) -> dict[str, Any] | str:
    """Returns the axes and options that are given, checked one by one."""
    if isinstance(value, str) and value == AUTO:
        return AUTO
    if not isinstance(value, Mapping):
        raise TypeError(
            "parallelism must be a dict of axes, such as {'data': 2, 'tensor': 2}, or 'auto', got "
            f"{value!r}"
        )
    found: dict[str, Any] = {}
    for name, given in value.items():
        if name in OPTIONS:
            found[name] = _CHECKS[name](given)
        elif name not in AXES:
            known = [*AXES, *OPTIONS]
            raise ValueError(f"parallelism takes {', '.join(known)}, got {name!r}{nearest(str(name), known)}")
        elif isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ValueError(
                f"parallelism's {name!r} must be a whole number of workers, 1 or more, got {given!r}"
            )
        else:
            found[name] = given
    return found


def _plan(value: Any) -> dict[str, Any] | None:
    is_plan = isinstance(value, Mapping) and all(isinstance(pattern, str) for pattern in value)
    if value is not None and not is_plan:
        raise ValueError(
            "parallelism's 'plan' must be a dict of patterns over names of layers and styles, such as "
            f"{{'blocks.*.up': 'column', 'blocks.*.down': 'row'}}, got {value!r}"
        )
    return None if value is None else {k: list(v) if isinstance(v, tuple) else v for k, v in value.items()}


def _one_of(name: str, known: Sequence[str]) -> Callable[[Any], str]:
    """Returns what takes one of some words for an option."""

    def convert(value: Any) -> str:
        if value not in known:
            raise ValueError(
                f"parallelism's {name!r} must be one of {', '.join(known)}, got {value!r}"
                f"{nearest(str(value), known)}"
            )
        return str(value)

    return convert


def _number_of(name: str, what: str) -> Callable[[Any], int]:
    """Returns what takes a number of something for an option."""

    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"parallelism's {name!r} must be a whole number of {what}, 1 or more, got {value!r}"
            )
        return value

    return convert


def _cuts(value: Any) -> list[str]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not all(isinstance(name, str) for name in value):
        raise ValueError(
            "parallelism's 'cuts' must be a list of names of the blocks that begin the second and later "
            f"stages, such as ['blocks.2'], got {value!r}"
        )
    return list(value)


_CHECKS: dict[str, Any] = {
    "plan": _plan,
    "between": _one_of("between", BETWEEN_NAMES),
    "schedule": _one_of("schedule", SCHEDULE_NAMES),
    "virtual": _number_of("virtual", "stages a worker"),
    "cuts": _cuts,
    "time_chunks": _number_of("time_chunks", "chunks of a row's time"),
    "context": _one_of("context", CONTEXT_NAMES),
}


def sizes_of(parallelism: Mapping[str, Any], num_workers: int) -> dict[str, int]:
    """Returns the number of workers along each axis; 'data' takes what the others leave, if it is not given.

    Raises:
        ValueError: The product is not the number of workers.
    """
    sizes = {axis: parallelism.get(axis, 1) for axis in AXES}
    others = math.prod(size for axis, size in sizes.items() if axis != "data")
    if "data" not in parallelism:
        sizes["data"] = max(1, num_workers // others)
    if math.prod(sizes.values()) != num_workers:
        told = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "data 1"
        raise ValueError(
            f"parallelism's axes must multiply to numWorkers ({num_workers}), got {told} = "
            f"{math.prod(sizes.values())}; set numWorkers to that, or another axis"
        )
    return sizes


PARALLELISM = Setting[dict[str, Any] | str](
    name="parallelism",
    field="parallelism",
    words="how the workers share one network: workers along 'data' (whole copies, other rows), 'shard' (the "
    "same, and sharding cuts over these workers alone), 'tensor' (parts of matrices), 'pipeline' (some "
    "blocks each), 'expert' (other experts) and 'sequence' (parts of every row), such as {'data': 2, "
    "'tensor': 2}; 'plan' says which layers 'tensor' cuts in a network of your own, 'between' whether the "
    "others work on 'whole' rows or 'parts' of their tokens; 'schedule', 'virtual' and 'cuts' say how a "
    "pipeline runs, whose micro-batches are those of gradientAccumulation, and 'time_chunks' in how many "
    "parts rows go through recurrent layers; 'context' how the workers along 'sequence' attend ('ring', "
    "'gather', 'ulysses'); 'auto' has them planned by memory and time before the workers "
    "start, with gradientAccumulation where that is not set",
    default={},
    default_words="`{}`: all along 'data'",
    convert=_parallelism,
    may_differ_on_resume=True,
)
