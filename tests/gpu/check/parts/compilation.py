"""Part "compile": a compiled step against the same step uncompiled, and against a plain `torch.compile`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from check.part import Part, SkippedError, Value
from check.timing import compare, synchronize
from check.workloads import NAMES, Step, workload
from ringspark.estimators.training.compilation import compile_network
from ringspark.estimators.training.precision import autocast


class Compilation(Part):
    columns = (
        *("ms per step", "uncompiled", "speed-up", "`torch.compile`, ms"),
        *("seconds to compile", "difference"),
    )
    note = (
        "`compile=True` as in a training. The difference is the largest between an output of the compiled "
        "and of the uncompiled network, relative to the largest output."
    )

    def cases(self) -> Sequence[str]:
        return [f"{name}, {precision}" for name in NAMES for precision in ("fp32", "bf16")]

    def measure(self, case: str) -> Sequence[Value]:
        name, precision = case.split(", ")
        work, device = workload(name, self.setup), self.setup.torch_device
        own, eager, plain = (
            Step(work, self.setup.device, lambda module: autocast(precision, device)) for _ in range(3)
        )
        with ExitStack() as stack:
            try:
                stack.enter_context(compile_network(own.module, True, device))
            except RuntimeError as error:
                if str(error).startswith("compile needs"):  # a compiler that this machine does not have
                    raise SkippedError(str(error).split(";")[0]) from error
                raise
            start = time.perf_counter()
            found = own.forward()
            found.sum().backward()
            synchronize(self.setup.device)
            seconds = time.perf_counter() - start
            wanted = eager.forward()
            difference = float((found - wanted).detach().abs().max() / wanted.detach().abs().max())
            assert difference < (1e-3 if precision == "fp32" else 0.1), f"outputs differ by {difference:.2g}"
            steps: dict[str, Callable[[], object]] = {"own": own, "eager": eager}
            if not self.setup.is_tiny:  # a second compilation takes as long as the first one
                plain.module.forward = torch.compile(plain.module.forward)
                steps["torch"] = plain
            rounds = compare(steps, self.setup)
        return [
            *rounds.milliseconds("own", "eager"),
            *(rounds.ratio("eager", "own"), *rounds.milliseconds("torch")),
            *(seconds, difference),
        ]
