"""Settings of the gang: number of workers, their devices, and how they synchronize gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from ringspark.estimators.options.checked import AtLeast1
from ringspark.estimators.options.mesh import AUTO, Mesh
from ringspark.estimators.options.sync import AllReduce, LocalTraining, Sync
from ringspark.estimators.training.settings.setting import Section, listed_name, setting
from ringspark.pipelines.entry_points import list_entry_points


def _collectives() -> Iterable[str]:
    # Imported only when a value is checked, because it imports torch, which `--help` does not need.
    from ringspark.estimators.collectives import COLLECTIVES

    return COLLECTIVES


# The config of a training has no "auto", because the planner has chosen a mesh by then.
if TYPE_CHECKING:
    _MeshOrAuto = Mesh
else:
    _MeshOrAuto = Mesh | Literal[AUTO]
# The modes of torch.compile.
_Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True, kw_only=True)
class Workers(Section):
    GROUP = "workers"
    MAY_DIFFER_ON_RESUME = True

    num_workers: AtLeast1 = setting(1, "workers that train at the same time")
    # Another sync may differ only in its sharding: see `run.identity`.
    sync: Sync = setting(
        AllReduce(),
        "how workers synchronize gradients or weights: AllReduce, Zero, LocalSGD, DiLoCo ...",
        may_differ_on_resume=False,
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
    parallelism: _MeshOrAuto = setting(
        Mesh(), "mesh of the workers: a Mesh, or 'auto', which chooses one by estimated memory and step time"
    )
    use_gpu: bool = setting(False, "whether each worker trains on its own GPU")
    launch: Literal["barrier", "tasks"] | None = setting(
        None,
        "how Spark starts the workers: 'barrier', all at once, or 'tasks', as executors come; unset: 'tasks' "
        "with dynamic allocation, else 'barrier'",
    )
    collective: str = setting(
        "torch" if find_spec("horovod") is None else "horovod",
        "library for collectives: 'horovod', 'torch', 'local', or one that a package declares",
        default_words="`'horovod'` where installed, else `'torch'`; with `useGpu` `'torch'`",
        convert=listed_name("collective", _collectives, lambda: list_entry_points("ringspark.collectives")),
    )
    # A compiled network rounds differently, like another number of workers.
    compile: bool | _Mode = setting(
        False, "whether workers compile the network with torch.compile: False, True or a mode"
    )
