"""A process releases modules that were not used for a while."""

import gc
import time
import weakref
from typing import Any

import pyarrow as pa
import pytest
import torch
from ready_models import ready_model
from small_networks import linear
from torch import nn

from ringspark.estimators import TorchRegressionModel
from ringspark.estimators.inference import predict
from ringspark.estimators.inference.predict import MAX_MODULES, ModuleCache


def test_the_least_recently_used_goes_first():
    cache: ModuleCache[nn.Module] = ModuleCache()
    made = [cache.get(key, lambda: nn.Linear(1, 1)) for key in range(MAX_MODULES)]
    assert cache.get(0, lambda: nn.Linear(1, 1)) is made[0]
    cache.get("one more", lambda: nn.Linear(1, 1))
    assert cache.get(0, lambda: nn.Linear(1, 1)) is made[0]
    assert cache.get(1, lambda: nn.Linear(1, 1)) is not made[1]
    cache.clear()
    assert len(cache) == 0


@pytest.mark.spark
def test_a_python_worker_loads_a_model_once_and_lets_it_go_after_its_last_use(spark, tmp_path):
    """In a Spark Python worker, the cache frees the module and maps it again for the next use."""
    predictor = ready_model(TorchRegressionModel, linear(), tmp_path)._predictor()

    def work(batches: Any) -> Any:
        for batch in batches:
            predict.modules.clear()  # an earlier test's model may still be in the cache
            predict.modules.keep_seconds = 0.01
            try:
                seen = weakref.ref(predict.cached_module(predictor))
                deadline = time.monotonic() + 60
                while len(predict.modules) and time.monotonic() < deadline:
                    time.sleep(0.01)
                gc.collect()
                freed = seen() is None
                again = predict.cached_module(predictor)(torch.ones(1, 2)).shape == (1, 1)
            finally:
                predict.modules.clear()
                predict.modules.keep_seconds = predict.KEEP_SECONDS
            is_loaded_once = predict.cached_module(predictor) is predict.cached_module(predictor)
            predict.modules.clear()
            found = {"once": is_loaded_once, "freed": freed, "again": again}
            yield pa.RecordBatch.from_pylist([found] * (batch.num_rows > 0))

    rows = spark.range(0, 1, 1, 1).mapInArrow(work, "once boolean, freed boolean, again boolean").collect()
    assert [tuple(row) for row in rows] == [(True, True, True)]
