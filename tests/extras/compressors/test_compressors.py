"""One contract for every compressor and collective; one gang per collective and size runs all of them."""

import hashlib
import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from ranks import TORCH_AND_SLOW_OTHERS, run_one, run_ranks

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import Collective, Member
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.network_collective import NetworkCollective
from ringspark.estimators.launch.gang_task import assign_ranks
from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.options.compression import Compression, PowerSGD, SufficientFactors
from ringspark.extras.compressors import COMPRESSORS, Compressor
from ringspark.extras.compressors.compressed_all_reduce import all_reduce_by_host, find_levels

SHAPES = [torch.Size((60, 50)), torch.Size((8, 4, 16)), torch.Size((33, 40))]
ELEMENTS = sum(shape.numel() for shape in SHAPES)
# A compressor makes the same calls over Horovod, which takes longer than all other gangs together.
GANGS = [
    pytest.param(
        (name, size), id=f"{name}{size}", marks=[pytest.mark.slow] * (size == 2 or name == "horovod")
    )
    for name, size in [("local", 1), ("horovod", 3), ("torch", 2), ("torch", 3)]
]
STEPS = 6
DRAWS, DIRECTIONS = 100, 50
# Ratios for which 100 samples show the mean.
DRAWN = {"randomk": {"ratio": 0.3}, "sparsify": {"ratio": 0.3}}

# Settings that send every element; codes of few bits still round.
WHOLE = {
    "topk": {"ratio": 1.0},
    "randomk": {"ratio": 1.0},
    "sparsify": {"ratio": 1.0},
    "powersgd": {"rank": 50},
    "sufficientfactors": {"rows": 60},
    "gradiveq": {"slice": 64, "components": 64, "samples": 1},
}
# Largest error of an element, relative to the largest element.
ROUNDING = {"fp16": 2**-11, "bf16": 2**-8}
SMALL = {
    "gradiveq": {"slice": 64, "components": 4, "samples": 2, "refresh": 3},
    "powersgd": {"rank": 2},
    "sufficientfactors": {"rows": 2},
    "cpsgd": {"trials": 8, "max_norm": 2000.0},
}
# Without error feedback their mean total is the sum of the inputs.
UNBIASED = ("randomk", "sparsify", "qsgd", "cpsgd")
# Adds noise that nobody can repeat or subtract, so it has no error feedback.
SECRET = {"cpsgd"}


def _made(name: str, **options: Any) -> Compressor:
    values = Compression.of({"name": name, **SMALL.get(name, {}), **options})
    return COMPRESSORS[name](SHAPES, 7, values)


def _randn(seed: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _gradient(rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Returns values of very different sizes, correlated over steps and ranks like gradients."""
    values = _randn(1) + _randn(100 * rank + step)
    return (values * torch.logspace(-4, 1, ELEMENTS, dtype=torch.float64)).to(dtype)


def _contract(collective: Collective) -> Any:
    results = [{name: _of_one(name, collective) | _drawn(name, collective) for name in COMPRESSORS}]
    if isinstance(collective, NetworkCollective):
        collective.share(None)
        results.append({name: _of_one(name, collective) for name in COMPRESSORS})
    return results


def _telescope(reduce: Any, collective: Collective) -> dict[str, Any]:
    """Takes steps with error feedback in fp64; `reduce` takes a vector and a step."""
    residual, sent_all = (torch.zeros(ELEMENTS, dtype=torch.float64) for _ in range(2))
    digest = hashlib.sha256()
    for step in range(STEPS):
        vector = _gradient(collective.rank, step) + residual
        before = vector.clone()
        total, error = reduce(vector, step)
        residual = torch.zeros_like(total) if error is None else error
        assert vector.equal(before)
        sent_all += total
        digest.update(total.numpy().tobytes())
    wanted = sum(_gradient(rank, step) for rank in range(collective.size) for step in range(STEPS))
    far = (sent_all + collective.all_reduce(residual) - wanted).abs().max() / wanted.abs().max()
    return {"telescopes": float(far), "digest": digest.hexdigest(), "keeps": bool(residual.any())}


def _copy_of(compressor: Compressor, name: str, feedback: bool) -> Compressor:
    copied = _made(name, feedback=feedback)
    copied.load({key: tensor.clone() for key, tensor in compressor.state().items()})
    return copied


def _of_one(name: str, collective: Collective) -> dict[str, Any]:
    rank, size = collective.rank, collective.size
    ranks, feedback = range(size), name not in SECRET
    compressor = _made(name, feedback=feedback)
    found = _telescope(lambda vector, step: compressor.sum(vector, collective, step), collective)
    # A copied state gives a bit-identical result.
    both = compressor, _copy_of(compressor, name, feedback)
    sums = [c.sum(_gradient(rank, STEPS), collective, STEPS).total for c in both]
    # Bytes and dtype after the first steps.
    single = _made(name)
    for step in range(3):
        collective.traffic.bytes_sent = 0
        total, error = single.sum(_gradient(rank, step, torch.float32), collective, step)
    assert total.dtype == torch.float32
    assert error is None or error.dtype == torch.float32
    result = found | {
        "resumes": sums[0].equal(sums[1]),
        "bytes": collective.bytes_sent,
        "picked": 0 if error is None else int((error != _gradient(rank, 2, torch.float32)).sum()),
    }
    if name in WHOLE:
        whole = _made(name, feedback=False, **WHOLE[name])
        found = [whole.sum(_gradient(rank, step), collective, step).total for step in range(2)][1]
        exact = sum(_gradient(r, 1) for r in ranks)
        result["identity"] = float((found - exact).abs().max() / exact.abs().max())
    if name in ROUNDING:
        found = _made(name).sum(_gradient(rank, 0), collective, 0).total
        exact = sum(_gradient(r, 0) for r in ranks)
        largest = max(float(_gradient(r, 0).abs().max()) for r in ranks)
        result["rounding"] = float((found - exact).abs().max()) / (2 * size * largest)
    return result


def _drawn(name: str, collective: Collective) -> dict[str, Any]:
    """Returns the distance of the sample mean from the exact sum, in standard errors."""
    if name not in UNBIASED:
        return {}
    drawing = _made(name, feedback=False, **DRAWN.get(name, {}))
    gradients = [_randn(r) for r in range(collective.size)]
    # Projects on random directions, because a rarely sent element shows little alone.
    along = torch.randn(ELEMENTS, DIRECTIONS, generator=torch.Generator().manual_seed(9)).double()
    mine = gradients[collective.rank]
    found = torch.stack([drawing.sum(mine, collective, step).total @ along for step in range(DRAWS)])
    errors = found.mean(0) - sum(gradients) @ along
    return {"scores": (errors / (found.std(0) / math.sqrt(DRAWS))).tolist()}


@cache
def _results(name: str, size: int) -> list[list[dict[str, Any]]]:
    """Returns the results by transport (shared memory, library), then by rank."""
    ranks = [run_one(_contract)] if size == 1 else run_ranks(size, name, _contract)
    return [list(road) for road in zip(*ranks, strict=True)]


def _each(gang: tuple[str, int], compressor: str) -> list[list[dict[str, Any]]]:
    return [[rank[compressor] for rank in road] for road in _results(*gang)]


pytestmark = pytest.mark.distributed


def _over_all(test: Any) -> Any:
    return pytest.mark.parametrize("gang", GANGS)(pytest.mark.parametrize("compressor", COMPRESSORS)(test))


@_over_all
def test_what_was_sent_and_what_is_left_is_the_sum_of_all_gradients(gang: Any, compressor: str) -> None:
    for road in _each(gang, compressor):
        is_exact = max(rank["telescopes"] for rank in road) < 1e-13
        assert is_exact == (compressor not in SECRET)


@_over_all
def test_all_ranks_get_the_same_bits_and_a_copied_state_gives_them_again(gang: Any, compressor: str) -> None:
    for road in _each(gang, compressor):
        assert len({rank["digest"] for rank in road}) == 1
        assert all(rank["resumes"] == (compressor not in SECRET) for rank in road)


@pytest.mark.parametrize("gang", GANGS)
def test_everything_is_sent_at_full_rank_and_at_a_share_of_one(gang: tuple[str, int]) -> None:
    for compressor in WHOLE:
        for road in _each(gang, compressor):
            assert max(rank["identity"] for rank in road) < 1e-12, compressor


@pytest.mark.parametrize("gang", GANGS)
def test_sixteen_bits_round_no_more_than_their_fraction_allows(gang: tuple[str, int]) -> None:
    for compressor, most in ROUNDING.items():
        for road in _each(gang, compressor):
            assert 0 < max(rank["rounding"] for rank in road) <= most, compressor


@pytest.mark.parametrize("gang", GANGS)
def test_random_compressors_are_right_on_average(gang: tuple[str, int]) -> None:
    for compressor in UNBIASED:
        for rank in _each(gang, compressor)[0]:
            # The mean square is near 1 for an unbiased compressor, and about DRAWS otherwise.
            assert sum(score**2 for score in rank["scores"]) / DIRECTIONS < 2, compressor


def _closed_form(name: str, size: int, picked: list[int], rank: int) -> int:
    """Returns the bytes that a rank sends in one step of fp32 gradients."""
    part = -(-ELEMENTS // size)

    def two_rounds(code: int) -> int:
        return 2 * (size - 1) * code

    def ring(numbers: int) -> int:
        return 2 * (size - 1) * 4 * numbers // size

    def to_all(pieces: list[int]) -> int:
        return sum(pieces) - pieces[(rank + 1) % size]

    return {
        "none": ring(ELEMENTS),
        "fp16": two_rounds(4 + 2 * part),
        "bf16": two_rounds(2 * part),
        "sign": two_rounds((4 + 2048 // 8) * -(-part // 2048)),
        "qsgd": two_rounds((4 + 512 // 2) * -(-part // 512)),
        "topk": to_all([4 + 6 * math.ceil(0.01 * ELEMENTS)] * size),
        "sparsify": to_all([8] * size) + to_all([4 + 6 * p for p in picked]),
        "randomk": ring(math.ceil(0.01 * ELEMENTS)),
        "powersgd": ring(sum(2 * shape[0] for shape in SHAPES))
        + ring(sum(2 * s[1:].numel() for s in SHAPES)),
        "sufficientfactors": to_all([sum(8 * (s[0] + s[1:].numel()) for s in SHAPES)] * size),
        "gradiveq": ring(sum(4 * -(-shape.numel() // 64) for shape in SHAPES)),
        # Integers up to 15 + 8 take 5 bits.
        "cpsgd": (size - 1) * (-(-part * 5 // 8) - (-part * (size * 23).bit_length() // 8)),
    }[name]


def _evened(pieces: list[int], rank: int) -> int:
    even, start = -(-sum(pieces) // len(pieces)), sum(pieces[:rank])
    kept = min(start + pieces[rank], (rank + 1) * even) - max(start, rank * even)
    return pieces[rank] - max(0, kept) + (len(pieces) - 1) * even


@_over_all
def test_bytes_are_those_of_the_closed_form(gang: tuple[str, int], compressor: str) -> None:
    for road in _each(gang, compressor):
        picked = [rank["picked"] for rank in road]
        for number, rank in enumerate(road):
            expected = _closed_form(compressor, gang[1], picked, number)
            if compressor == "sparsify" and rank["bytes"] != expected:
                # Over a network, Gloo's ranks first make their pieces equally long.
                expected = 8 * (gang[1] - 1) + _evened([4 + 6 * p for p in picked], number)
                assert gang[0] == "torch"
            assert rank["bytes"] == expected


def test_powersgd_leaves_a_matrix_that_it_would_not_shrink() -> None:
    kind, options = COMPRESSORS["powersgd"], PowerSGD(rank=2)
    assert kind.helps(torch.Size((64, 64)), options)
    assert not kind.helps(torch.Size((4, 4)), options)
    assert not kind.helps(torch.Size((64, 64)), replace(options, rank=32))


def test_sufficient_factors_of_the_gradient_of_few_rows_are_the_gradient() -> None:
    kind, options = COMPRESSORS["sufficientfactors"], SufficientFactors(rows=16)
    shape = torch.Size((80, 300))
    rows = [torch.randn(16, width, generator=torch.Generator().manual_seed(width)) for width in shape]
    gradient = (rows[0].T @ rows[1]).view(-1)
    total, error = kind([shape], 7, options).sum(gradient, LocalCollective(), 0)
    assert error is not None
    assert error.abs().max() < 1e-5 * gradient.abs().max()
    assert torch.allclose(total, gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))
    assert kind.helps(shape, options)
    assert not kind.helps(shape, SufficientFactors(rows=64))  # 64 (80 + 300) numbers are more than 80 x 300


def _finds_rank_one(compressor: Compressor, gradient: torch.Tensor) -> None:
    """A matrix of rank 1 is exact at rank 2."""
    for step in range(3, 5):
        total, _ = compressor.sum(gradient, LocalCollective(), step)
    torch.testing.assert_close(total, gradient, atol=1e-5, rtol=1e-5)


def _of_rank_one() -> torch.Tensor:
    gradient = torch.zeros(ELEMENTS)
    gradient[: 60 * 50] = torch.outer(torch.randn(60), torch.randn(50)).view(-1)
    return gradient


def test_powersgd_of_zeros_is_zero_and_the_next_gradient_is_found_again() -> None:
    compressor = _made("powersgd", rank=2)
    for step in range(3):
        total, error = compressor.sum(torch.zeros(ELEMENTS), LocalCollective(), step)
        assert not total.any()
        assert not error.any()
    _finds_rank_one(compressor, _of_rank_one())


def test_powersgd_finds_a_gradient_again_after_one_whose_products_overflowed() -> None:
    compressor, gradient = _made("powersgd", rank=2, feedback=False), _of_rank_one()
    for step, factor in enumerate((1.0, 1e30, 1e30)):
        total, _ = compressor.sum(gradient * factor, LocalCollective(), step)
    assert not total.isfinite().all()
    _finds_rank_one(compressor, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp16_takes_very_large_and_very_small_numbers_of_fp32(dtype: torch.dtype) -> None:
    for size in (3e38, 1e-30):
        vector = torch.tensor([1.0, -0.5, 0.25], dtype=dtype) * size
        total, _ = _made("fp16").sum(vector, LocalCollective(), 0)
        torch.testing.assert_close(total, vector, rtol=2**-11, atol=0)


def test_signs_without_feedback_go_the_wrong_way_and_with_it_the_right_one() -> None:
    """The gradient is 4 in one of four steps and -1 otherwise; a large second gradient sets the scale."""
    shape, local = [torch.Size((1, 2))], LocalCollective()
    sums = {}
    for feedback in (False, True):
        values = Compression.of({"name": "sign", "feedback": feedback})
        compressor = COMPRESSORS["sign"](shape, 0, values)
        residual, moved = torch.zeros(2), 0.0
        for step in range(400):
            gradient = torch.tensor([4.0 if step % 4 == 0 else -1.0, 3.0 * (-1) ** step])
            total, error = compressor.sum(gradient + residual, local, step)
            moved += float(total[0])
            residual = error if feedback else residual
        sums[feedback] = moved
    assert sums[False] < -100
    assert sums[True] == pytest.approx(100, abs=10)


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name not in SECRET])
def test_residuals_stay_of_the_size_of_some_gradients(name: str) -> None:
    """A compressor that sends too much leaves a larger residual, which doubles in every step."""
    compressor, residual = _made(name, feedback=True), torch.zeros(ELEMENTS)
    for step in range(200):
        gradient = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(step))
        residual = compressor.sum(gradient + residual, LocalCollective(), step).error
    assert float(residual.square().mean().sqrt()) < 30


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_variance_of_levels_is_within_the_bound_of_the_paper(bits: int) -> None:
    values = Compression.of({"name": "qsgd", "bits": bits, "feedback": True})
    compressor = COMPRESSORS["qsgd"]([torch.Size((1, 512))], 3, values)
    vector = torch.randn(512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    levels = 2 ** (bits - 1) - 1
    drawn = [compressor.sum(vector, LocalCollective(), step).error for step in range(200)]
    # A gang of one encodes the result again, which does not change the levels: one rounding error.
    variance = float(torch.stack(drawn).square().sum(1).mean() / vector.square().sum())
    assert 0 < variance <= min(512 / levels**2, math.sqrt(512) / levels)


def test_the_chances_add_up_to_the_share_and_grow_with_the_size() -> None:
    chances_for = load_object("ringspark.extras.compressors.sparsify:chances_for")
    vector = torch.cat([torch.tensor([1e6, -1e6]), torch.linspace(0, 1, 998), torch.zeros(0)])
    chances = chances_for(vector, 0.1)
    assert float(chances.sum()) == pytest.approx(100, rel=1e-4)
    assert chances[:2].tolist() == [1.0, 1.0]
    assert bool((chances[2:].diff() >= 0).all())
    assert not chances_for(torch.zeros(5), 0.5).any()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("topkk", "Compression must be one of none, fp16, .*, got 'topkk'.*'topk'"),
        ({"name": "topk", "ration": 0.1}, "TopK has no option 'ration'.*'ratio'"),
        ({"name": "topk", "ratio": 0}, "TopK's ratio must be above 0 and at most 1, got 0"),
        ({"name": "topk", "ratio": True}, "ratio must be a number"),
        ({"name": "powersgd", "rank": 2.5}, "rank must be a whole number, got 2.5"),
        ({"name": "qsgd", "bits": 3}, "bits must be 2, 4 or 8, got 3"),
        ({"name": "topk", 3: 0.1}, "TopK has no option 3; it takes"),
        ({"rank": 2}, "needs a 'name' in its dict, got .*; add one of none, fp16"),
        ({"name": "none", "rank": 2}, "Uncompressed has no option 'rank'; it takes after"),
        ({"name": "topk", "between": "racks"}, "between must be 'workers' or 'hosts', got 'racks'"),
    ],
)
def test_an_unknown_name_or_option_is_refused_with_what_there_is(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Compression.of(value)


def test_options_may_be_numbers_of_numpy_and_are_plain_ones_after_it() -> None:
    """`np.linspace` makes NumPy numbers, and a config is JSON."""
    for given in ({"ratio": np.float64(0.5)}, {"ratio": np.int64(1)}, {"after": np.int32(3)}):
        (name, value), found = next(iter(given.items())), Compression.of({"name": "topk", **given})
        assert getattr(found, name) == value
        assert json.loads(json.dumps(found.to_values())) == found.to_values()
    with pytest.raises(ValueError, match="ratio must be a number"):
        Compression.of({"name": "topk", "ratio": np.bool_(True)})


HERE, THERE = "127.0.0.1", "127.0.0.2"
# This host acts as two. A reduction is exact within a host, and compressed between hosts.
HOSTS = [
    pytest.param(("torch", (HERE, THERE, THERE)), id="torch1+2"),
    pytest.param(("horovod", (HERE, HERE, THERE)), id="horovod2+1", marks=pytest.mark.slow),
    pytest.param(("torch", (HERE, HERE, THERE, THERE)), id="torch2+2", marks=pytest.mark.slow),
    pytest.param(("horovod", (HERE, HERE, THERE, THERE)), id="horovod2+2", marks=pytest.mark.slow),
]
Gang = tuple[str, tuple[str, ...]]
# CpSGD hides the gradient of a worker, so it refuses sums of a host.
TWO_LEVELS = [name for name in COMPRESSORS if name != "cpsgd"]


def test_the_place_among_some_ranks_is_that_of_a_gang_of_them_alone() -> None:
    hosts = ["a", "b", "b", "c", "c", "c"]
    members = assign_ranks(hosts)
    assert [member.leaders for member in members] == [(0, 1, 3)] * 6
    assert [members[0].host_of(rank) for rank in range(6)] == [0, 1, 1, 2, 2, 2]
    for ranks in ([0, 1, 3], [1, 2], [2, 3, 5], list(range(6))):
        alone = assign_ranks([hosts[rank] for rank in ranks])
        assert [members[rank].within(ranks) for rank in ranks] == alone


@pytest.mark.parametrize(
    ("hosts", "has_levels"), [("aa", False), ("ab", False), ("aab", True), ("abb", True), ("a", False)]
)
def test_several_ranks_of_a_host_and_others_make_two_levels(hosts: str, has_levels: bool) -> None:
    assert [member.has_levels for member in assign_ranks(list(hosts))] == [has_levels] * len(hosts)


def _levels_contract(collective: Collective) -> Any:
    levels, rank = find_levels(collective), collective.rank
    found: dict[str, Any] = {}
    for name in TWO_LEVELS:
        compressor = _made(name, feedback=True)

        def reduce(vector: torch.Tensor, step: int, compressor: Compressor = compressor) -> Any:
            return all_reduce_by_host(vector, compressor, levels, step)

        found[name] = _telescope(reduce, collective) | {"leads": collective.member.local_rank == 0}
        alone = _copy_of(compressor, name, True)
        if (between := levels.between) is not None:
            between.traffic.bytes_sent = 0
        reduce(_gradient(rank, STEPS), STEPS)
        if between is not None:
            two = between.bytes_sent
            between.traffic.bytes_sent = 0
            alone.sum(_gradient(rank, STEPS), between, STEPS)
            found[name] |= {"between": two, "of a rank a host": between.bytes_sent}
    return found


@cache
def _levels(gang: Gang) -> list[dict[str, Any]]:
    name, hosts = gang
    return run_ranks(len(hosts), name, _levels_contract, hosts=hosts)


@pytest.mark.parametrize("gang", HOSTS)
@pytest.mark.parametrize("compressor", TWO_LEVELS)
def test_hosts_send_and_their_first_ranks_keep_the_sum_of_all_gradients(gang: Gang, compressor: str) -> None:
    ranks = [rank[compressor] for rank in _levels(gang)]
    assert max(rank["telescopes"] for rank in ranks) < 1e-13
    assert len({rank["digest"] for rank in ranks}) == 1
    assert not any(rank["keeps"] for rank in ranks if not rank["leads"])


@pytest.mark.parametrize("gang", HOSTS)
def test_a_host_sends_what_a_single_rank_of_it_would(gang: Gang) -> None:
    for rank in _levels(gang):
        for name, found in rank.items():
            if found["leads"] and name != "sparsify":  # sends a random number of elements
                assert found["between"] == found["of a rank a host"] > 0, name


def _part_fails(collective: Collective) -> str:
    levels = find_levels(collective)
    if collective.rank == collective.size - 1:
        raise ValueError("the last rank fails")
    levels.inside.barrier()
    if levels.between is not None:
        levels.between.barrier()
    levels.inside.barrier()
    collective.barrier()
    return ""


@pytest.mark.parametrize("name", TORCH_AND_SLOW_OTHERS)
def test_a_rank_that_fails_ends_the_waits_of_its_host_and_of_the_others(name: str) -> None:
    with pytest.raises(WorkerError, match="the last rank fails"):
        run_ranks(3, name, _part_fails, hosts=(HERE, THERE, THERE), timeout_seconds=20)


def test_one_rank_and_ranks_of_one_host_have_levels_too() -> None:
    alone = LocalCollective()
    assert find_levels(alone).inside is alone
    several = LocalCollective()
    several.member = Member(size=2, leaders=(0, 1))
    assert find_levels(several).between is several
