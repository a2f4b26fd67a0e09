#!/usr/bin/env bash
# Databricks init script: installs ringspark and Horovod from a volume on each host.
#
# The volume contains this file, ../install.sh and ringspark's wheel. Without Horovod's wheel for the runtime's torch and
# Python, Horovod is compiled on each host, which takes minutes. databricks.yml sets RINGSPARK_WHEELS.
#
# Run: by tests/deploy/test_deploy.py with a new virtual environment as RINGSPARK_PYTHON. Not run on Databricks.
set -euo pipefail
bash "$RINGSPARK_WHEELS/install.sh" "${RINGSPARK_PYTHON:-/databricks/python/bin/python}" "$RINGSPARK_WHEELS" horovod
