"""Part "memory": the bytes that `plan_memory` expects, and the peak of a real training."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from typing import Any

import torch
from written_shards import written

from check.part import Part, SkippedError, Value
from check.shards import train
from check.timing import MIB
from check.workloads import workload
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.extras.planning.memory.plan import plan_memory

# Params of `plan_memory`, which are the estimators' Params.
_SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "recomputed blocks": {"gradientCheckpointing": "all"},
    "4 micro-batches": {"gradientAccumulation": 4},
    "int8 activations": {"activationCompression": "int8"},
    "activations on the host": {"activationOffload": "host"},
    "8-bit AdamW": {"optimizer": "adamw8bit"},
    "adafactor": {"optimizer": "adafactor"},
}
_STEPS, _FIRST = 6, 3


class Peak(Callback):
    """Reads the peak of the steps from `_FIRST` on: the first steps create the optimizer's state."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.value: int | None = None

    def on_step_end(self, state: TrainingState) -> None:
        on_gpu = self._device.startswith("cuda")
        if on_gpu and state.step == _FIRST - 1:
            torch.cuda.reset_peak_memory_stats(self._device)
        if state.step >= _FIRST:
            self.value = torch.cuda.max_memory_allocated(self._device) if on_gpu else 0


class Memory(Part):
    columns = ("planned MiB", "measured MiB", "planned / measured", "libraries' MiB")
    note = (
        "The peak of a step in steady state. Unlike the plan, the measured peak contains the memory that "
        "libraries such as cuBLAS keep. The last column is the memory that is left after the training."
    )

    def cases(self) -> Sequence[str]:
        return [f"transformer, {name}" for name in _SETTINGS] + ["mlp, fp32", "mlp, bf16"]

    def measure(self, case: str) -> Sequence[Value]:
        name, setting = case.split(", ")
        settings, setup = _SETTINGS[setting], self.setup
        if settings.get("activationOffload") == "host" and not setup.on_gpu:
            raise SkippedError("on the CPU everything is in host memory")
        work = workload(name, setup, dropout=0.1)
        inputs, labels = work.batch("cpu")
        loss = "cross_entropy" if work.classes else "mse"
        planned = {"loss": loss, "useGpu": setup.on_gpu, "collective": "local", **settings}
        plan = plan_memory(work.spec, (inputs, labels), **planned)
        columns = {"x": inputs.repeat(_STEPS, 1).numpy(), "y": labels.repeat(_STEPS).numpy()}
        folder = setup.folder / re.sub(r"\W+", "-", case)
        manifest = written(folder, columns, row_group_rows=None, num_files=4)
        peak = Peak(setup.device)
        given = {re.sub("([A-Z])", r"_\1", key).lower(): value for key, value in settings.items()}
        train(manifest, work, setup, peak, epochs=1, **given)
        assert peak.value is not None, "no step was measured"
        if not setup.on_gpu:
            return [plan.peak / MIB, None, None, None]
        gc.collect()
        left = torch.cuda.memory_allocated(setup.device)
        return [plan.peak / MIB, peak.value / MIB, plan.peak / peak.value, left / MIB]
