"""The report of a training: one HTML page, from the files of its run folder.

    from ringspark.extras.report import report
    report(run_uri, "page.html")

The report looks the same for running, failed and finished runs. `model.summary.report` adds results on
held-out rows.
"""

from ringspark.lazy_names import export_lazily

_NAMES = {"ringspark.extras.report.page": "loss_figure report report_summary write_report"}
__getattr__, __dir__, __all__ = export_lazily(__name__, _NAMES)
