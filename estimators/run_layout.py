"""What the files and folders in the folder of one training are called.

run/
  owner.json      the driver that works on it now; its presence says that a run has begun here
  run.json        what makes it this run: see `run.identity`
  config.json     the settings of its last start
  shards.json     what its file system or store tells of each of its shards: see `run.shard_states`
  shards/         its rows, where `fit` wrote them into a folder that the user named
  heartbeat/      rank-<k>.json: each rank's last sign of life
  history.json    the epochs so far; progress.json: the step that it is at
  checkpoints/    step-<n>: positions to resume from, until the training has ended
  checkpoint/     the final weights; best-<epoch>/ where the best epoch's are kept
  result.json     the finished training: its presence says so
"""

from __future__ import annotations

OWNER = "owner.json"
IDENTITY = "run.json"
CONFIG = "config.json"
SHARD_STATES = "shards.json"
SHARDS = "shards"
HEARTBEAT = "heartbeat"
HISTORY = "history.json"
PROGRESS = "progress.json"
CHECKPOINTS = "checkpoints"
CHECKPOINT = "checkpoint"
BEST = "best"
RESULT = "result.json"
