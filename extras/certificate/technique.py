"""The setting `certify`: the hash chain of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringspark.estimators.techniques import Technique
from ringspark.extras.certificate.recorder import Recorder, bind_files


class CertifiedRun(Technique):
    def complete_config(self, config: Any, objects: Any, given: Mapping[str, Any]) -> Any:
        if given["runUri"] is None or given["data"] != "copy":
            raise ValueError(
                "certify=True keeps the rows and every checkpoint in the run's folder, got "
                f"runUri={given['runUri']!r} and data={given['data']!r}; set runUri to a new folder, and "
                "data='copy'"
            )
        return config

    def make_recorder(self, config: Any, objects: Any, manifest: Any, device: Any) -> Recorder:
        return Recorder(config, objects, manifest, device)

    def finish(self, run_uri: str) -> None:
        bind_files(run_uri)
