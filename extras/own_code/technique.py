"""A user's own optimizer, hooks of her parameters, and a module of Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ringspark.estimators.techniques import Technique
from ringspark.estimators.training.build import build_configured_optimizer
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.own_code.optimizer_check import check_own_optimizer
from ringspark.models.network_copy import HOOKS


def check_parameters(config: TrainConfig, network: nn.Module) -> None:
    """Raises ValueError if a hook needs the whole gradient, or `sync` shards parameters that share memory."""
    model, named = f"model {type(network).__name__}", dict(network.named_parameters())
    hooked = [name for name, p in named.items() if any(getattr(p, kind, None) for kind in HOOKS)]
    if config.sync.sharding != "none" and (pair := find_overlap(named)):
        raise ValueError(
            f"parameters {pair[0]!r} and {pair[1]!r} of {model} share memory, but with sync={config.sync!r} "
            "different workers update them; set sync=AllReduce(), or give both names the same nn.Parameter"
        )
    unfit = next((name for name in hooked if not has_linear_hooks(named[name])), None)
    if unfit is not None and config.is_in_step:
        raise ValueError(
            f"a hook of parameter {unfit!r} of {model} is not linear in the gradient (it may clip), but each "
            f"of the {config.num_workers} workers calls it before the gradients are summed; remove the hook "
            "and set maxGradNorm, change the gradient in the optimizer's step(), or set numWorkers=1"
        )


def find_overlap(named: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Returns the names of two parameters that share memory; None if no two do."""
    spans = []
    for name, tensor in named.items():
        if tensor.layout == torch.strided and not is_lazy(tensor) and tensor.numel():
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            first = tensor.storage_offset() * tensor.itemsize
            storage = tensor.untyped_storage()._cdata
            spans.append((storage, first, first + (last + 1) * tensor.itemsize, name))
    for one, two in pairwise(sorted(spans)):
        if one[0] == two[0] and two[1] < one[2]:
            return one[3], two[3]
    return None


@torch.no_grad()
def has_linear_hooks(parameter: torch.Tensor) -> bool:
    """Returns whether the hooks are linear: hook(a) + hook(b) equals hook(a + b). Calls the hooks."""
    if parameter.is_meta or is_lazy(parameter):
        return True
    weight, gradient, version = parameter.detach().clone(), parameter.grad, parameter._version
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(weight.shape, generator=generator).to(weight) for _ in range(2))

    def run(value: torch.Tensor) -> torch.Tensor | None:
        for hook in (parameter._backward_hooks or {}).values():
            changed = hook(value.clone())
            value = value if changed is None else changed
        parameter.grad = value.clone()
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)
        return parameter.grad

    try:
        for scale in (1.0, 1e6):  # a hook that clips must clip at 1e6
            found = [run(value * scale) for value in (one, two, one + two)]
            if parameter._version != version or any(value is None for value in found):
                return False  # the hook runs an optimizer step
            first, second, both = (value for value in found if value is not None)
            if not torch.allclose(first + second, both, 1e-3, 1e-3 * scale):
                return False
        # A term that each worker adds would be added several times.
        nothing = run(torch.zeros_like(one))
        if nothing is None or nothing.any():
            return False
    except Exception:  # user code may raise anything
        return True
    finally:
        parameter.copy_(weight)
        parameter.grad = gradient
    return True


_PACKAGES = ("lightning", "pytorch_lightning")


class OwnCode(Technique):
    def check_network(self, config: Any, objects: Any, network: nn.Module) -> None:
        if config.num_workers > 1:
            check_parameters(config, network)
        classes = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(network).__mro__}
        is_lightning = any((package, "LightningModule") in classes for package in _PACKAGES)
        # Its training_step computes a loss, which the default loss must not replace.
        if is_lightning and "auto" in config.losses and not config.has_own_step:
            raise ValueError(
                f"model {type(network).__name__} is a LightningModule, and only its forward is trained; set "
                "loss to what its training_step computes, and optimizer to what its configure_optimizers "
                "makes, as docs/lightning.md shows, or set trainingStep='lightning'"
            )

    def check_optimizer(self, config: Any, objects: Any, network: nn.Module) -> None:
        if objects.optimizer is not None:
            check_own_optimizer(config, partial(build_configured_optimizer, config, objects), network)
