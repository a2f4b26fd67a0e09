"""Batch size advice from a history with noise scales."""

from unittest.mock import Mock

import pytest
from small_training import epoch_record

from ringspark.estimators.training.history import GradientNoise
from ringspark.extras.tuning import BatchAdvice, advise_batch_size


def advice_of(batch_size: int, *noises: GradientNoise | None) -> BatchAdvice:
    given = {"steps": 10, "rows": 10 * batch_size, "batch_size": batch_size}
    return advise_batch_size(Mock(**{"summary.epochs": [epoch_record(**given, noise=n) for n in noises]}))


def test_at_the_critical_size_a_row_brings_half_and_twice_the_steps_are_needed() -> None:
    advice = advice_of(64, None, GradientNoise(variance=640.0, square=10.0))
    assert advice.noise_scale == 64
    assert advice.efficiency(64) == 0.5
    # Steps 1 + 64 / B and rows 1 + B / 64, both 2 at 64.
    assert advice.steps(128) == pytest.approx(1.5 / 2)
    assert advice.rows(128) == pytest.approx(3 / 2)
    assert "near the critical size of 64 rows; leave it" in str(advice)
    assert "64 (now)" in advice._repr_html_()


@pytest.mark.parametrize(
    ("batch_size", "words"),
    [
        (32, "of the critical size of 1,040 rows; batchSize=1024 needs 0.06 times the steps"),
        (8192, "batchSize=8,192 is 7.88 times the critical size of 1,040 rows, so a row gives 11%"),
    ],
)
def test_a_batch_far_from_the_critical_size_is_told_what_another_costs(batch_size: int, words: str) -> None:
    advice = advice_of(batch_size, GradientNoise(variance=1040.0, square=1.0))
    assert advice.suggestion == 1024
    assert words in advice.verdict


def test_a_history_without_noise_is_told_what_to_set() -> None:
    with pytest.raises(ValueError, match="needs a model that was trained with noiseScale=True"):
        advice_of(64, None)
    with pytest.raises(ValueError, match="train for more steps, or with a larger batchSize"):
        advice_of(64, GradientNoise(variance=3.0, square=-1.0))
