"""The registry: optimizers by name.

An optimizer is made after the module has its final form. The learning rate is the user's for any number of
ranks. An optimizer that torch lacks, or whose version does not fit, has its own file.

Weight decay is decoupled from the gradient (AdamW) in adamw, adamw8bit, adam1bit, adafactor and sm3. In lamb
it is added to the update before scaling. In all others it is part of the gradient (L2), as in their papers.

Our own use no library: pytorch_optimizer's SM3 keeps a full-size momentum, its LAMB scales the steps of
biases too, and its LARS has no rate in the velocity; for the others see their files. Muon is left out: it
takes only matrices, and would need a second optimizer for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ringspark.estimators.names import check_name
from ringspark.estimators.training.optimizers.adafactor import Adafactor
from ringspark.estimators.training.optimizers.adam1bit import Adam1bit
from ringspark.estimators.training.optimizers.adam8bit import Adam8bit
from ringspark.estimators.training.optimizers.base import Parameters
from ringspark.estimators.training.optimizers.lamb import Lamb
from ringspark.estimators.training.optimizers.lars import Lars
from ringspark.estimators.training.optimizers.sm3 import SM3

Factory = Callable[[Any, float, float], torch.optim.Optimizer]


def _fused(parameters: list[Any]) -> bool | None:
    """Returns True, for one kernel per step, if torch has one for all parameters, else None for its default.

    Complex parameters are left to the default, because the kernel takes real ones alone; so are those that
    do not lie in memory row by row, because the kernel of CPUs walks memory without a look at strides, and
    lazy ones, whose memory is not there yet: the driver checks them, a rank gives them their size first.
    SGD stays as it is, because its fused form refuses the sparse gradients of embeddings.
    """
    held = [p for entry in parameters for p in (entry["params"] if isinstance(entry, dict) else [entry])]
    devices = {p.device.type for p in held}
    has_kernel = len(devices) == 1 and devices <= {"cpu", "cuda"}
    rows = (not is_lazy(p) and p.is_floating_point() and p.is_contiguous() for p in held)
    return (has_kernel and all(rows)) or None


def _by_rows(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Has gradients that a user's hook replaced lie row by row too when the kernel reads them."""

    def arrange(held: torch.optim.Optimizer, *_: object) -> None:
        for group in held.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.grad.is_contiguous():
                    parameter.grad = parameter.grad.contiguous()

    if optimizer.defaults["fused"]:
        optimizer.register_step_pre_hook(arrange)
    return optimizer


# Name -> factory(parameters or groups, learning_rate, weight_decay); other settings keep their defaults.
OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda p, lr, wd: torch.optim.SGD(p, lr=lr, weight_decay=wd),
    "momentum": lambda p, lr, wd: torch.optim.SGD(p, lr=lr, weight_decay=wd, momentum=0.9),
    "adam": lambda p, lr, wd: _by_rows(torch.optim.Adam(p, lr=lr, weight_decay=wd, fused=_fused(p))),
    "adamw": lambda p, lr, wd: _by_rows(torch.optim.AdamW(p, lr=lr, weight_decay=wd, fused=_fused(p))),
    "adamax": lambda p, lr, wd: torch.optim.Adamax(p, lr=lr, weight_decay=wd),
    "nadam": lambda p, lr, wd: torch.optim.NAdam(p, lr=lr, weight_decay=wd),
    "radam": lambda p, lr, wd: torch.optim.RAdam(p, lr=lr, weight_decay=wd),
    "rmsprop": lambda p, lr, wd: torch.optim.RMSprop(p, lr=lr, weight_decay=wd),
    "adagrad": lambda p, lr, wd: torch.optim.Adagrad(p, lr=lr, weight_decay=wd),
    "adadelta": lambda p, lr, wd: torch.optim.Adadelta(p, lr=lr, weight_decay=wd),
    "adam8bit": lambda p, lr, wd: Adam8bit(p, lr=lr, weight_decay=wd),
    "adamw8bit": lambda p, lr, wd: Adam8bit(p, lr=lr, weight_decay=wd, decoupled=True),
    "adam1bit": lambda p, lr, wd: Adam1bit(p, lr=lr, weight_decay=wd),
    "adafactor": lambda p, lr, wd: Adafactor(p, lr=lr, weight_decay=wd),
    "sm3": lambda p, lr, wd: SM3(p, lr=lr, weight_decay=wd),
    "lamb": lambda p, lr, wd: Lamb(p, lr=lr, weight_decay=wd),
    "lars": lambda p, lr, wd: Lars(p, lr=lr, weight_decay=wd),
}

# Those that divide by an average of squared gradients, and so are not linear in them.
ADAPTIVE: frozenset[str] = frozenset(OPTIMIZERS) - {"sgd", "momentum", "adam1bit", "lars"}

# Optimizers that update every weight from its own gradient and state alone, so that any flat slice of a
# parameter may be updated by itself. The others need a parameter's rows and columns, norms or blocks.
ELEMENTWISE: frozenset[str] = frozenset(
    (
        "sgd",
        "momentum",
        "adam",
        "adamw",
        "adamax",
        "nadam",
        "radam",
        "rmsprop",
        "adagrad",
        "adadelta",
        "adam1bit",
    )
)


def make_optimizer(
    name: str, parameters: Parameters, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Makes the optimizer registered as `name` over `parameters`, or over groups of them.

    Raises:
        ValueError: The name is unknown.
    """
    check_name("optimizer", name, OPTIMIZERS)
    parameters = list(parameters)  # type: ignore[assignment]
    return OPTIMIZERS[name](parameters, learning_rate, weight_decay)
