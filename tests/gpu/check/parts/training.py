"""Part "training": a whole training on one rank, from shards, against a plain loop over batches in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import harness
import torch
from written_shards import written

from check.part import Part, Value
from check.shards import train
from check.timing import MIB
from check.workloads import Batch, Workload, plain_rate, workload

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
        work = workload(name, self.setup)
        batches = self._batches(work, self._steps(work, precision))
        inputs, labels = (torch.cat(parts).numpy() for parts in zip(*batches, strict=True))
        folder = self.setup.folder / case.replace(", ", "-")
        manifest = written(folder, {"x": inputs, "y": labels}, row_group_rows=None, num_files=4)
        losses: list[float] = []

        def own() -> float:
            history = train(manifest, work, self.setup, epochs=2, precision=precision).history
            losses[:] = [record.value("train_loss") for record in history]
            return manifest.num_rows / history[-1].seconds

        peaks: dict[str, list[float]] = {}
        calls = {"own": own, "plain": partial(plain_rate, work, batches, self.setup.device, precision)}
        cases = {
            key: partial(self._with_peak, call, peaks.setdefault(key, [])) for key, call in calls.items()
        }
        rates = harness.measure_in_turns(cases, self.setup.rounds, warm_ups=0)
        assert all(0 <= loss < 100 for loss in losses), f"losses {losses}"
        return [
            *(median(rates["own"]), median(rates["plain"])),
            harness.median_ratio(rates["own"], rates["plain"]),
            *(max(peaks[key]) if self.setup.on_gpu else None for key in calls),
            losses[-1],
        ]

    def _steps(self, work: Workload, precision: str) -> int:
        """Returns the number of steps of an epoch, so that an epoch takes about as long on every GPU."""
        if self.setup.is_tiny:
            return 3
        rate = plain_rate(work, self._batches(work, 3), self.setup.device, precision)
        return max(_FEWEST, min(_MOST, round(_EPOCH_SECONDS * rate / work.rows)))

    def _batches(self, work: Workload, count: int) -> list[Batch]:
        found = [work.batch("cpu", seed) for seed in range(count)]
        return [(x.pin_memory(), y.pin_memory()) for x, y in found] if self.setup.on_gpu else found

    def _with_peak(self, call: partial[float], peaks: list[float]) -> float:
        if not self.setup.on_gpu:
            return call()
        torch.cuda.reset_peak_memory_stats(self.setup.device)
        rate = call()
        peaks.append(torch.cuda.max_memory_allocated(self.setup.device) / MIB)
        return rate
