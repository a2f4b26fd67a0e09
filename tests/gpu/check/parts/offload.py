"""Part "offload": activations in pinned host memory or in a file, against a plain step and `save_on_cpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from check.part import Part, Setup, SkippedError, Value
from check.timing import compare, held_mib, milliseconds, ratio
from check.workloads import NAMES, Step, torch_adamw, workload
from ringspark.extras.activations.hooks import saved_tensor_hooks


def saving_step(
    name: str, setup: Setup, *, offload: str = "none", compression: str = "none", dropout: float = 0.1
) -> Step:
    """Returns a step whose saved tensors are offloaded or compressed."""

    def context(module: nn.Module) -> AbstractContextManager[object]:
        return saved_tensor_hooks(
            offload=offload, compression=compression, module=module, device=setup.torch_device
        )

    return Step(
        workload("mlp" if name == "mlp" else "transformer", setup, dropout),
        setup.device,
        torch_adamw,
        context,
    )


class Offload(Part):
    columns = (
        *("ms per step", "plain step", "time ratio", "`save_on_cpu`, ms"),
        *("held MiB", "held by the plain step", "gradients"),
    )
    note = (
        '`activationOffload="host"` and `"disk"`. `held` is the device memory between the forward and the '
        "backward pass; `save_on_cpu` is torch's own hook with pinned memory. The gradients must be bitwise "
        "equal to the plain step's, unless two plain steps differ: some CUDA kernels add in any order."
    )

    def cases(self) -> Sequence[str]:
        return [f"{name}, {offload}" for name in NAMES for offload in ("host", "disk")]

    def measure(self, case: str) -> Sequence[Value]:
        name, offload = case.split(", ")
        if offload == "host" and not self.setup.on_gpu:
            raise SkippedError("on the CPU everything is in host memory")
        own, plain = saving_step(name, self.setup, offload=offload), saving_step(name, self.setup)
        equality = _compare_gradients(own, plain)
        held, plain_held = held_mib(own.forward, self.setup), held_mib(plain.forward, self.setup)
        steps: dict[str, Callable[[], object]] = {"own": own, "plain": plain}
        if self.setup.on_gpu:
            steps["torch"] = partial(_save_on_cpu, plain)
        rounds = compare(steps, self.setup)
        return [
            *(milliseconds(rounds["own"]), milliseconds(rounds["plain"])),
            ratio(rounds["own"], rounds["plain"]),
            milliseconds(rounds["torch"]) if "torch" in rounds else None,
            *(held, plain_held, equality),
        ]


def _compare_gradients(own: Step, plain: Step) -> str:
    wanted, again, found = plain.gradients(), plain.gradients(), own.gradients()
    if all(torch.equal(*pair) for pair in zip(wanted, again, strict=True)):
        equal = all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))
        assert equal, "the gradients differ from the plain step's"
        return "bitwise equal"
    for pair in zip(found, wanted, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3 * float(pair[1].abs().max()))
    return "close, like two plain steps"


def _save_on_cpu(plain: Step) -> None:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        plain()
