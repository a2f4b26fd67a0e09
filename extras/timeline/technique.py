"""The setting `timelineEverySteps`."""

from __future__ import annotations

from typing import Any

from ringspark.estimators.techniques import Technique
from ringspark.extras.timeline.rank_timeline import RankTimeline


class StepTimeline(Technique):
    def make_timeline(self, config: Any, mesh: Any, device: Any) -> RankTimeline:
        return RankTimeline(config.timeline_every_steps, mesh.world, config.run_uri, device)
