"""The names of the files and folders in the folder of one training.

run/
  owner.json      the driver that works on the run now; its presence says that a run has begun here
  run.json        the settings, data and model that a resume must share: see `run.identity`
  config.json     the settings of the last start
  parallelism.txt how the workers share the network, where it was planned: the table and the reason
  shards.json     times or versions of the shards, from their file system or store: see `run.shard_states`
  shards/         the rows, if `fit` wrote them into a folder that the user named
  stop            its presence asks the gang to stop; a search writes it
  heartbeat/      rank-<k>.json: each rank's last sign of life; rank-<k>.died: its process ended early
  logs/           rank-<k>.txt: what each rank has printed, its beginning and its end
  environment.json  versions, hosts and devices of each start, and the memory of its ranks at the end
  data.json       columns, statistics and sizes of the shards, which may be removed before this folder
  history.json    the epochs so far
  progress.json   the present step
  steps/          <n>.json: mean losses of some steps each: see `training.step_log`
  tracking/       what trackers keep: events of TensorBoard, lines of JSON, the number of MLflow's run
  timeline/       rank-<k>-<start>.json: where the time of a rank's steps went, one file for each start
  profile/        rank-0-steps-<first>-<last>-<start>.json.gz: the trace of torch.profiler
  first-weights/  the weights that a large network of the user's own starts from, until the training has ended
  checkpoints/    step-<n>: positions to resume from, until the training has ended
  checkpoint/     the final weights
  best-<epoch>/   the weights of the best epoch, if they are kept
  result.json     the finished training; its presence says that the training has finished
"""

from __future__ import annotations

import re
from collections.abc import Collection

OWNER = "owner.json"
IDENTITY = "run.json"
CONFIG = "config.json"
PARALLELISM = "parallelism.txt"
SHARD_STATES = "shards.json"
SHARDS = "shards"
STOP = "stop"
HEARTBEAT = "heartbeat"
LOGS = "logs"
ENVIRONMENT = "environment.json"
DATA = "data.json"
HISTORY = "history.json"
PROGRESS = "progress.json"
STEPS = "steps"
TRACKING = "tracking"
TIMELINE = "timeline"
PROFILE = "profile"
FIRST_WEIGHTS = "first-weights"
CHECKPOINTS = "checkpoints"
CHECKPOINT = "checkpoint"
BEST = "best"
RESULT = "result.json"

_NAMES = {value for name, value in globals().items() if name.isupper()}
# best-<epoch>, and temporary files of a killed `write_atomic` or `check_writable`.
_NUMBERED = re.compile(rf"{BEST}-\d+|\..+[.-][0-9a-f]{{8,}}")
# Rows that a resumed run compares with its own rows. A search has folders with such names too.
_COMPARED = re.compile(rf"{SHARDS}-[0-9a-f]+")


def foreign_names(names: Collection[str]) -> list[str]:
    """Returns the names among those in a run's folder that no run writes."""
    numbered = [_NUMBERED, _COMPARED] if IDENTITY in names else [_NUMBERED]
    return [n for n in names if n not in _NAMES and not any(pattern.fullmatch(n) for pattern in numbered)]
