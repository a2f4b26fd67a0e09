#!/usr/bin/env bash
# Dataproc initialization action: installs ringspark from the bucket in the cluster's metadata.
#
# The folder gs://BUCKET/ringspark contains ../install.sh and ringspark's wheel.
#
# Run: by tests/deploy/test_deploy.py with a local folder and a new virtual environment as RINGSPARK_PYTHON. The lines
# with Google's commands were never run, and the script did not run on Dataproc.
set -euo pipefail
folder=${1:-}
if [ -z "$folder" ]; then
	folder=/tmp/ringspark
	mkdir -p "$folder"
	gcloud storage cp --recursive "$(/usr/share/google/get_metadata_value attributes/ringspark-wheels)/*" "$folder"
fi
bash "$folder/install.sh" "${RINGSPARK_PYTHON:-/opt/conda/default/bin/python}" "$folder"
