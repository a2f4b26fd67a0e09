"""Choosing settings by hand: folds, a learning rate, a batch that fits. It stands beside `pyspark.ml.tuning`.

Each name is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringspark.estimators.tuning.batch_advice import BatchAdvice, advise_batch_size
    from ringspark.estimators.tuning.batch_fit import BatchFit, batch_that_fits
    from ringspark.estimators.tuning.cross_validation import cross_validate
    from ringspark.estimators.tuning.folds import grouped_folds, stratified_folds
    from ringspark.estimators.tuning.over_time import Fold, fold_pairs, time_folds
    from ringspark.estimators.tuning.rate_range import RateRange, lr_range_test

_MODULES = {
    "BatchAdvice": "batch_advice",
    "BatchFit": "batch_fit",
    "Fold": "over_time",
    "RateRange": "rate_range",
    "advise_batch_size": "batch_advice",
    "batch_that_fits": "batch_fit",
    "cross_validate": "cross_validation",
    "fold_pairs": "over_time",
    "grouped_folds": "folds",
    "lr_range_test": "rate_range",
    "stratified_folds": "folds",
    "time_folds": "over_time",
}

__all__ = [
    "BatchAdvice",
    "BatchFit",
    "Fold",
    "RateRange",
    "advise_batch_size",
    "batch_that_fits",
    "cross_validate",
    "fold_pairs",
    "grouped_folds",
    "lr_range_test",
    "stratified_folds",
    "time_folds",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
