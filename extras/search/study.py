"""The part of a search that uses optuna: samplers and pruners by name, and the study with its journal.

Each trial has its own sampler, seeded from the search's seed and the trial's number. A search therefore
continues in the same way if its driver is killed and started again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any

from ringspark.estimators.names import check_name
from ringspark.extras.search.trainings import check_settings, damage_error
from ringspark.models.process_state import ignore_warnings
from ringspark.pipelines import storage

JOURNAL = "journal.log"
# Constant, because Hyperband's choice of a bracket depends on it.
NAME = "search"
_ABOUT = "ringspark"

SAMPLERS: dict[str, Callable[[Any, int], Any]] = {
    # Running trials count as bad, so that concurrent trials differ.
    "tpe": lambda optuna, seed: optuna.samplers.TPESampler(seed=seed, constant_liar=True),
    "random": lambda optuna, seed: optuna.samplers.RandomSampler(seed=seed),
}
PRUNERS: dict[str, Callable[[Any, int | str], Any]] = {
    "none": lambda optuna, epochs: optuna.pruners.NopPruner(),
    "median": lambda optuna, epochs: optuna.pruners.MedianPruner(),
    "hyperband": lambda optuna, epochs: optuna.pruners.HyperbandPruner(
        min_resource=1, max_resource=epochs, reduction_factor=3
    ),
    "halving": lambda optuna, epochs: optuna.pruners.SuccessiveHalvingPruner(
        min_resource=1, reduction_factor=3
    ),
}


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ValueError(
            "a search needs optuna, which is not installed; pip install 'ringspark[search]'"
        ) from None
    return optuna


def check_choices(sampler: Any, pruner: Any) -> None:
    optuna = import_optuna()
    kinds = (
        ("sampler", sampler, SAMPLERS, optuna.samplers.BaseSampler),
        ("pruner", pruner, PRUNERS, optuna.pruners.BasePruner),
    )
    for what, given, known, kind in kinds:
        if isinstance(given, str):
            check_name(what, given, known, f" or an optuna {what}")
        elif not isinstance(given, kind):
            raise ValueError(f"{what} must be a name or an optuna {what}, got {given!r:.80}")


def sampler_of(sampler: Any, seed: int, number: int) -> Any:
    if not isinstance(sampler, str):
        return sampler
    # optuna 4 warns about a parameter that version 5 sets itself.
    with ignore_warnings(".*constant_liar"):
        return SAMPLERS[sampler](import_optuna(), zlib.crc32(f"{seed} {number}".encode()))


def pruner_of(pruner: Any, epochs: int | None) -> Any:
    return PRUNERS[pruner](import_optuna(), epochs or "auto") if isinstance(pruner, str) else pruner


def open_study(run_uri: str | None, is_larger_better: bool, pruner: Any, about: dict[str, str]) -> Any:
    """Opens or creates the study in the search's folder; `run_uri` None creates a study in memory.

    `about` holds settings, as text, that must be the same in a resumed search.
    """
    optuna = import_optuna()
    verbosity = optuna.logging.get_verbosity()
    kept = None
    if run_uri is not None:
        journal = optuna.storages.journal
        file = os.path.join(storage.filesystem(run_uri)[1], JOURNAL)
        # Optuna's default lock needs symbolic links, which BlobFuse, SMB and the DBFS mount lack. Optuna
        # releases the lock of a killed driver after half a minute.
        backend = journal.JournalFileBackend(file, journal.JournalFileOpenLock(file))
        try:
            kept = optuna.storages.JournalStorage(backend)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise damage_error(run_uri, JOURNAL, error) from None
    try:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            study_name=NAME,
            storage=kept,
            pruner=pruner,
            direction="maximize" if is_larger_better else "minimize",
            load_if_exists=True,
        )
    finally:
        optuna.logging.set_verbosity(verbosity)
    if _ABOUT in study.user_attrs:
        check_settings(run_uri, study.user_attrs[_ABOUT], about)
    else:
        study.set_user_attr(_ABOUT, about)
    return study
