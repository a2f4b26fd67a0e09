"""The registry of optimizers by name; docs/design.md says why some are our own.

Weight decay is decoupled from the gradient (AdamW) in adamw, adamw8bit, adam1bit, adafactor and sm3. lamb
adds it to the update before scaling. All other optimizers add it to the gradient (L2), as in their papers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.names import check_name

Parameters = Iterable[nn.Parameter] | list[dict[str, Any]]
Factory = Callable[[Any, float, float], torch.optim.Optimizer]


def _fused(parameters: list[Any]) -> bool | None:
    """Returns True if torch's fused kernel can step all parameters, else None for torch's default.

    The kernel takes real parameters only, and on CPUs it ignores strides. SGD stays unfused, because its
    fused form refuses the sparse gradients of embeddings.
    """
    held = [p for entry in parameters for p in (entry["params"] if isinstance(entry, dict) else [entry])]
    devices = {p.device.type for p in held}
    has_kernel = len(devices) == 1 and devices <= {"cpu", "cuda"}
    rows = (not is_lazy(p) and p.is_floating_point() and p.is_contiguous() for p in held)
    return (has_kernel and all(rows)) or None


def _keep_contiguous(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes gradients contiguous before the fused kernel reads them; a user's hook may make strided ones."""

    def arrange(held: torch.optim.Optimizer, *_: object) -> None:
        for group in held.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.grad.is_contiguous():
                    parameter.grad = parameter.grad.contiguous()

    if optimizer.defaults["fused"]:
        optimizer.register_step_pre_hook(arrange)
    return optimizer


@dataclass(frozen=True)
class FromExtras:
    """Makes an optimizer of `ringspark.extras.optimizers`, which is imported then."""

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, parameters: Any, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
        kind: Callable[..., torch.optim.Optimizer] = load_object(f"ringspark.extras.optimizers.{self.path}")
        return kind(parameters, lr=learning_rate, weight_decay=weight_decay, **self.options)


# Name -> factory(parameters or groups, learning_rate, weight_decay); other settings keep their defaults.
OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda p, lr, wd: torch.optim.SGD(p, lr=lr, weight_decay=wd),
    "momentum": lambda p, lr, wd: torch.optim.SGD(p, lr=lr, weight_decay=wd, momentum=0.9),
    "adam": lambda p, lr, wd: _keep_contiguous(torch.optim.Adam(p, lr=lr, weight_decay=wd, fused=_fused(p))),
    "adamw": lambda p, lr, wd: _keep_contiguous(
        torch.optim.AdamW(p, lr=lr, weight_decay=wd, fused=_fused(p))
    ),
    "adamax": lambda p, lr, wd: torch.optim.Adamax(p, lr=lr, weight_decay=wd),
    "nadam": lambda p, lr, wd: torch.optim.NAdam(p, lr=lr, weight_decay=wd),
    "radam": lambda p, lr, wd: torch.optim.RAdam(p, lr=lr, weight_decay=wd),
    "rmsprop": lambda p, lr, wd: torch.optim.RMSprop(p, lr=lr, weight_decay=wd),
    "adagrad": lambda p, lr, wd: torch.optim.Adagrad(p, lr=lr, weight_decay=wd),
    "adadelta": lambda p, lr, wd: torch.optim.Adadelta(p, lr=lr, weight_decay=wd),
    "adam8bit": FromExtras("adam8bit:Adam8bit"),
    "adamw8bit": FromExtras("adam8bit:Adam8bit", {"decoupled": True}),
    "adam1bit": FromExtras("adam1bit:Adam1bit"),
    "adafactor": FromExtras("adafactor:Adafactor"),
    "sm3": FromExtras("sm3:SM3"),
    "lamb": FromExtras("lamb:Lamb"),
    "lars": FromExtras("lars:Lars"),
}

# These divide by an average of squared gradients, so they are not linear in the gradients.
ADAPTIVE: frozenset[str] = frozenset(OPTIMIZERS) - {"sgd", "momentum", "adam1bit", "lars"}

# These take sparse gradients of embeddings.
TAKES_SPARSE: frozenset[str] = frozenset(("sgd", "momentum", "adagrad"))

# These update every weight from its own gradient and state alone, so any flat slice of a parameter can be
# updated separately. Other optimizers need a parameter's rows and columns, norms or blocks.
ELEMENTWISE: frozenset[str] = frozenset(
    ("sgd", "momentum", "adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "adagrad", "adadelta")
) | {"adam1bit"}


def make_optimizer(
    name: str, parameters: Parameters, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Makes an optimizer over parameters or groups; raises ValueError if the name is unknown."""
    check_name("optimizer", name, OPTIMIZERS)
    parameters = list(parameters)  # type: ignore[assignment]
    return OPTIMIZERS[name](parameters, learning_rate, weight_decay)


_COMPILER = "torch._dynamo"
# Attribute under which torch keeps the function to call in place of a wrapped method.
_IN_PLACE = "__dynamo_disable"


def defer_compiler_import() -> None:
    """Lets a driver make an optimizer, only to check it, without importing torch's compiler.

    torch wraps these methods so that their first call imports the compiler, which takes a second of a core
    that Spark's first job needs.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None and _COMPILER not in sys.modules and not hasattr(method, _IN_PLACE):
            setattr(method, _IN_PLACE, _call_until_compiler(method))


def _call_until_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return method(*args, **kwargs)
        # torch now sets its own, which excludes the method from compilation. Another thread may be faster.
        if method.__dict__.get(_IN_PLACE) is plain:
            method.__dict__.pop(_IN_PLACE, None)
        return getattr(torch.optim.Optimizer, method.__name__)(*args, **kwargs)

    return plain
