"""A GAN on eight Gaussians on a ring covers their modes.

Of 2,500 generated points, a point within three standard deviations of a center is good (Srivastava et al.
2017, "VEEGAN"). There, one good point covers a mode; here it takes 25, 1% of the points.
"""

from pathlib import Path
from typing import Any

import numpy as np
import own_training_steps as steps
import pytest
import torch
from safetensors.torch import load_file
from small_training import config_of

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.settings.config import UserObjects

RADIUS, DEVIATION, ROWS, POINTS = 2.0, 0.1, 40_000, 2500
ANGLES = 2 * np.pi / 8 * np.arange(8)
CENTERS = RADIUS * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_gan_covers_seven_of_eight_modes(seed: int, make_shards: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    real = CENTERS[rng.integers(0, 8, ROWS)] + DEVIATION * rng.normal(size=(ROWS, 2))
    noise = rng.normal(size=(ROWS, 2)).astype(np.float32)
    manifest = make_shards({"x": noise, "y": real.astype(np.float32)}, row_group_rows=5000)
    torch.manual_seed(seed)
    gan: Any = steps.RingGan()
    objects = UserObjects(module=gan, training_step=steps.ring_step, optimizer=steps.ring_optimizers)
    own = {"task": "any", "losses": ("auto",), "training_step": "own"}
    config = config_of(manifest, tmp_path / "run", batch_size=256, epochs=4, seed=seed, **own)
    result = train_here(config, objects)
    gan.load_state_dict(load_file(Path(result.checkpoint_uri) / "model.safetensors"))
    with torch.no_grad():
        generated = gan(torch.from_numpy(noise[:POINTS])).numpy()
    distances = np.linalg.norm(generated[:, None] - CENTERS[None], axis=2)
    is_good = distances.min(axis=1) < 3 * DEVIATION
    counts = np.bincount(distances.argmin(axis=1)[is_good], minlength=8)
    assert (counts >= POINTS // 100).sum() >= 7, counts
