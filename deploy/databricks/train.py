"""Runs the command `ringspark` as a task of a Databricks job.

Run: by tests/deploy/test_deploy.py, on this machine. Not run on Databricks.
"""

import sys

from ringspark.jobs.command import main

# Databricks counts every SystemExit as a failure, even with code 0.
if code := main(sys.argv[1:]):
    raise SystemExit(code)
