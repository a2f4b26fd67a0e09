#!/usr/bin/env bash
# EMR bootstrap action: bootstrap.sh s3://BUCKET/FOLDER [horovod]
#
# The folder contains this file, ../install.sh, ringspark's wheel, job.yaml, and jobs/command.py of the source. EMR 7's
# default Python is 3.9, so this script installs Python 3.11. cluster.json sets it for Spark, and trains job.yaml. Replace
# BUCKET in cluster.json, and start the cluster:
#
#     python -c 'import boto3, json; print(boto3.client("emr").run_job_flow(**json.load(open("cluster.json"))))'
#
# With an archive of `ringspark pack` (../yarn) EMR needs no bootstrap action.
#
# Run: by tests/deploy/test_deploy.py with a local folder and a new virtual environment as RINGSPARK_PYTHON, and
# cluster.json on a simulated EMR (moto). The lines with `dnf` and `aws` were never run. Not run on EMR.
set -euo pipefail
python=${RINGSPARK_PYTHON:-/usr/bin/python3.11}
folder=$1
run=()
if [ ! -x "$python" ]; then
	sudo dnf install -y python3.11 python3.11-pip python3.11-devel gcc-c++
fi
if [[ $folder == s3://* ]]; then
	aws s3 cp --recursive "$folder" /tmp/ringspark
	folder=/tmp/ringspark
	run=(sudo)
fi
"${run[@]}" bash "$folder/install.sh" "$python" "$folder" "${@:2}"
