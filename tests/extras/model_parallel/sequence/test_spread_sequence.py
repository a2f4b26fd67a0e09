"""Sequence-sharded rows give the outputs, gradients and weights of one worker with whole rows."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from counting_collective import Counting
from ranks import run_ranks
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.extras.experts.layer import MixtureOfExperts
from ringspark.extras.model_parallel.sequence import CONTEXTS
from ringspark.extras.model_parallel.sequence.shard_sequence import ShardedRows, shard_sequence
from ringspark.extras.model_parallel.sequence.spans import Spans
from ringspark.models import MLP, TransformerClassifier, TransformerLM, apply_activation_checkpoint
from ringspark.models.reports import collect_reports
from ringspark.models.whole_rows import WholeRows, attend

pytestmark = pytest.mark.distributed
KINDS = ("classifier", "padded classifier", "language model")
VOCAB, MAX_SEQ = 11, 16


class _Mixer(nn.Module):
    """One attention head that declares only `attend`, without dropout or causality."""

    attend = staticmethod(attend)

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        query, key, value = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return self.attend(query, key, value, mask, 0.0, False).squeeze(1)


class _Own(nn.Module):
    """A user-defined network with several layers that need whole rows."""

    rows = WholeRows()

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mixer = nn.Embedding(VOCAB, 12), _Mixer()
        self.head = nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        seq = ids.shape[1]
        x = self.mixer(self.tokens(self.rows.own(ids, 1)), self.rows.mask(None, seq))
        return self.rows.alike(self.head(self.rows.pool(x, None, seq)))


def _network(kind: str, seed: int = 1, **more: Any) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "own":
        return _Own()
    sizes = {"vocab_size": VOCAB, "max_seq_len": MAX_SEQ, "dim": 12, "depth": 2, "num_heads": 3}
    if kind == "language model":
        return TransformerLM(**sizes | more)
    padding = {"padding_id": 0} if kind == "padded classifier" else {}
    return TransformerClassifier(**sizes | padding | more, out_features=3)


def _ids(rows: int, seq: int, seed: int = 2) -> torch.Tensor:
    """Returns rows of different lengths, padded with 0 at either end; the first row is all padding."""
    ids = torch.randint(1, VOCAB, (rows, seq), generator=torch.Generator().manual_seed(seed))
    for row in range(rows):
        ids[row, seq * row // rows :] = 0
    return torch.where(torch.arange(rows).view(-1, 1) % 2 == 1, ids.flip(1), ids)


def _loss(outputs: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    return (outputs * weights).square().mean() + (outputs * weights).mean()


def _backward(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = module(ids)
    _loss(outputs.double() if outputs.dtype == torch.float64 else outputs.float()).backward()  # type: ignore[no-untyped-call]
    return outputs.detach()


def _whole_gradients(module: nn.Module, collective: Collective) -> list[torch.Tensor]:
    grads = [p.grad for p in module.parameters()]
    assert all(grad is not None for grad in grads)
    return [collective.all_reduce(grad) for grad in grads if grad is not None]


def _far(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Returns the largest difference, relative to the largest value of its tensor."""
    pairs = zip(some, others, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


def _exact(collective: Collective) -> Any:
    far = {"float32": 0.0, "float64": 0.0}
    for dtype in (torch.float32, torch.float64):
        for way in CONTEXTS:
            for kind in (*KINDS, "own"):
                # Lengths: ranks have different token counts; equal counts; and some ranks have no token.
                for seq in (13, *((MAX_SEQ, 1) if dtype == torch.float64 else ())):
                    ids, one = _ids(5, seq), _network(kind).to(dtype)
                    sharded = copy.deepcopy(one)
                    shard_sequence(sharded, collective, way)
                    spread = copy.deepcopy(sharded)
                    outputs = _backward(one, ids), _backward(spread, ids)
                    assert torch.allclose(*outputs, rtol=0, atol=1e-6), (way, kind, seq)
                    found = _far(_whole_gradients(spread, collective), [p.grad for p in one.parameters()])
                    name = str(dtype).removeprefix("torch.")
                    far[name] = max(far[name], found)
                    # A batch may have no rows, as at the end of a validation.
                    assert spread.eval()(ids[:0]).shape[0] == 0
    return far


@pytest.mark.parametrize(
    ("size", "shares_memory"),
    [
        (2, True),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_outputs_and_gradients_are_those_of_whole_rows(
    size: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGSPARK_SHARED_MEMORY", str(int(shares_memory)))
    for far in run_ranks(size, "torch", _exact):
        assert far["float32"] < 1e-6, far
        assert far["float64"] < 1e-12, far


def _routed(collective: Collective) -> Any:
    """Returns this rank's expert counts of a network with random second experts."""
    experts = {"num_experts": 4, "router": "gshard", "random_second": True, "min_capacity": 1}
    module = _network("padded classifier", experts=experts)
    shard_sequence(module, collective)
    torch.manual_seed(collective.rank)
    with collect_reports() as reports:
        module(_ids(5, 13))
    return [counts.tolist() for counts in reports.counts.values()]


def test_ranks_of_a_row_route_it_alike_though_each_draws_for_its_tokens() -> None:
    first, second = run_ranks(2, "torch", _routed)
    assert first == second
    asked = first[0][-5]
    tokens = int((_ids(5, 13) != 0).sum())
    assert tokens < asked < 2 * tokens


def test_a_mixture_that_is_not_told_how_long_rows_are_refuses_to_route_parts() -> None:
    mixture = MixtureOfExperts(4, 8, 2)
    mixture.rows = ShardedRows(LocalCollective(), Spans(1))
    with pytest.raises(ValueError, match="needs the length of whole rows; pass the result"):
        mixture(torch.zeros(2, 3, 4))
    assert mixture(torch.zeros(2, 3, 4), mixture.rows.told(None, 3)).shape == (2, 3, 4)


@contextmanager
def _held(module: nn.Module) -> Iterator[list[int]]:
    """Yields a list; its last item is the bytes kept for the backward pass, without weights."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, Any] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    total: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield total
    total.append(sum(storage.nbytes() for storage in storages.values()))


def _costs(collective: Collective) -> Any:
    """Returns the cost of one more block: operations, bytes sent and bytes held, by method and network."""
    found: dict[str, Any] = {"plain": {}}
    for kind in ("classifier", "language model"):
        # A multiple of the shard count, so that all ranks do the same work.
        ids = _ids(4, MAX_SEQ)
        for way in (None, *CONTEXTS):
            costs = []
            for depth in (1, 2):
                module, counted = _network(kind, dim=16, num_heads=4, depth=depth), Counting(collective)
                if way is not None:
                    shard_sequence(module, counted, way)  # type: ignore[arg-type]
                before = collective.bytes_sent
                with _held(module) as held:
                    outputs = module(ids)
                forward = counted.calls.total()
                _loss(outputs).backward()  # type: ignore[no-untyped-call]
                sent = collective.bytes_sent - before
                costs.append((forward, counted.calls.total() - forward, sent, held[0]))
            found.setdefault(str(way), {})[kind] = [b - a for a, b in zip(*costs, strict=True)]
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_block_exchanges_what_its_way_says_and_holds_a_part_of_the_activations(size: int) -> None:
    values = 4 * MAX_SEQ * 16 * 4 // size  # bytes of one (batch, own tokens, dim)
    operations = {"gather": (1, 1), "ring": (size - 1, size), "ulysses": (2, 2)}
    sent = {
        # Keys and values pass n - 1 ranks; so do their gradients.
        "gather": 4 * values * (size - 1),
        # They travel again in the backward pass, and the gradients need one more send to get home.
        "ring": 2 * values * (3 * size - 2),
        # Queries, keys, values and the result, without the rank's own shard.
        "ulysses": 8 * values * (size - 1) // size,
    }
    for costs in run_ranks(size, "torch", _costs):
        for kind in ("classifier", "language model"):
            whole = costs["None"][kind][3]
            for way in CONTEXTS:
                *counts, bytes_sent, held = costs[way][kind]
                assert tuple(counts) == operations[way], (way, kind, costs)
                assert bytes_sent == sent[way], (way, kind, costs)
                # The rank holds the gathered keys and values in addition to its own shard. It holds the
                # output of the heads twice: as computed and as returned.
                more = {"gather": 2 * values * size, "ring": 0, "ulysses": values}[way]
                assert held - more <= whole / size * 1.01, (way, kind, costs)
    assert set(operations) == set(CONTEXTS)


def _variants(collective: Collective) -> Any:
    found = {}
    for way in CONTEXTS:
        for kind in ("padded classifier", "language model"):
            ids = _ids(5, 13)
            one = _network(kind, depth=4)
            plain, other = copy.deepcopy(one), copy.deepcopy(one)
            apply_activation_checkpoint(other, "sqrt")
            shard_sequence(plain, collective, way)
            shard_sequence(other, collective, way)
            outputs = [_backward(module, ids) for module in (plain, other)]
            pairs = zip(plain.parameters(), other.parameters(), strict=True)
            is_equal = all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
            found[f"{way} {kind} recomputed"] = is_equal and torch.equal(*outputs)
            exact = _whole_gradients(plain, collective)
            one.zero_grad()
            plain.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = [_backward(one, ids), _backward(plain, ids)]
            error = _far([p.grad for p in one.parameters()], exact)
            is_near = _far(_whole_gradients(plain, collective), exact) < 2 * error
            found[f"{way} {kind} bf16"] = outputs[0].dtype == outputs[1].dtype and is_near
    # Ranks draw different dropout masks and see the same outputs.
    for kind in KINDS:
        module = _network(kind, dropout=0.5, attention_dropout=0.5)
        shard_sequence(module, collective, "ulysses")
        torch.manual_seed(collective.rank)
        outputs = [module(_ids(5, 13)) for _ in range(2)]
        found[f"{kind} dropout"] = not torch.equal(*outputs) and all(
            torch.equal(outputs[0].flatten(), other)
            for other in collective.all_gather(outputs[0].detach().flatten())
        )
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_recomputed_16_bit_and_dropping_networks_are_spread_alike(size: int) -> None:
    for found in run_ranks(size, "torch", _variants):
        assert all(found.values()), found


@pytest.mark.parametrize(("way", "dropout"), [("ring", 0.0), ("ulysses", 0.1)])
def test_one_rank_changes_nothing(way: str, dropout: float) -> None:
    module = _network("classifier", attention_dropout=dropout)
    before = dict(vars(module))
    shard_sequence(module, LocalCollective(), way)
    assert vars(module) == before


KNOWN, DROPPING = _network("classifier"), _network("classifier", attention_dropout=0.1)


@pytest.mark.parametrize(
    ("network", "way", "message"),
    [
        (
            MLP(3, [4], 2),
            "ring",
            "model MLP does not support parallelism's 'sequence': the model needs an attr",
        ),
        # A layer around the sharded network would count once per rank.
        (nn.Sequential(KNOWN, nn.Linear(3, 3)), "ring", "model Sequential does not support parallelism's"),
        (DROPPING, "gather", "does not support dropout .*got attention_dropout=0.1; set it to 0, or"),
        (DROPPING, "ring", "does not support dropout .*got attention_dropout=0.1; set it to 0, or"),
    ],
)
def test_what_cannot_be_spread_is_refused(network: nn.Module, way: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_sequence(network, LocalCollective(), way)
