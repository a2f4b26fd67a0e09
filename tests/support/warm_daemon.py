"""The package's Spark Python daemon, with torchmetrics imported too.

Many fits in tests have metrics, and each rank would import torchmetrics for 3 s.
"""

from __future__ import annotations

from ringspark.estimators.launch import python_daemon

if __name__ == "__main__":
    python_daemon.PRELOADED += ("torchmetrics",)
    python_daemon.main()
