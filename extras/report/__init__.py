"""The report of a training: one HTML page, from the files of its run folder.

    from ringspark.extras.report import report
    report(run_uri, "page.html")

Running, failed and finished runs get the same report. `model.summary.report` adds results on held-out rows.
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

    Uses no Spark session: a path without a scheme is on the local disk.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        ValueError: The folder holds no run.
    """
    # Imported here, so that importing this package is cheap.
    from ringspark.estimators.run.facts import read_run
    from ringspark.extras.report.facts import Facts

    write_report(Facts(run=read_run(os.fspath(run_uri))), path)


def report_summary(summary: Any, path: str | os.PathLike[str], held_out: HeldOut | None = None) -> None:
    """Writes the page about a finished training to the file `path`, on any store.

    The page shows the summary's numbers, and the remaining files of the run folder.

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
    """Returns a figure of a `TrainingSummary`'s losses and learning rate per epoch; reads no file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from ringspark.estimators.run.facts import RunFacts
    from ringspark.extras.report.drawing import figure_of
    from ringspark.extras.report.page import check_packages
    from ringspark.extras.report.sections.curves import draw_losses

    check_packages("a plot", ("matplotlib",))
    run = RunFacts(run_uri=summary.run_uri, outcome=summary, history=summary.epochs)
    return figure_of(lambda figure: draw_losses(figure, run), 3.4)


def write_report(facts: Facts, path: str | os.PathLike[str]) -> None:
    """Writes the page to a file on any store. Raises ImportError if jinja2 or matplotlib is not installed."""
    from ringspark.extras.report.page import check_packages, write_page

    check_packages()
    write_page(facts, os.fspath(path))
