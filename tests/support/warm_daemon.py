"""The package's Python daemon with torchmetrics, which each rank would otherwise import for 3 s."""

from ringspark.estimators.launch import python_daemon

if __name__ == "__main__":
    python_daemon.PRELOADED += ("torchmetrics",)
    python_daemon.main()
