"""An audit: what an attacker finds out about canaries never exceeds the promised epsilon."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from canaries import attack, bound_epsilon

from ringspark.estimators import Privacy
from ringspark.extras.privacy import passes

PROMISE = Privacy(epsilon=2.0, delta=1e-5, max_grad_norm=1.0)


@pytest.mark.slow
def test_canaries_reveal_no_more_than_epsilon(tmp_path: Path) -> None:
    inside, outside = attack(tmp_path, PROMISE, 4)
    assert bound_epsilon(inside, outside, PROMISE.delta) <= 2.0
    # The attacker sees the canaries, about 0.4 deviations apart; the bound itself may be 0 by chance.
    assert inside.mean() - outside.mean() > 0.15 * outside.std()


@pytest.mark.slow
def test_the_audit_notices_missing_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silence(shape: Any, deviation: float, generator: np.random.Generator) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    monkeypatch.setattr(passes, "normal_noise", silence)
    assert bound_epsilon(*attack(tmp_path, PROMISE, 2), PROMISE.delta) > 4.0


def test_the_bound_of_a_perfect_attack_is_known() -> None:
    """0 errors in 500 guesses: both rates are known up to 1 - 0.0125 ** (1 / 500)."""
    rate = 1 - 0.0125 ** (1 / 500)
    found = bound_epsilon(np.ones(1000), np.zeros(1000), 0.0)
    assert found == pytest.approx(np.log((1 - rate) / rate))
