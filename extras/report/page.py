"""Assembles the sections of a report, and writes the page atomically."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ringspark.extras.report.content import Facts, Section
from ringspark.extras.report.drawing import figure_of
from ringspark.extras.report.facts import RunFacts, read_run, run_of_summary
from ringspark.extras.report.held_out.findings import HeldOut
from ringspark.extras.report.sections import (
    attribution,
    classification,
    curves,
    data,
    environment,
    faults,
    headline,
    memory,
    regression,
    settings,
    throughput,
    time_shares,
)
from ringspark.extras.report.template import PAGE
from ringspark.pipelines import storage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In the order of the page.
SECTIONS: tuple[Section, ...] = (
    headline.SECTION,
    curves.SECTION,
    classification.SECTION,
    regression.SECTION,
    attribution.SECTION,
    throughput.SECTION,
    time_shares.SECTION,
    memory.SECTION,
    data.SECTION,
    settings.SECTION,
    faults.SECTION,
    environment.SECTION,
)


def report(run_uri: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Writes the report of the run in the folder `run_uri` to the file `path`, on any store, without Spark.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        ValueError: The folder holds no run.
    """
    write_report(Facts(run=read_run(os.fspath(run_uri))), path)


def report_summary(summary: Any, path: str | os.PathLike[str], held_out: HeldOut | None = None) -> None:
    """Writes the report of a `TrainingSummary` and its run folder to a file.

    Raises the errors of `write_report`.
    """
    write_report(Facts(run=run_of_summary(summary), held_out=held_out), path)


def loss_figure(summary: Any) -> Figure:
    """Returns a figure of a summary's losses and learning rate. Raises ImportError without matplotlib."""
    check_packages("a plot", ("matplotlib",))
    run = RunFacts(run_uri=summary.run_uri, outcome=summary, history=summary.epochs)
    return figure_of(lambda figure: curves.draw_losses(figure, run), 3.4)


def write_report(facts: Facts, path: str | os.PathLike[str]) -> None:
    """Writes the page to a file on any store. Raises ImportError without jinja2 or matplotlib."""
    check_packages()
    page = make_page(facts).encode("utf-8", "replace")
    storage.write_atomic(storage.normalize(os.fspath(path)), page)


def check_packages(subject: str = "a report", names: Sequence[str] = ("jinja2", "matplotlib")) -> None:
    """Raises ImportError, with the command to install them, if `subject` needs packages that are missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"{subject} needs {' and '.join(names)}, and {' and '.join(missing)} is not installed; "
            "pip install 'ringspark[report]'"
        )


def make_page(facts: Facts) -> str:
    from jinja2 import Environment, StrictUndefined

    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(PAGE)
    sections = [
        {"name": section.name, "title": section.title, "blocks": blocks}
        for section in SECTIONS
        if (blocks := list(section.make(facts)))
    ]
    config, title = facts.run.config, "Training of a network"
    if config is not None and config.task != "any":
        title = f"Training for {config.task}"
    return template.render(title=title, subtitle=facts.run.run_uri, sections=sections)
