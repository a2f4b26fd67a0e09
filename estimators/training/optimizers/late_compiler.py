"""Lets a driver make an optimizer without importing torch's compiler.

torch wraps methods of its optimizers so that their first call imports the compiler, which takes a second of a
core. The driver makes optimizers only to check them, while Spark's first job needs that core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim import Optimizer

_COMPILER = "torch._dynamo"
# Attribute under which torch keeps the function to call in place of a wrapped method.
_IN_PLACE = "__dynamo_disable"


def defer_compiler_import() -> None:
    """Lets torch's optimizers call these methods unwrapped until the compiler is imported."""
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
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
        return getattr(Optimizer, method.__name__)(*args, **kwargs)

    return plain
