"""Tests the integers, the noise, and the trainings of cpSGD."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from small_training import bare_config
from torch import nn

from ringspark.estimators import AllReduce, CpSGD, Mesh, Privacy
from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel import SyncSettings, synchronize_gradients
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.compressors.cpsgd import CpSgdCompressor
from ringspark.extras.compressors.packing import pack_integers, unpack_integers
from ringspark.extras.privacy.binomial import find_range

ELEMENTS = 301


def _made(**options: Any) -> CpSgdCompressor:
    given = {"levels": 16, "trials": 40, "max_norm": 2.0, **options}
    return CpSgdCompressor([torch.Size((ELEMENTS,))], 5, CpSGD(**given))


def _vector(norm: float, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn * (norm / drawn.norm())


@pytest.mark.parametrize("is_rotated", [False, True])
def test_many_draws_have_the_gradient_as_mean_and_the_variance_of_the_formula(is_rotated: bool) -> None:
    compressor, vector, draws = _made(rotate=is_rotated), _vector(1.9), 2000
    found = torch.stack([compressor.sum(vector, LocalCollective(), step).total for step in range(draws)])
    errors = (found.mean(0) - vector) / (found.std(0) / math.sqrt(draws))
    assert float(errors.abs().max()) < 5
    assert float(errors.square().mean()) == pytest.approx(1, abs=0.4)
    # The noise has the variance m/4 in levels, and the rounding adds at most 1/4.
    distance = 2 * 2.0 * find_range(ELEMENTS, rotate=is_rotated) / 15
    variance, noise = float(found.var(0).mean()), distance**2 * 40 / 4
    statistical = 5 * math.sqrt(2 / (draws * ELEMENTS))
    assert noise * (1 - statistical) < variance < (noise + distance**2 / 4) * (1 + statistical)


@pytest.mark.parametrize(
    ("norm", "scale", "expected"),
    [(50.0, 1.0, 2.0), (1.9 * 1024, 1024.0, 1.9 * 1024)],
    ids=["long", "scaled"],
)
def test_a_longer_gradient_is_scaled_to_the_largest_norm(norm: float, scale: float, expected: float) -> None:
    compressor, vector, draws = _made(), _vector(norm), 500
    compressor.loss_scale = scale
    found = torch.stack([compressor.sum(vector, LocalCollective(), step).total for step in range(draws)])
    errors = (found.mean(0) - vector * (expected / norm)) / (found.std(0) / math.sqrt(draws))
    assert float(errors.abs().max()) < 5


def _sum_integers(collective: Collective) -> dict[str, Any]:
    compressor, signs = _made(), torch.ones(ELEMENTS, dtype=torch.float64)
    codes = compressor.encode(_vector(1.0, collective.rank), collective.size, signs)
    collective.traffic.bytes_sent = 0
    total = compressor.sum_codes(codes, collective, torch.device("cpu"))
    return {"codes": codes.tolist(), "total": total.tolist(), "bytes": collective.bytes_sent}


@pytest.mark.distributed
def test_the_sum_is_that_of_the_integers_of_all_ranks_and_takes_the_declared_bytes() -> None:
    ranks = run_ranks(3, "torch", _sum_integers)
    codes = np.array([rank["codes"] for rank in ranks])
    assert codes.min() >= 0
    assert codes.max() <= 15 + 40
    part = math.ceil(ELEMENTS / 3)
    for rank in ranks:
        assert rank["total"] == codes.sum(0).tolist()
        # log2(k + m) bits for each element of a rank, and log2(N (k - 1 + m) + 1) for each of the sum.
        bits = math.ceil(math.log2(16 + 40)), math.ceil(math.log2(3 * (15 + 40) + 1))
        assert rank["bytes"] == 2 * sum(math.ceil(part * each / 8) for each in bits)


@pytest.mark.parametrize("bits", [1, 5, 8, 11, 31])
def test_packed_integers_are_unpacked_again(bits: int) -> None:
    integers = np.random.default_rng(bits).integers(0, 2**bits, 77)
    integers[0] = 2**bits - 1
    packed = pack_integers(integers, bits)
    assert len(packed) == math.ceil(77 * bits / 8)
    assert unpack_integers(packed, bits, 77).tolist() == integers.tolist()


def test_the_noise_does_not_follow_from_the_seed() -> None:
    totals = [_made().sum(_vector(1.0), LocalCollective(), 3).total for _ in range(2)]
    assert not totals[0].equal(totals[1])


def _sync(module: nn.Module, collective: Collective) -> GradientSync:
    settings = SyncSettings(sync=AllReduce(compression=CpSGD(levels=64, trials=8, max_norm=4.0)), seed=1)
    make = lambda m: torch.optim.SGD(m.parameters(), 0.1)  # noqa: E731
    return synchronize_gradients(module, make, RankMesh.of(collective), settings)


def _trained(collective: Collective) -> dict[str, Any]:
    """Returns the losses, the final weights, and whether noise changed the gradient of each parameter."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    sync = _sync(module, collective)
    ids, losses = torch.arange(5), []
    for step in range(40):
        sync.optimizer.zero_grad()
        loss = (module(ids)[:, 0] - ids.float()).square().mean() / collective.size
        loss.backward()
        before = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        sync.reduce()
        if step == 0:
            pairs = zip(before, module.parameters(), strict=True)
            noisy = [not torch.equal(a * collective.size, p.grad) for a, p in pairs]
        sync.optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "noisy": noisy, "weights": [p.tolist() for p in module.parameters()]}


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_train_with_noise_on_all_gradients_and_stay_equal(size: int) -> None:
    """Also small tensors, biases and sparse embeddings get noise, on one rank too."""
    ranks = run_ranks(size, "torch", _trained) if size > 1 else [_trained(LocalCollective())]
    for rank in ranks:
        assert rank["losses"][-1] < 0.3 * rank["losses"][0]
        assert rank["noisy"] == [True] * 3
        assert rank["weights"] == ranks[0]["weights"]


def test_parameters_of_several_types_are_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"must be fp32, or all fp64, got torch\.float32, torch\.float64"):
        _sync(module, LocalCollective())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feedback": True}, "feedback=True.*leave feedback out"),
        ({"after": 3}, "after=3.*leave after out"),
        ({"between": "hosts"}, "between='hosts'.*leave between out"),
        ({"least": 1}, "least=1.*leave least out"),
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"levels": 1}, "levels must be at least 2, got 1"),
        ({"max_norm": 0.0}, "max_norm must be above 0 and finite, got 0.0"),
    ],
)
def test_options_that_break_the_promise_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CpSGD(**{"trials": 10, "max_norm": 1.0, **options})


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"parallelism": Mesh(tensor=2), "collective": "torch"}, "needs the whole network and whole rows"),
        ({"certify": True}, "adds secret noise"),
        ({"privacy": Privacy(epsilon=1, delta=1e-6, max_grad_norm=1.0)}, "privacy needs a plain all-reduce"),
    ],
)
def test_settings_that_break_the_promise_are_refused(setting: dict[str, Any], words: str) -> None:
    sync = AllReduce(compression=CpSGD(trials=10, max_norm=1.0))
    config = bare_config(num_workers=2, sync=sync)
    assert TrainConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match=words):
        replace(config, **setting)
