"""Part "codecs": activations in one bit or one byte per value, against a plain step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from check.part import Part, Value
from check.parts.offload import saving_step
from check.timing import compare, held_mib, milliseconds, ratio
from check.workloads import NAMES

# Smallest allowed cosine between the gradients and the exact gradients.
_SIMILAR = {"bits": 1 - 1e-6, "int8": 0.98, "fp8": 0.98}


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
        # Both have dropout: on CPUs the codec recomputes the masks, on GPUs torch saves them as booleans.
        own, plain = saving_step(name, self.setup, compression=codec), saving_step(name, self.setup)
        found, exact = (torch.cat([g.flatten() for g in step.gradients()]) for step in (own, plain))
        cosine = float(functional.cosine_similarity(found.double(), exact.double(), dim=0))
        assert cosine >= _SIMILAR[codec], f"the cosine of the gradients is {cosine:.6f}"
        held, plain_held = held_mib(own.forward, self.setup), held_mib(plain.forward, self.setup)
        rounds = compare({"own": own, "plain": plain}, self.setup)
        return [
            *(milliseconds(rounds["own"]), milliseconds(rounds["plain"])),
            *(ratio(rounds["own"], rounds["plain"]), held, plain_held, cosine),
        ]
