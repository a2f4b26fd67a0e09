"""The report of a training: one HTML page, from the files of its run folder.

    from ringspark.extras.report import report
    report(run_uri, "page.html")

The report looks the same for running, failed and finished runs. `model.report` adds results on
held-out rows.
"""

from ringspark.extras.report.page import loss_figure, report, report_summary

__all__ = ["loss_figure", "report", "report_summary"]
