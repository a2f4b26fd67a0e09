"""Settings of the gang: number of workers, their devices, and how they exchange gradients."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from ringspark.estimators.training.settings.declaration import Range, Setting, at_least, listed
from ringspark.pipelines.entry_points import names_in


def _collectives() -> Iterable[str]:
    # Imported only when a value is checked, because it imports torch, which `--help` does not need.
    from ringspark.estimators.collectives import COLLECTIVES

    return COLLECTIVES


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
    words="whether each worker trains on a GPU of its own",
    default=False,
    may_differ_on_resume=True,
)
COLLECTIVE = Setting(
    name="collective",
    field="collective",
    words="how gradients are summed: 'horovod' or 'torch' ('local' for one worker), or one that a package "
    "declares",
    default="torch" if find_spec("horovod") is None else "horovod",
    default_words="`'horovod'` where installed, else `'torch'`; with `useGpu` `'torch'`",
    accepts=listed(_collectives, lambda: names_in("ringspark.collectives")),
    may_differ_on_resume=True,
)
# The modes of torch.compile; those that record CUDA graphs do so on a GPU alone.
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
COMPILE = Setting[bool | str](
    name="compile",
    field="compile",
    words="whether workers train the network compiled by torch.compile, which takes them seconds to minutes "
    "before the first step and a C++ compiler: False, True or a mode",
    default=False,
    convert=lambda value: value,
    accepts=Range(
        lambda value: isinstance(value, bool) or value in _MODES,
        lambda: f"must be False, True or one of {', '.join(map(repr, _MODES))}",
    ),
    # It rounds otherwise, like another number of workers.
    may_differ_on_resume=True,
)
