"""The names of the files and folders in the folder of one training.

run/
  owner.json      the driver that works on the run now
  run.json        the settings, data and model that a resume must share: see `run.identity`
  config.json     the settings of the last start
  changes.json    the settings that resumes changed, with epoch and step
  parallelism.txt the planned mesh, as a table with the reason
  shards.json     times or versions of the shards: see `run.shards`
  shards/         the rows, if `fit` wrote them into a folder that the user named
  stop            its presence stops the gang; a search writes it
  heartbeat/      rank-<k>.json: each rank's last heartbeat; rank-<k>.died: its process ended early
  logs/           rank-<k>.txt: beginning and end of each rank's output
  privacy.json    all charged private steps, including steps of lost starts: see `extras.privacy.ledger`
  environment.json  versions, hosts and devices of each start, and the memory of its ranks at the end
  table.json      what the network gets of each column, if the fit was given no network
  source.json     the version of the Delta or Iceberg table that the run reads
  data.json       columns, statistics and sizes of the shards
  history.json    the epochs so far
  progress.json   the present step
  steps/          <n>.json: mean losses of several steps each: see `training.step_log`
  tracking/       files of trackers
  timeline/       rank-<k>-<start>.json: how a rank spent its time
  profile/        rank-0-steps-<first>-<last>-<start>.json.gz: the trace of torch.profiler
  first-weights/  the initial weights of the user's large network, until the training has ended
  checkpoints/    step-<n>: positions to resume from, until the training has ended
  checkpoint/     the final weights
  best-<epoch>/   the weights of the best epoch, if they are kept
  certificate/    chain.json: hashes of the training, if `certify` is set; run.sig: their signature
  result.json     the finished training
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ringspark.pipelines.folder_removal import SHARD_PATHS, TEMPORARY

OWNER = "owner.json"
IDENTITY = "run.json"
CONFIG = "config.json"
CHANGES = "changes.json"
PARALLELISM = "parallelism.txt"
SHARD_STATES = "shards.json"
SHARDS = "shards"
STOP = "stop"
HEARTBEAT = "heartbeat"
LOGS = "logs"
PRIVACY = "privacy.json"
ENVIRONMENT = "environment.json"
TABLE = "table.json"
SOURCE = "source.json"
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
CERTIFICATE = "certificate"
RESULT = "result.json"

_NAMES = "|".join(re.escape(value) for name, value in globals().items() if name[0] != "_" and name.isupper())
_NAMES = rf"{_NAMES}|{BEST}-\d+|{TEMPORARY}"
# Rows that a resumed run compares with its own rows. A search has folders with such names too.
_COMPARED = rf"{SHARDS}-[0-9a-f]+"
PARTS = (
    rf"(?:step-\d+/|tensorboard/)?(?:[\w-]+|rank-\d+\.txt|[\w.-]+\.(?:safetensors|json|jsonl|gz|died|sig)|"
    rf"events\.out\.tfevents[^/]*)|{SHARD_PATHS}"
)
"""Regular expression of the paths below a folder in a run's folder."""
PATHS = rf"(?:{_NAMES}|{_COMPARED})(?:/(?:{PARTS}))?"
"""Regular expression of all paths in a run's folder."""


def foreign_names(names: Collection[str]) -> list[str]:
    """Returns the names in a run's folder that no run writes."""
    known = re.compile(f"{_NAMES}|{_COMPARED}" if IDENTITY in names else _NAMES)
    return [name for name in names if not known.fullmatch(name)]


def find_mark(names: Collection[str]) -> str:
    """Returns the file that marks a folder with these names as a run."""
    return IDENTITY if IDENTITY in names and OWNER not in names else OWNER
