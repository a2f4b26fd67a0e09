"""Part "training": a whole training on one rank, from shards, against a plain loop over batches in memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch

from check.part import Part, Value
from check.shards import train, write_shards
from check.timing import MIB, ratio, seconds_of
from check.workloads import Workload, workload
from ringspark.estimators.training.optimizers.registry import make_optimizer
from ringspark.estimators.training.precision import DTYPES

_EPOCH_SECONDS, _FEWEST, _MOST = 0.5, 8, 60


class Training(Part):
    columns = ("rows/s", "plain loop", "ratio", "peak MiB", "peak of the plain loop", "last loss")
    note = (
        "Rates of the second epoch. ringspark reads and decodes Parquet while it trains; the plain loop has "
        "all batches in pinned memory before it starts. Same network, autocast, optimizer and batches."
    )

    def cases(self) -> Sequence[str]:
        return [
            *("transformer, bf16", "mlp, bf16", "mlp, fp32"),
            *("transformer, fp32", "transformer, fp16", "mlp, fp16"),
        ]

    def measure(self, case: str) -> Sequence[Value]:
        name, precision = case.split(", ")
        work = workload("mlp" if name == "mlp" else "transformer", self.setup)
        batches = self._batches(work, self._steps(work, precision))
        columns = {
            name: torch.cat([pair[index] for pair in batches]).numpy() for index, name in enumerate("xy")
        }
        manifest = write_shards(columns, self.setup.folder / case.replace(", ", "-"))
        peaks: dict[str, list[float]] = {"own": [], "plain": []}
        rates: dict[str, list[float]] = {"own": [], "plain": []}
        losses: list[float] = []

        def own() -> float:
            history = train(
                manifest,
                work.spec,
                self.setup,
                losses=("cross_entropy" if work.classes else "mse",),
                task="classification" if work.classes else "regression",
                batch_size=work.rows,
                epochs=2,
                precision=precision,
            ).history
            losses[:] = [record.value("train_loss") for record in history]
            return manifest.num_rows / history[-1].seconds

        plain = partial(self._plain, work, batches, precision)
        for _ in range(self.setup.rounds):
            for key, call in (("own", own), ("plain", plain)):
                self._start_peak()
                rates[key].append(call())
                peaks[key].append(self._read_peak())
        assert all(0 <= loss < 100 for loss in losses), f"losses {losses}"
        return [
            *(median(rates["own"]), median(rates["plain"]), ratio(rates["own"], rates["plain"])),
            *(max(peaks[key]) if self.setup.on_gpu else None for key in ("own", "plain")),
            losses[-1],
        ]

    def _steps(self, work: Workload, precision: str) -> int:
        """Returns the number of steps of an epoch, so that an epoch takes about as long on every GPU."""
        if self.setup.is_tiny:
            return 3
        batches = self._batches(work, 3)
        seconds = sum(len(x) for x, _ in batches) / self._plain(work, batches, precision) / len(batches)
        return max(_FEWEST, min(_MOST, round(_EPOCH_SECONDS / seconds)))

    def _batches(self, work: Workload, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = [work.batch("cpu", seed) for seed in range(count)]
        return [(x.pin_memory(), y.pin_memory()) for x, y in found] if self.setup.on_gpu else found

    def _plain(
        self, work: Workload, batches: list[tuple[torch.Tensor, torch.Tensor]], precision: str
    ) -> float:
        """Returns rows/s of the second epoch."""
        device, kind = self.setup.device, self.setup.torch_device.type
        module = work.build(device)
        optimizer = make_optimizer("adamw", module.parameters(), 1e-3, 0.0)
        scaler: Any = torch.amp.GradScaler(kind, enabled=precision == "fp16")

        def context() -> AbstractContextManager[object]:
            return nullcontext() if precision == "fp32" else torch.autocast(kind, DTYPES[precision])

        def epoch() -> None:
            for pair in batches:
                inputs, labels = (tensor.to(device, non_blocking=True) for tensor in pair)
                optimizer.zero_grad()
                with context():
                    outputs = module(inputs)
                scaler.scale(work.loss(outputs, labels)).backward()
                scaler.step(optimizer)
                scaler.update()

        epoch()
        return sum(len(inputs) for inputs, _ in batches) / seconds_of(epoch, device)

    def _start_peak(self) -> None:
        if self.setup.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.setup.device)

    def _read_peak(self) -> float:
        return torch.cuda.max_memory_allocated(self.setup.device) / MIB if self.setup.on_gpu else 0.0
