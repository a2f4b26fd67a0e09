"""The package's daemon for Python workers of Spark, with torchmetrics imported too.

Many fits in tests have metrics, and each of their ranks would import torchmetrics for 3 s.
"""

from __future__ import annotations

from ringspark.estimators.launch import python_daemon

if __name__ == "__main__":
    python_daemon.PRELOADED += ("torchmetrics",)
    python_daemon.main()
