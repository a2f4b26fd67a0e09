"""The report of a training: one HTML page, from the files of its run folder.

    from ringspark.estimators.report import report
    report(run_uri, "page.html")

A run that trains, failed or finished is reported alike. `model.summary.report` adds what held-out rows tell.
"""

from __future__ import annotations

import os


def report(run_uri: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Writes the page about the run in the folder `run_uri` to the file `path`, on any store.

    No Spark is asked: a path without a scheme is this machine's disk.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        ValueError: The folder holds no run.
    """
    # Imported here, so that this room costs nothing before a page is asked for.
    from ringspark.estimators.report.facts import Facts, read_run
    from ringspark.estimators.report.page import check_packages, write_page

    check_packages()
    write_page(Facts(run=read_run(os.fspath(run_uri))), os.fspath(path))
