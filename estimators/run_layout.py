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

from ringspark.pipelines.folder_removal import SHARDS as _SHARD_PATHS

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

_NAMES = {value for name, value in globals().items() if name[0].isalpha() and name.isupper()}
# best-<epoch>, and temporary files of a killed `write_atomic` or `check_writable`.
_NUMBERED = re.compile(rf"{BEST}-\d+|\..+[.-][0-9a-f]{{8,}}")
# Rows that a resumed run compares with its own rows. A search has folders with such names too.
_COMPARED = re.compile(rf"{SHARDS}-[0-9a-f]+")


def foreign_names(names: Collection[str]) -> list[str]:
    """Returns the names in a run's folder that no run writes."""
    numbered = [_NUMBERED, _COMPARED] if IDENTITY in names else [_NUMBERED]
    return [n for n in names if n not in _NAMES and not any(pattern.fullmatch(n) for pattern in numbered)]


def mark_among(names: Collection[str]) -> str | None:
    """Returns the file in a folder that marks it as a run; None if it is none."""
    return next((mark for mark in (OWNER, IDENTITY) if mark in names), None)


_WEIGHTS = r"[\w-]+|[\w.-]+\.(?:safetensors|json)"
# Folder -> regular expression of the paths below it.
_FOLDERS = {
    SHARDS: _SHARD_PATHS,
    HEARTBEAT: r"rank-\d+\.(?:json|died)|driver\.json",
    LOGS: r"rank-\d+\.txt",
    STEPS: r"\d+\.json",
    TRACKING: r"[^/]+\.jsonl?|tensorboard/events\.out\.tfevents[^/]*",
    TIMELINE: r"rank-[\w-]+\.json",
    PROFILE: r"rank-[\w-]+\.json\.gz",
    FIRST_WEIGHTS: _WEIGHTS,
    CHECKPOINTS: rf"step-\d+/(?:{_WEIGHTS})",
    CHECKPOINT: _WEIGHTS,
    CERTIFICATE: r"chain\.json|run\.sig",
}


def paths_below(name: str) -> str:
    """Returns the regular expression of the paths that a run writes below `name`, an entry of its folder."""
    if name.startswith(f"{SHARDS}-"):
        return _SHARD_PATHS
    return _WEIGHTS if name.startswith(f"{BEST}-") else _FOLDERS.get(name, "")


PATHS = "|".join(
    [
        *(rf"{name}/(?:{paths})" for name, paths in _FOLDERS.items()),
        rf"{SHARDS}-[0-9a-f]+/(?:{_SHARD_PATHS})",
        rf"{BEST}-\d+/(?:{_WEIGHTS})",
        *map(re.escape, sorted(_NAMES - _FOLDERS.keys())),
    ]
)
"""Regular expression of all paths in a run's folder."""
