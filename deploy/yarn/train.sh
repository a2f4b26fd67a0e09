#!/usr/bin/env bash
# Trains a job file from a packed environment: train.sh JOB.yaml [options of `ringspark train`]
#
# Run it in the environment to pack, with the cluster's spark-submit on the PATH. The hosts need no Python packages.
#
# Variables and their defaults: ARCHIVE=environment.tar.gz (if it does not exist, `ringspark pack` writes it), WORKERS=2,
# MASTER=yarn, DEPLOY_MODE=cluster, MEMORY_OVERHEAD=4g (Python's memory per executor).
#
# Run: by tests/places/test_yarn.py on a ResourceManager and two NodeManagers.
set -euo pipefail
job=$1
archive=${ARCHIVE:-environment.tar.gz}
mode=${DEPLOY_MODE:-cluster}
python=$(command -v python)
[ -e "$archive" ] || ringspark pack --output "$archive"
options=(--master "${MASTER:-yarn}" --deploy-mode "$mode" --archives "$archive#environment")
options+=(--conf spark.pyspark.python=./environment/bin/python)
options+=(--conf "spark.executor.instances=${WORKERS:-2}" --conf spark.executor.cores=1)
options+=(--conf spark.executor.memoryOverhead="${MEMORY_OVERHEAD:-4g}")
if [ "$mode" = client ]; then
	options+=(--conf "spark.pyspark.driver.python=$python")
else
	# The driver runs on a host of the cluster, in a folder with this file.
	options+=(--files "$job")
	job=$(basename "$job")
fi
# pip's spark-submit runs PYSPARK_PYTHON to find Spark, but that Python may exist on the executors alone.
unset PYSPARK_PYTHON
command=$("$python" -c 'import ringspark.jobs.command as command; print(command.__file__)')
exec spark-submit "${options[@]}" "$command" train "$job" "${@:2}"
