"""Tools to choose settings, in addition to `pyspark.ml.tuning`: folds, a learning rate, a batch size.

Each name is imported on first use.
"""

from typing import TYPE_CHECKING

from ringspark.estimators.lazy_imports import make_getattr

if TYPE_CHECKING:
    from ringspark.extras.tuning.batch_advice import BatchAdvice, advise_batch_size
    from ringspark.extras.tuning.batch_fit import BatchFit, batch_that_fits
    from ringspark.extras.tuning.cross_validation import cross_validate
    from ringspark.extras.tuning.folds import grouped_folds, stratified_folds
    from ringspark.extras.tuning.over_time import Fold, fold_pairs, time_folds
    from ringspark.extras.tuning.rate_range import RateRange, lr_range_test

_PATHS = {
    "BatchAdvice": "ringspark.extras.tuning.batch_advice:BatchAdvice",
    "BatchFit": "ringspark.extras.tuning.batch_fit:BatchFit",
    "Fold": "ringspark.extras.tuning.over_time:Fold",
    "RateRange": "ringspark.extras.tuning.rate_range:RateRange",
    "advise_batch_size": "ringspark.extras.tuning.batch_advice:advise_batch_size",
    "batch_that_fits": "ringspark.extras.tuning.batch_fit:batch_that_fits",
    "cross_validate": "ringspark.extras.tuning.cross_validation:cross_validate",
    "fold_pairs": "ringspark.extras.tuning.over_time:fold_pairs",
    "grouped_folds": "ringspark.extras.tuning.folds:grouped_folds",
    "lr_range_test": "ringspark.extras.tuning.rate_range:lr_range_test",
    "stratified_folds": "ringspark.extras.tuning.folds:stratified_folds",
    "time_folds": "ringspark.extras.tuning.over_time:time_folds",
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


__getattr__ = make_getattr(__name__, _PATHS)


def __dir__() -> list[str]:
    return __all__
