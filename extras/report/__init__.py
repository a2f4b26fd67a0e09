"""The report of a training: one HTML page, from the files of its run folder.

    from ringspark.extras.report import report
    report(run_uri, "page.html")

The report looks the same for running, failed and finished runs. `model.summary.report` adds results on
held-out rows.
"""

from typing import TYPE_CHECKING

from ringspark.lazy_names import export_lazily

if TYPE_CHECKING:
    from ringspark.extras.report.page import loss_figure as loss_figure
    from ringspark.extras.report.page import report as report
    from ringspark.extras.report.page import report_summary as report_summary

__getattr__, __dir__, __all__ = export_lazily(__name__)
