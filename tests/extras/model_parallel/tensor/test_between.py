"""Tensor parallelism: losses and gradients of one worker, and the communication they need."""

from typing import Any

import pytest
import torch
from counting_collective import Counting
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.heads import Head
from ringspark.extras.experts.layer import MixtureOfExperts
from ringspark.extras.model_parallel.expert import shard_experts
from ringspark.extras.model_parallel.shard_network import shard_network
from ringspark.extras.model_parallel.tensor.loss import _CrossEntropy, scores_of
from ringspark.extras.model_parallel.tensor.plan import make_region, shard_layers
from ringspark.extras.model_parallel.tensor.sequence_parallel import SequenceBoundary
from ringspark.models import TransformerClassifier, TransformerLM
from ringspark.models.reports import collect_reports
from ringspark.models.transformer import TransformerBlock

pytestmark = pytest.mark.distributed
SIZES = {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 2, "num_heads": 4}
PAIRS = {"attention.qkv": ["column", 3], "attention.out": "row", "up": "column", "down": "row"}


def _network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "lm":
        return TransformerLM(**SIZES).double()
    return TransformerClassifier(**SIZES, out_features=3, padding_id=0).double()


def _batch(kind: str, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seq)
    ids = torch.randint(1, 23, (5, seq), generator=made)
    ids[0, seq // 2 :] = 0
    if kind != "lm":
        return ids, ids.sum(1) % 3
    label = ids.roll(-1, 1)
    label[:, -1] = -100
    return ids, label


def _gradients(network: nn.Module, kind: str, seq: int) -> tuple[float, dict[str, torch.Tensor]]:
    ids, label = _batch(kind, seq)
    criterion = Criterion([Head(label="y", loss="cross_entropy", ignored=-100)], None, scores_of(network))
    loss = criterion.rows([network(ids)], [label]).sum()
    network.zero_grad()
    loss.backward()
    layout = layout_of(network)
    if layout is not None and layout.complete_gradients is not None:
        layout.complete_gradients()
    return float(loss.detach()), {n: p.grad for n, p in network.named_parameters() if p.grad is not None}


def _all(collective: Collective) -> Any:
    mesh = RankMesh.of(collective, {"tensor": collective.size})
    worst: dict[str, float] = {}
    for kind in ("lm", "classifier"):
        for between in ("whole", "parts"):
            network = _network(kind)
            shard_network(network, mesh, Mesh(sequence_parallel=between == "parts"))
            layout = layout_of(network)
            for seq in (7, 1):
                want, whole = _gradients(_network(kind), kind, seq)
                got, own = _gradients(network, kind, seq)
                assert own.keys() == whole.keys()
                found = [abs(want - got)]
                found += [float((own[n] - layout.shard(n, g)).abs().max()) for n, g in whole.items()]
                worst[f"{kind} {between} {seq}"] = max(found)
    return worst


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_worker_whether_values_between_are_whole_or_parts(size: int) -> None:
    """Rows of 7 tokens do not divide by the rank count; rows of 1 token leave ranks without tokens."""
    for differences in run_ranks(size, "torch", _all):
        assert max(differences.values()) < 1e-12, differences


def _counts(collective: Collective) -> Any:
    found = {}
    for between in ("whole", "parts"):
        counting: Any = Counting(collective)
        block = TransformerBlock(16, 4, 64, 0.0, 0.0, causal=True)
        region = make_region(counting, between == "parts")
        shard_layers(block, region, PAIRS)
        tokens = 8
        if between == "parts":
            assert isinstance(region.boundary, SequenceBoundary)
            region.boundary.length = tokens
            tokens //= collective.size
        x = torch.randn(3, tokens, 16, requires_grad=True)
        out = counting.noted(lambda: block(x))  # noqa: B023
        found[f"{between} forward"] = counting.found
        counting.noted(lambda: out.sum().backward())  # noqa: B023
        found[f"{between} backward"] = counting.found
    counting = Counting(collective)
    mixture = MixtureOfExperts(16, num_experts=4, mlp_dim=32)
    shard_experts(mixture, counting)
    x = torch.randn(3, 8, 16, requires_grad=True)
    with collect_reports():
        out = counting.noted(lambda: mixture(x))
    found["experts forward"] = counting.found[0]
    counting.noted(lambda: out.sum().backward())
    found["experts backward"] = counting.found[0]
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_block_is_two_sums_a_pass_or_two_gathers_and_two_scattered_sums(size: int) -> None:
    """One for attention and one for the MLP: Megatron-LM's f and g, or g and its conjugate."""
    whole = 3 * 8 * 16 * 4  # bytes of (batch, seq, dim)
    sent = 4 * (size - 1) * whole // size  # with sequence_parallel False and True
    sums = [{"all_reduce": 2}, sent]
    parts = [{"all_gather": 2, "start_reduce_scatter": 2}, sent]
    for counts in run_ranks(size, "torch", _counts):
        assert counts == {
            "whole forward": sums,
            "whole backward": sums,
            "parts forward": parts,
            "parts backward": parts,
            # Token counts first, then tokens to the experts and back.
            "experts forward": {"all_gather": 1, "all_to_all": 2},
            "experts backward": {"all_to_all": 2},
        }


def _cut_loss(collective: Collective) -> Any:
    counting: Any = Counting(collective)
    found = {}
    network = _cut(counting)
    criterion = Criterion([Head(label="y", loss="cross_entropy", ignored=-100)], None, scores_of(network))
    ids, label = _batch("lm", 7)
    logits = network(ids)
    found["shape"] = list(logits.shape)
    rows = counting.noted(lambda: criterion.rows([logits], [label]))
    found["forward"] = counting.found
    counting.noted(lambda: rows.sum().backward())
    found["backward"] = counting.found
    (whole,) = criterion.gather_classes([logits])
    reference = F.cross_entropy(whole, label, reduction="none").mean(1)
    found["loss"] = float((rows[:, 0] - reference).detach().abs().max())
    with criterion.gather_in_forward():
        found["same"] = torch.equal(network(ids), whole)
    label[0, 0] = 23
    try:
        criterion.rows([network(ids)], [label])
    except IndexError as error:
        found["error"] = str(error)
    # A loss that needs all classes gets gathered logits.
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    other = _cut(counting)
    Criterion([Head(label="y", loss=smooth)], None, scores_of(other))
    found["other"] = list(other(ids).shape)
    return found


def _cut(collective: Any, kind: Any = TransformerLM) -> nn.Module:
    network = kind(**SIZES)
    shard_layers(network, make_region(collective), {"tokens": "vocabulary"})
    return network


def test_the_loss_of_cut_logits_sends_three_numbers_a_position_and_its_metrics_see_all() -> None:
    for rank, found in enumerate(run_ranks(2, "torch", _cut_loss)):
        assert found["shape"] == [5, 12 if rank == 0 else 11, 7]
        # First the maximum, then the sum and the target logit together.
        assert found["forward"] == [{"all_reduce": 2}, 4 * 5 * 7 * 3]
        # Gradient of the last hidden states (batch, seq, dim), as with gathered logits.
        assert found["backward"] == [{"all_reduce": 1}, 4 * 5 * 7 * 16]
        assert found["loss"] < 1e-6
        assert found["same"]
        assert found["error"] == "Target 23 is out of bounds."
        assert found["other"] == [5, 23, 7]


class Focal(nn.CrossEntropyLoss):
    """User-defined loss that derives from a known loss."""

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(outputs, labels).square()


class Tempered(TransformerLM):
    """Language model that changes the logits before it returns them."""


@pytest.mark.parametrize(
    ("network", "losses", "joins"),
    [
        (TransformerLM, [nn.CrossEntropyLoss()], False),
        (TransformerLM, [Focal()], True),
        (TransformerLM, [nn.CrossEntropyLoss(label_smoothing=0.1)], True),
        (TransformerLM, [nn.CrossEntropyLoss()] * 2, True),
        (Tempered, [nn.CrossEntropyLoss()], True),
    ],
    ids=["plain", "derived", "smoothed", "two outputs", "a user's network"],
)
def test_logits_stay_sharded_for_plain_cross_entropy_alone(network: Any, losses: Any, joins: bool) -> None:
    module = _cut(LocalCollective(), network)
    Criterion([Head(label="y", loss=loss) for loss in losses], classes=scores_of(module))
    assert vars(module)["scores"].gathers is joins


def test_labels_that_are_ignored_and_large_logits_are_those_of_torch() -> None:
    logits = (torch.randn(5, 4) * 1e3).requires_grad_()
    label = torch.tensor([0, -100, 3, 2, -100])
    kept = label != -100
    weights = torch.arange(1.0, 6.0)
    expected = nn.functional.cross_entropy(logits, label, reduction="none")
    (gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    found = _CrossEntropy.apply(logits, label, kept, LocalCollective(), 4)
    (own,) = torch.autograd.grad((found * weights).sum(), logits)
    assert torch.allclose(found, expected)
    assert torch.allclose(own, gradient)
