#!/usr/bin/env bash
# Installs ringspark on one host: install.sh PYTHON FOLDER [horovod]
#
# FOLDER contains ringspark's wheel from `make package`. With "horovod", installs Horovod from a wheel in FOLDER. Without
# this wheel, compiles Horovod, which needs g++ and takes minutes on each host. To build the wheel once, run
# `ringspark build-horovod --output FOLDER`.
#
# Run: by tests/deploy/test_deploy.py in a new virtual environment, with a Horovod wheel from FOLDER.
set -euo pipefail
python=$1
folder=$2
pip=("$python" -m pip --disable-pip-version-check --no-input install --quiet)

# Without pyspark: pip does not see the cluster's own pyspark, and would install a second one.
"${pip[@]}" --no-deps "$folder"/ringspark-*.whl
needed=$("$python" -c '
from importlib.metadata import requires
print("\n".join(n for n in requires("ringspark") if "extra ==" not in n and not n.startswith("pyspark")))')
"${pip[@]}" -r /dev/stdin <<<"$needed"

if [ "${3:-}" = horovod ]; then
	wheels=("$folder"/horovod-*.whl)
	if [ -e "${wheels[0]}" ]; then
		"${pip[@]}" "${wheels[0]}"
	else
		"$python" -m ringspark.jobs.command build-horovod
	fi
	"$python" -c 'import horovod.torch'
fi
"$python" -c 'import ringspark, torch; print("ringspark", ringspark.__version__, "torch", torch.__version__)'
