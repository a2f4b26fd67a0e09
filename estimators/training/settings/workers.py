"""Settings of the gang: number of workers, their devices, and how they synchronize gradients."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from ringspark.estimators.options.base import ValueRange, at_least, listed
from ringspark.estimators.options.mesh import AUTO, Mesh
from ringspark.estimators.options.sync import AllReduce, LocalTraining, Sync
from ringspark.estimators.training.settings.declaration import Setting
from ringspark.pipelines.entry_points import list_entry_points


def _collectives() -> Iterable[str]:
    # Imported only when a value is checked, because it imports torch, which `--help` does not need.
    from ringspark.estimators.collectives import COLLECTIVES

    return COLLECTIVES


SYNC = Setting[Sync](
    name="sync",
    field="sync",
    words="how workers agree on their weights: AllReduce, Zero, LocalSGD, DiLoCo, ParameterServer ...",
    default=AllReduce(),
    options=Sync,
    # Only to another sharding: see `run.identity`.
    recorded_on_resume=True,
    without_effect=(
        lambda given: (
            given["numWorkers"] == 1
            and given["sync"] != AllReduce()
            and not isinstance(given["sync"], LocalTraining)
        ),
        "there is one worker",
    ),
)
PARALLELISM = Setting[Mesh | str](
    name="parallelism",
    field="parallelism",
    words="how workers share one network: a Mesh, or 'auto', which plans one from memory and time",
    default=Mesh(),
    options=Mesh,
    convert=lambda value: AUTO if isinstance(value, str) and value == AUTO else Mesh.of(value, "parallelism"),
    may_differ_on_resume=True,
)
NUM_WORKERS = Setting(
    name="numWorkers",
    field="num_workers",
    words="workers that train at the same time",
    default=1,
    accepts=at_least(1),
    may_differ_on_resume=True,
)
USE_GPU = Setting(
    name="useGpu",
    field="use_gpu",
    words="whether each worker trains on its own GPU",
    default=False,
    may_differ_on_resume=True,
)
COLLECTIVE = Setting(
    name="collective",
    field="collective",
    words="library for collectives: 'horovod', 'torch', 'local', or one that a package declares",
    default="torch" if find_spec("horovod") is None else "horovod",
    default_words="`'horovod'` where installed, else `'torch'`; with `useGpu` `'torch'`",
    accepts=listed(_collectives, lambda: list_entry_points("ringspark.collectives")),
    may_differ_on_resume=True,
)
# The modes of torch.compile.
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
COMPILE = Setting[bool | str](
    name="compile",
    field="compile",
    words="whether workers compile the network with torch.compile: False, True or a mode",
    default=False,
    convert=lambda value: value,
    accepts=ValueRange(
        lambda value: isinstance(value, bool) or value in _MODES,
        lambda: f"must be False, True or one of {', '.join(map(repr, _MODES))}",
    ),
    # It rounds differently, like another number of workers.
    may_differ_on_resume=True,
)
