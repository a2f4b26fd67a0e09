"""Tools to choose settings, in addition to `pyspark.ml.tuning`: folds, a learning rate, a batch size.

Each name is imported on first use.
"""

from typing import TYPE_CHECKING

from ringspark.lazy_names import export_lazily

if TYPE_CHECKING:
    from ringspark.extras.tuning.batch_advice import BatchAdvice as BatchAdvice
    from ringspark.extras.tuning.batch_advice import advise_batch_size as advise_batch_size
    from ringspark.extras.tuning.batch_fit import BatchFit as BatchFit
    from ringspark.extras.tuning.batch_fit import batch_that_fits as batch_that_fits
    from ringspark.extras.tuning.cross_validation import cross_validate as cross_validate
    from ringspark.extras.tuning.folds import grouped_folds as grouped_folds
    from ringspark.extras.tuning.folds import stratified_folds as stratified_folds
    from ringspark.extras.tuning.over_time import Fold as Fold
    from ringspark.extras.tuning.over_time import fold_pairs as fold_pairs
    from ringspark.extras.tuning.over_time import time_folds as time_folds
    from ringspark.extras.tuning.rate_range import RateRange as RateRange
    from ringspark.extras.tuning.rate_range import lr_range_test as lr_range_test

__getattr__, __dir__, __all__ = export_lazily(__name__)
