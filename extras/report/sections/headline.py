"""Summary: whether the run finished, its size, and its results."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ringspark.estimators.training.objective.metrics import METRICS
from ringspark.estimators.training.objective.own_metrics import find_metric, is_higher_better
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.report.content import Block, Cards, Table, Text, seconds, show
from ringspark.extras.report.facts import RunFacts


def entries_of(run: RunFacts) -> list[str]:
    """Returns the names of the losses and metrics in the history, in the history's order."""
    found = {"train_loss": None}
    if any(record.validation_loss is not None for record in run.history):
        found["validation_loss"] = None
    return list(found | dict.fromkeys(name for record in run.history for name in record.metrics))


def higher_is_better(entry: str, config: TrainConfig | None) -> bool | None:
    """Returns whether a larger value of a history entry is better; None if unknown."""
    name = entry.partition("_")[2]
    if name == "temperature":  # it is fitted, not judged
        return None
    if config is None:
        if name in METRICS:
            return METRICS[name].higher_is_better
        return False if name.startswith("loss") else None
    metric = find_metric(name, config.metrics)
    return metric is not None and is_higher_better(metric, config.own_metrics)


def make(run: RunFacts) -> Sequence[Block]:
    planned = run.config.epochs if run.config is not None else None
    rows, steps, took = run.so_far
    rate = run.rows_per_second
    ended = "finished" if run.outcome is not None else "failed" if _has_failed(run) else "not finished"
    cards = [
        ("state", ended),
        ("epochs", f"{len(run.history):,}" + (f" of {planned:,}" if planned else "")),
        ("optimizer steps", show(steps)),
        ("rows seen", show(rows)),
        ("training time, including start", seconds(took)),
        ("rows/s in epochs", f"{rate:,.0f}" if math.isfinite(rate) else ""),
    ]
    if run.config is not None:
        cards.append(("workers", show(run.config.num_workers)))
    if run.outcome is not None:
        cards.append(("epoch of the model", show(run.outcome.model_epoch)))
        cards.append(("restarts", show(len(run.outcome.restart_reasons))))
    blocks: list[Block] = [Cards(cards)]
    if run.outcome is None:
        blocks.append(Text(_unfinished(run), warns=True))
    elif run.outcome.stop_reason is not None:
        blocks.append(Text(f"Stopped before its last epoch: {run.outcome.stop_reason}."))
    if run.held_out is not None:
        blocks.extend(Text(note) for note in run.held_out.notes)
    blocks.extend(Text(problem, warns=True) for problem in run.problems)
    if run.missing:
        names = ", ".join(f"{name} ({content})" for name, content in run.missing.items())
        blocks.append(Text(f"The run's folder does not hold: {names}."))
    blocks.append(_results(run) if run.history else Text("No epoch has been finished."))
    return blocks


def _unfinished(run: RunFacts) -> str:
    if _has_failed(run):
        return "A rank has failed; see faults and restarts for its error."
    position = ""
    if (p := run.progress) is not None:
        position = f" The last recorded position is step {p.step:,} of {p.num_steps:,}, epoch {p.epoch:,}."
    return f"The run is in progress or ended early; its folder does not show which.{position}"


def _has_failed(run: RunFacts) -> bool:
    return any(heartbeat.failure for heartbeat in run.heartbeats)


def _results(run: RunFacts) -> Table:
    rows = []
    for entry in entries_of(run):
        values = [(record.value(entry), record.epoch) for record in run.history]
        is_higher = higher_is_better(entry, run.config)
        known = [(value, epoch) for value, epoch in values if not math.isnan(value)]
        best, epoch = "", ""
        if known and is_higher is not None:
            # The first of equal values, like the training's choice.
            value, number = (max if is_higher else min)(known, key=lambda pair: pair[0])
            best, epoch = show(value), show(number)
        rows.append([entry, show(values[-1][0]), best, epoch])
    return Table(["loss or metric", "last epoch", "best", "at epoch"], rows)
