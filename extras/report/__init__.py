"""The report of a training: one HTML page, from the files of its run folder.

    from ringspark.extras.report import report
    report(run_uri, "page.html")

A run that trains, failed or finished is reported alike. `model.summary.report` adds what held-out rows tell.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ringspark.extras.report.facts import Facts
    from ringspark.extras.report.held_out.findings import HeldOut


def report(run_uri: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Writes the page about the run in the folder `run_uri` to the file `path`, on any store.

    No Spark is asked: a path without a scheme is this machine's disk.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        ValueError: The folder holds no run.
    """
    # Imported here, so that this room costs nothing before a page is asked for.
    from ringspark.estimators.run.facts import read_run
    from ringspark.extras.report.facts import Facts

    write_report(Facts(run=read_run(os.fspath(run_uri))), path)


def report_summary(summary: Any, path: str | os.PathLike[str], held_out: HeldOut | None = None) -> None:
    """Writes the page about a finished training to the file `path`, on any store.

    The page shows the summary's numbers, and whatever the run folder still holds.

    Args:
        summary: The `TrainingSummary`.
        held_out: Predictions for held-out rows.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
    """
    from ringspark.estimators.run.facts import run_of_summary
    from ringspark.extras.report.facts import Facts

    write_report(Facts(run=run_of_summary(summary), held_out=held_out), path)


def loss_figure(summary: Any) -> Figure:
    """Returns a figure of a `TrainingSummary`'s losses and learning rate by epoch; reads no file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from ringspark.estimators.run.facts import Outcome, RunFacts
    from ringspark.extras.report.drawing import figure_of
    from ringspark.extras.report.page import check_packages
    from ringspark.extras.report.sections.curves import draw_losses

    check_packages("a plot", ("matplotlib",))
    run = RunFacts(
        run_uri=summary.run_uri, outcome=Outcome.of_summary(summary), history=tuple(summary.epochs)
    )
    return figure_of(lambda figure: draw_losses(figure, run), 3.4)


def write_report(facts: Facts, path: str | os.PathLike[str]) -> None:
    """Writes the page to a file on any store.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
    """
    from ringspark.extras.report.page import check_packages, write_page

    check_packages()
    write_page(facts, os.fspath(path))
