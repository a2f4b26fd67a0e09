"""Parts "offload" and "codecs": activations on the host, on disk or compressed, against a plain step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from peak_memory import memory_use
from torch.autograd.graph import save_on_cpu
from torch.nn import functional

from check.part import Part, Setup, SkippedError, Value
from check.timing import MIB, compare
from check.workloads import NAMES, Step, workload
from ringspark.extras.activations.hooks import saved_tensor_hooks

# Smallest allowed cosine between the gradients and the exact gradients.
_SIMILAR = {"bits": 1 - 1e-6, "int8": 0.98, "fp8": 0.98}


def saving_step(name: str, setup: Setup, *, offload: str = "none", compression: str = "none") -> Step:
    """Returns a step with dropout whose saved tensors are offloaded or compressed."""
    hooks = {"offload": offload, "compression": compression, "device": setup.torch_device}
    work = workload(name, setup, dropout=0.1)
    return Step(work, setup.device, lambda module: saved_tensor_hooks(module=module, **hooks))


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
        held = [_held_mib(step, self.setup) for step in (own, plain)]
        steps: dict[str, Callable[[], object]] = {"own": own, "plain": plain}
        if self.setup.on_gpu:
            steps["torch"] = save_on_cpu_around(plain)
        rounds = compare(steps, self.setup)
        return [
            *rounds.milliseconds("own", "plain"),
            *(rounds.ratio("own", "plain"), *rounds.milliseconds("torch")),
            *(*held, equality),
        ]


def save_on_cpu_around(step: Step) -> Callable[[], None]:
    def call() -> None:
        with save_on_cpu(pin_memory=True):
            step()

    return call


def _compare_gradients(own: Step, plain: Step) -> str:
    wanted, again, found = plain.gradients(), plain.gradients(), own.gradients()
    if all(map(torch.equal, wanted, again)):
        assert all(map(torch.equal, wanted, found)), "the gradients differ from the plain step's"
        return "bitwise equal"
    for pair in zip(found, wanted, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3 * float(pair[1].abs().max()))
    return "close, like two plain steps"


def _held_mib(step: Step, setup: Setup) -> float:
    return memory_use(step.forward, setup.device).kept / MIB


class Codecs(Part):
    columns = (
        *("ms per step", "plain step", "time ratio"),
        *("held MiB", "held by the plain step", "cosine of the gradients"),
    )
    note = (
        "`activationCompression`. `bits` is exact; `int8` and `fp8` round, so the cosine between all "
        "gradients and the exact gradients is below 1."
    )

    def cases(self) -> Sequence[str]:
        return [f"{name}, {codec}" for name in NAMES for codec in _SIMILAR]

    def measure(self, case: str) -> Sequence[Value]:
        name, codec = case.split(", ")
        own, plain = saving_step(name, self.setup, compression=codec), saving_step(name, self.setup)
        found, exact = (torch.cat([g.flatten() for g in step.gradients()]) for step in (own, plain))
        cosine = float(functional.cosine_similarity(found.double(), exact.double(), dim=0))
        assert cosine >= _SIMILAR[codec], f"the cosine of the gradients is {cosine:.6f}"
        held = [_held_mib(step, self.setup) for step in (own, plain)]
        rounds = compare({"own": own, "plain": plain}, self.setup)
        return [*rounds.milliseconds("own", "plain"), rounds.ratio("own", "plain"), *held, cosine]
