"""`TrainTask`: the work of one rank in the form that Spark and `launch.local` ship."""

from __future__ import annotations

from dataclasses import dataclass

from ringspark.estimators import user_code
from ringspark.estimators.collectives import Collective
from ringspark.estimators.memory import check_on_rank
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.worker import train_worker
from ringspark.pipelines import ShardManifest


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """Trains on one rank, if its host has the memory.

    Attributes:
        objects: The `UserObjects`, pickled together with the code from the user's own files.
    """

    config: TrainConfig
    objects: bytes

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        status.phase = "loading the model"
        objects = user_code.loads(self.objects)
        status.phase = "looking at the memory"
        config = check_on_rank(self.config, objects, ShardManifest.load(self.config.shards_uri), collective)
        return train_worker(config, collective, objects, device, status).to_json()
