"""Every element of every parameter belongs to one rank, at an offset that all ranks agree on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from registries import optimizer_names
from torch import nn

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel.sharded.parameter_shards import ShardedParameters, is_elementwise
from ringspark.estimators.parallel.sharded.shard_layout import even_layout, fill_buckets, whole_layout
from ringspark.estimators.training.optimizers.registry import ELEMENTWISE as ELEMENTWISE_NAMES
from ringspark.estimators.training.optimizers.registry import make_optimizer

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)
LAYOUTS = pytest.mark.parametrize("layout", [even_layout, whole_layout])


@LAYOUTS
@given(sizes=SIZES, num_ranks=st.integers(1, 5), limit=st.integers(1, 60))
def test_every_element_is_one_ranks(layout, sizes, num_ranks, limit):
    kinds = [index % 2 for index in range(len(sizes))]
    members = fill_buckets(sizes, kinds, [limit] * len(sizes))
    buckets = layout(members, sizes, num_ranks)
    owned = [[0] * size for size in sizes]
    for bucket in buckets:
        assert len({kinds[slot.index] for slot in bucket.slots}) == 1
        assert sum(bucket.counts) == bucket.num_elements
        for piece in bucket.slices():
            assert piece.offset + piece.stop - piece.start <= bucket.counts[piece.rank]
            for element in range(piece.start, piece.stop):
                owned[piece.index][element] += 1
    assert all(count == 1 for counts in owned for count in counts)


@given(sizes=SIZES, num_ranks=st.integers(1, 5))
def test_an_even_layout_gives_all_ranks_the_same_number(sizes, num_ranks):
    for bucket in even_layout(fill_buckets(sizes, [0] * len(sizes), [50] * len(sizes)), sizes, num_ranks):
        assert len(set(bucket.counts)) == 1
        assert bucket.num_elements - bucket.slots[-1].stop < num_ranks


@given(sizes=SIZES, num_ranks=st.integers(1, 5))
def test_a_whole_layout_cuts_nothing_and_is_balanced_but_for_the_largest(sizes, num_ranks):
    buckets = whole_layout(fill_buckets(sizes, [0] * len(sizes), [50] * len(sizes)), sizes, num_ranks)
    loads = [0] * num_ranks
    for bucket in buckets:
        for piece in bucket.slices():
            assert (piece.start, piece.stop) == (0, sizes[piece.index])
            loads[piece.rank] += piece.stop
    assert max(loads) - min(loads) <= max(sizes)


@pytest.mark.parametrize("name", optimizer_names())
def test_only_elementwise_optimizers_of_the_registry_are_cut(name):
    optimizer = make_optimizer(name, nn.Linear(300, 300).parameters(), 0.1, 0.0)
    assert is_elementwise(optimizer) is (name in ELEMENTWISE_NAMES)


def test_pieces_share_the_memory_of_parameters_of_any_layout():
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    before = {name: p.detach().clone() for name, p in conv.named_parameters()}
    optimizer = torch.optim.SGD(conv.parameters(), lr=1.0)
    shard = ShardedParameters(conv, optimizer, LocalCollective())
    gradients = {name: torch.randn(p.shape) for name, p in conv.named_parameters()}
    for name, p in conv.named_parameters():
        p.grad = gradients[name].clone()
    for bucket in range(len(shard.buckets)):
        buffer, present = shard.flat_gradients(bucket)
        assert present == [0, 1]
        shard.set_gradients(bucket, buffer, [1.0, 1.0])
    optimizer.step()
    for name, p in conv.named_parameters():
        assert p.equal(before[name] - gradients[name])
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_whole_parameters_are_dealt_largest_first():
    """In the given order, the last and largest parameter would go to a rank that is already full."""
    (bucket,) = whole_layout([[0, 1, 2, 3]], [1, 1, 1, 3], 2)
    assert bucket.counts == [3, 3]
