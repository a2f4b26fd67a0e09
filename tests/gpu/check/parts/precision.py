"""Part "precision": a step in fp32, TF32, bf16 and fp16, by our autocast and loss scaler and by torch's."""

from __future__ import annotations

from collections.abc import Sequence

from check.part import Part, Value
from check.timing import compare
from check.workloads import NAMES, Step, matmul_precision, torch_autocast, torch_scaler, workload
from ringspark.estimators.training.precision import LossScaler, autocast, keep_norms_fp32

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
_STEPS = 20


class Precision(Part):
    columns = (
        *("ms per step", "torch's own", "ratio", "fp32 / this"),
        *(f"loss after {_STEPS} steps", "in fp32"),
    )
    note = (
        "A step with ringspark's autocast, normalization layers in fp32 and loss scaler, and a plain step "
        "with `torch.autocast` and `GradScaler`. `ratio` is plain time / our time; `fp32 / this` is the "
        "speed-up. tf32 is a setting of torch, which ringspark leaves to the user."
    )

    def cases(self) -> Sequence[str]:
        return [f"{name}, {precision}" for name in NAMES for precision in _PRECISIONS]

    def measure(self, case: str) -> Sequence[Value]:
        name, precision = case.split(", ")
        given = "fp32" if precision == "tf32" else precision
        own, plain, reference = self._steps(name, given)
        exact = matmul_precision("highest")(reference)
        with matmul_precision("high" if precision == "tf32" else "highest"):
            losses = [float(own()) for _ in range(_STEPS)]
            wanted = [float(exact()) for _ in range(_STEPS)]
            assert abs(losses[-1] - wanted[-1]) < 0.1 * abs(wanted[0]) + 0.02, (losses[-1], wanted[-1])
            rounds = compare({"own": own, "plain": plain, "fp32": exact}, self.setup)
        return [
            *rounds.milliseconds("own", "plain"),
            *(rounds.ratio("plain", "own"), rounds.ratio("fp32", "own")),
            *(losses[-1], wanted[-1]),
        ]

    def _steps(self, name: str, precision: str) -> tuple[Step, Step, Step]:
        """Returns a step as the trainer takes it, torch's own, and one in fp32."""
        work, device, on = workload(name, self.setup), self.setup.device, self.setup.torch_device
        own = Step(work, device, lambda module: autocast(precision, on), LossScaler(precision, on))
        if precision != "fp32":
            keep_norms_fp32(own.module)
        scaler = torch_scaler(precision, device)
        plain = Step(work, device, lambda module: torch_autocast(precision, device), scaler)
        return own, plain, Step(work, device)
