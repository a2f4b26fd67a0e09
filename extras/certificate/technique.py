"""The setting `certify`: the hash chain of a training."""

from __future__ import annotations

from typing import Any

from ringspark.estimators.techniques import Technique
from ringspark.extras.certificate.recorder import Recorder, bind_files


class CertifiedRun(Technique):
    def make_recorder(self, config: Any, objects: Any, manifest: Any, device: Any) -> Recorder:
        return Recorder(config, objects, manifest, device)

    def finish(self, run_uri: str) -> None:
        bind_files(run_uri)
