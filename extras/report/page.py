"""Assembles the sections of a report, and writes the page atomically."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ringspark.extras.report.content import Block
from ringspark.extras.report.drawing import figure_of
from ringspark.extras.report.facts import RunFacts, read_run, run_of_summary
from ringspark.extras.report.held_out.findings import HeldOut
from ringspark.extras.report.sections import (
    curves,
    data,
    environment,
    faults,
    headline,
    held_out_rows,
    settings,
    throughput,
)
from ringspark.extras.report.template import PAGE
from ringspark.pipelines import storage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In the order of the page: anchor, title, and the function that makes the blocks. A section without blocks is
# omitted.
SECTIONS: tuple[tuple[str, str, Callable[[RunFacts], Sequence[Block]]], ...] = (
    ("headline", "Summary", headline.make),
    ("curves", "Loss, metrics, learning rate", curves.make),
    ("classes", "Held-out rows: classes", held_out_rows.make_classes),
    ("numbers", "Held-out rows: predictions", held_out_rows.make_numbers),
    ("features", "Features", held_out_rows.make_features),
    ("drift", "Drift and contributions", held_out_rows.make_drift),
    ("throughput", "Throughput", throughput.make),
    ("time", "Share of time", throughput.make_time_shares),
    ("memory", "Memory", environment.make_memory),
    ("data", "Data", data.make),
    ("settings", "Settings", settings.make),
    ("faults", "Faults and restarts", faults.make),
    ("environment", "Environment", environment.make),
)


def report(run_uri: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Writes the report of the run in the folder `run_uri` to the file `path`, on any store, without Spark.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        ValueError: The folder holds no run.
    """
    _write(read_run(os.fspath(run_uri)), path)


def report_summary(summary: Any, path: str | os.PathLike[str], held_out: HeldOut | None = None) -> None:
    """Writes the report of a `TrainingSummary` and its run folder to a file.

    Raises ImportError if jinja2 or matplotlib is not installed.
    """
    _write(replace(run_of_summary(summary), held_out=held_out), path)


def loss_figure(summary: Any) -> Figure:
    """Returns a figure of a summary's losses and learning rate. Raises ImportError without matplotlib."""
    check_packages("a plot", ("matplotlib",))
    run = RunFacts(run_uri=summary.run_uri, outcome=summary, history=summary.epochs)
    return figure_of(lambda figure: curves.draw_losses(figure, run), 3.4)


def check_packages(subject: str = "a report", names: Sequence[str] = ("jinja2", "matplotlib")) -> None:
    """Raises ImportError, with the command to install them, if `subject` needs packages that are missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"{subject} needs {' and '.join(names)}, and {' and '.join(missing)} is not installed; "
            "pip install 'ringspark[report]'"
        )


def _write(run: RunFacts, path: str | os.PathLike[str]) -> None:
    check_packages()
    from jinja2 import Environment, StrictUndefined

    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(PAGE)
    sections = [
        {"name": name, "title": title, "blocks": blocks}
        for name, title, make in SECTIONS
        if (blocks := list(make(run)))
    ]
    task = "any" if run.config is None else run.config.task
    title = "Training of a network" if task == "any" else f"Training for {task}"
    page = template.render(title=title, subtitle=run.run_uri, sections=sections)
    storage.write_atomic(storage.normalize(os.fspath(path)), page.encode("utf-8", "replace"))
