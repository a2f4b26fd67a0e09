"""Runs the GPU check: `python -m ringspark.gpu_check`, also from a checkout that is not installed."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 (whoever has no environment may start another Python)
    sys.exit(
        "gpu_check needs Python 3.10 or newer; start it with another Python, as in make gpu PYTHON=python3.12"
    )

from ringspark.extras.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
