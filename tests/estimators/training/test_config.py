"""Every rule of the config names a remedy, and sizes follow the number of workers."""

from dataclasses import replace
from typing import Any

import pytest

from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.settings.config import TrainConfig

COLUMNS = {"input_columns": ("a", "b"), "label_columns": ("y",)}
CONFIG = TrainConfig(shards_uri="s", run_uri="r", **COLUMNS, max_grad_norm=1.5, num_workers=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_workers": 0}, "numWorkers must be at least 1, got 0"),
        ({"gradient_accumulation": 0}, "at least 1, got 0"),
        ({"learning_rate": 0.0}, "learningRate must be above 0 and finite, got 0.0"),
        ({"learning_rate": float("nan")}, "learningRate must be above 0 and finite, got nan"),
        ({"learning_rate": float("inf")}, "learningRate must be above 0 and finite, got inf"),
        ({"label_columns": ("y", "y"), "losses": ("mse",) * 2, "loss_weights": (1.0, 1.0)}, "column twice"),
        ({"timeout_seconds": float("inf")}, "timeoutSeconds must be above 0 and finite, got inf"),
        ({"max_grad_norm": 0.0}, "maxGradNorm must be above 0, got 0.0"),
        ({"gradient_checkpointing": "some"}, "got 'some'"),
        ({"compile": "fast"}, "compile must be True, False, 'default'.*, got 'fast'"),
        ({"compile": 1}, "compile must be True, False, .*, got 1"),
        ({"compile": "max-autotune", "use_gpu": True, "gradient_accumulation": 2}, "records CUDA graphs"),
        ({"collective": "local"}, "serves one worker, got numWorkers=2"),
    ],
)
def test_a_bad_setting_is_one_sentence(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        replace(CONFIG, **change)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_gang_that_goes_on_with_fewer_workers_reads_the_rows_with_those() -> None:
    """Also with a given size of 'data'; other axes keep their size."""
    config = replace(CONFIG, num_workers=4, parallelism={"data": 4}, collective="torch", min_workers=2)
    assert (config.workers_per_replica, config.with_workers(3).axes["data"]) == (1, 3)
    shards: dict[str, Any] = {"parallelism": {"data": 2, "shard": 2}, "sync": Zero(stage=3)}
    hybrid = replace(config, **shards)
    assert hybrid.workers_per_replica == 2
    assert hybrid.with_workers(2).axes == {**hybrid.axes, "data": 1}
    with pytest.raises(ValueError, match="minWorkers \\(1\\) is less than the 2 workers of one"):
        replace(hybrid, min_workers=1)


def test_a_schedule_of_batch_sizes_counts_copies_of_the_network() -> None:
    config = replace(CONFIG, num_workers=4, parallelism={"tensor": 4}, collective="torch", epochs=2)
    smallest = replace(config, gradient_accumulation=1, batch_size_schedule=((2, 2),))
    assert smallest.batch_sizes.smallest == 2
    with pytest.raises(ValueError, match="must be at least numWorkers"):
        replace(smallest, parallelism={})
