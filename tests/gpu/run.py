"""Runs the GPU check of this checkout: `python3 tests/gpu/run.py`, by any Python that has torch."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 (whoever has no environment may start another Python)
    sys.exit("The GPU check needs Python 3.10 or newer; start another one, as in make gpu PYTHON=python3.12")

from check.command import main

if __name__ == "__main__":
    sys.exit(main())
