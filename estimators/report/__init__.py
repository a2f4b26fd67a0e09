"""The report of a training: one HTML page, from the files of its run folder.

    from ringspark.estimators.report import report
    report(run_uri, "page.html")

A run that trains, failed or finished is reported alike. `model.summary.report` adds what held-out rows tell.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ringspark.estimators.report.facts import Facts
    from ringspark.estimators.report.held_out.findings import HeldOut


def report(run_uri: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Writes the page about the run in the folder `run_uri` to the file `path`, on any store.

    No Spark is asked: a path without a scheme is this machine's disk.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        ValueError: The folder holds no run.
    """
    # Imported here, so that this room costs nothing before a page is asked for.
    from ringspark.estimators.report.facts import Facts, read_run

    write_report(Facts(run=read_run(os.fspath(run_uri))), path)


def summary_facts(summary: Any, held_out: HeldOut | None = None) -> Facts:
    """Returns the content of the page about a finished training.

    The summary tells what the folder told when the training ended, also where the folder is gone.

    Args:
        summary: The `TrainingSummary`.
    """
    from ringspark.estimators.report.facts import Facts, run_of_summary

    return Facts(run=run_of_summary(summary), held_out=held_out)


def loss_figure(summary: Any) -> Figure:
    """Returns a figure of a `TrainingSummary`'s losses and learning rate by epoch; reads no file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from ringspark.estimators.report.drawing import figure_of
    from ringspark.estimators.report.facts import Outcome, RunFacts
    from ringspark.estimators.report.page import check_packages
    from ringspark.estimators.report.sections.curves import draw_losses

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
    from ringspark.estimators.report.page import check_packages, write_page

    check_packages()
    write_page(facts, os.fspath(path))
