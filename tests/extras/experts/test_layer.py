"""`MixtureOfExperts` equals a loop over tokens; its reports; no access to future tokens."""

from typing import Any

import pytest
import torch

from ringspark.extras.experts.layer import MixtureOfExperts
from ringspark.extras.experts.routing import ROUTERS, CapacityRule
from ringspark.models import ModelSpec, apply_activation_checkpoint
from ringspark.models.reports import add_loss, collect_reports

DIM, EXPERTS = 6, 4
SIZES = {"vocab_size": 11, "max_seq_len": 12, "dim": 8, "depth": 2, "num_heads": 2}


def layer(router: str, **options: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    made = MixtureOfExperts(DIM, 5, EXPERTS, router, **{"min_capacity": 1, **options}).double()
    # Makes expert probabilities very uneven, with many dropped tokens.
    torch.nn.init.normal_(made.router.weight)
    return made


def by_tokens(router: str, mixture: Any, x: torch.Tensor, real: torch.Tensor, capacity: int) -> torch.Tensor:
    """Computes the layer for one row, token by token: (seq, dim), with the capacity of the row."""
    shares = (x @ mixture.router.weight.T).softmax(-1)
    known = shares.tolist()
    tokens = [t for t in range(len(x)) if real[t]]
    wanted: list[tuple[int, int, torch.Tensor]] = []
    if router == "expert_choice":
        for expert in range(EXPERTS):
            best = sorted(tokens, key=lambda t: -known[t][expert])
            wanted += [(t, expert, shares[t, expert]) for t in best[:capacity]]
    else:
        k = 2 if router == "gshard" else 1
        ranked = {t: sorted(range(EXPERTS), key=lambda e: -known[t][e])[:k] for t in tokens}
        for choice in range(k):
            for t in tokens:
                weight = shares[t, ranked[t][choice]]
                if k > 1:
                    weight = weight / sum(shares[t, e] for e in ranked[t])
                wanted.append((t, ranked[t][choice], weight))
    out = [torch.zeros(DIM, dtype=x.dtype) for _ in range(len(x))]
    places = [0] * EXPERTS
    for t, expert, weight in wanted:
        places[expert] += 1
        if places[expert] <= capacity:
            up, up_bias, down, down_bias = mixture.experts.each()[expert]
            hidden = torch.nn.functional.gelu(up @ x[t] + up_bias)
            out[t] = out[t] + weight * (down @ hidden + down_bias)
    return torch.stack(out)


@pytest.mark.parametrize("router", ROUTERS)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(router: str) -> None:
    mixture = layer(router, capacity_factor=1.0)
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, 5:] = False
    # ceil(9 / 4) and ceil(5 / 4); with two experts per token, ceil(18 / 4) and ceil(10 / 4).
    capacities = [5, 3] if router == "gshard" else [3, 2]
    x.requires_grad_()
    inputs = [x, *mixture.parameters()]
    found = mixture(x, real)
    rows = zip(x, real, capacities, strict=True)
    wanted = torch.stack([by_tokens(router, mixture, row, own, capacity) for row, own, capacity in rows])
    torch.testing.assert_close(found, wanted)
    factors = torch.randn_like(found)
    gradients = torch.autograd.grad((found * factors).sum(), inputs)
    expected = torch.autograd.grad((wanted * factors).sum(), inputs)
    torch.testing.assert_close(gradients, expected)


def test_in_sixteen_bits_the_router_sees_what_it_sees_in_fp32() -> None:
    torch.manual_seed(0)
    mixture = MixtureOfExperts(64, 5, EXPERTS)
    x = torch.randn(2, 50, 64)
    with collect_reports() as plain:
        mixture(x)
    with collect_reports() as mixed, torch.autocast("cpu", torch.bfloat16):
        out = mixture(x)
    assert out.dtype == x.dtype
    assert torch.equal(plain.losses[0], mixed.losses[0])
    assert torch.equal(plain.counts[mixture], mixed.counts[mixture])


@pytest.mark.parametrize("policy", ["none", "all", "sqrt"])
def test_layers_report_once_however_often_they_run(policy: str) -> None:
    torch.manual_seed(0)
    spec = ModelSpec("transformer_lm", SIZES | {"depth": 4, "experts": {"num_experts": 3, "jitter": 0.1}})
    net = apply_activation_checkpoint(spec.build(), policy)
    ids = torch.randint(0, 11, (5, 7))
    torch.manual_seed(1)
    with collect_reports() as reports:
        out = net(ids)
    assert [values.shape for values in reports.losses] == [(5,), (5,)]
    before = [counts.clone() for counts in reports.counts.values()]
    (out.square().mean() + torch.stack(reports.losses).sum()).backward()
    assert len(reports.losses) == 2
    assert all(torch.equal(*pair) for pair in zip(before, reports.counts.values(), strict=True))
    # A recomputed network has the gradients of a plain one, including the noise.
    again = spec.build()
    again.load_state_dict(net.state_dict())
    torch.manual_seed(1)
    with collect_reports() as reports:
        out = again(ids)
    (out.square().mean() + torch.stack(reports.losses).sum()).backward()
    for one, other in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_nothing_is_kept_outside_of_a_collected_pass() -> None:
    add_loss(torch.ones(3))
    with collect_reports() as outer, collect_reports() as inner:
        add_loss(torch.ones(3))
    assert (len(outer.losses), len(inner.losses)) == (0, 1)


def test_numbers_of_the_history_add_up_over_mixtures_and_rows() -> None:
    mixture = layer("switch")
    loads = torch.tensor([[3.0, 1, 0, 0], [2, 2, 2, 2]])
    # requested, dropped, balance, z, rows
    ends = torch.tensor([[4.0, 1, 2.5, 8, 2], [8, 0, 2.5, 0, 2]])
    numbers = mixture.numbers(list(torch.cat([loads, ends], 1)))
    losses = {"balance_loss": 1.25, "z_loss": 2.0}
    assert numbers == {"dropped_share": 1 / 12, "expert_balance": 3.0, **losses}


@pytest.mark.parametrize("router", ["switch", "gshard"])
def test_a_causal_network_knows_no_later_token_also_where_tokens_are_dropped(router: str) -> None:
    torch.manual_seed(0)
    options = {"num_experts": 4, "router": router, "capacity_factor": 0.5, "min_capacity": 1, "every": 1}
    net = ModelSpec("transformer_lm", SIZES | {"experts": options}).build().eval()
    for block in net.blocks:
        torch.nn.init.normal_(block.mixture.router.weight)
    ids = torch.randint(0, 11, (20, 12))
    other = ids.clone()
    other[:, 7:] = torch.randint(0, 11, (20, 5))
    with collect_reports() as reports:
        first, second = net(ids), net(other)
    layers = list(reports.counts)
    assert layers[0].numbers(list(reports.counts.values()))["dropped_share"] > 0.2
    torch.testing.assert_close(first[..., :7], second[..., :7])
    assert not torch.allclose(first[..., 7:], second[..., 7:])


def classifier(router: str, **changes: Any) -> torch.nn.Module:
    """Returns a network in evaluation mode, of which one block is a mixture that drops tokens."""
    options = {"num_experts": 4, "router": router, "capacity_factor": 1.0, "min_capacity": 1}
    spec = ModelSpec("transformer_classifier", SIZES | {"out_features": 3, "experts": options} | changes)
    assert ModelSpec.from_json(spec.to_json()) == spec
    net = spec.build().eval()
    torch.nn.init.normal_(net.blocks[1].mixture.router.weight)
    return net


@pytest.mark.parametrize("router", ROUTERS)
def test_a_prediction_depends_neither_on_the_batch_nor_on_its_padding(router: str) -> None:
    net = classifier(router, padding_id=0)
    ids = torch.randint(1, 11, (6, 12))
    for number in range(6):
        ids[number, 2 * number + 1 :] = 0
    ids[5] = 0  # padding only
    with torch.no_grad():
        together = net(ids)
        alone = torch.cat([net(ids[n : n + 1, : max(1, min(12, 2 * n + 1))]) for n in range(6)])
    torch.testing.assert_close(together, alone)
    assert net(ids[:0]).shape == (0, 3)


@pytest.mark.parametrize(
    "router", [pytest.param(name, marks=[pytest.mark.slow] * bool(i)) for i, name in enumerate(ROUTERS)]
)
def test_an_exported_network_predicts_the_same_for_any_number_of_rows(router: str) -> None:
    net = classifier(router)
    ids = torch.randint(0, 11, (5, 12))
    shapes = ({0: torch.export.Dim("batch", min=1, max=2**31 - 1)},)  # as model.export
    program = torch.export.export(net, (ids[:2],), dynamic_shapes=shapes, strict=False).module()
    with torch.no_grad():
        torch.testing.assert_close(program(ids), net(ids))


@pytest.mark.parametrize("name", ["transformer_classifier", "transformer_lm"])
def test_a_network_without_experts_keeps_its_names_and_first_weights(name: str) -> None:
    outputs = {"out_features": 2} if name == "transformer_classifier" else {}
    torch.manual_seed(0)
    dense = ModelSpec(name, SIZES | outputs).build()
    torch.manual_seed(0)
    mixed = ModelSpec(name, SIZES | outputs | {"experts": {"num_experts": 2}}).build()
    assert "blocks.1.up.weight" in dense.state_dict()
    assert not any("mixture" in key for key in dense.state_dict())
    names = [[key for key in net.state_dict() if "blocks.0" in key] for net in (dense, mixed)]
    assert names[0] == names[1]
    assert mixed.state_dict()["blocks.1.mixture.experts.up_weight"].shape == (2, 32, 8)
    assert torch.equal(dense.blocks[0].up.weight, mixed.blocks[0].up.weight)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"router": "switsh"}, "router must be one of .*, got 'switsh'; did you mean 'switch'"),
    ({"router": "gshard", "num_experts": 1}, "num_experts must be at least 2 for router 'gshard', got 1"),
    ({"router": "expert_choice", "causal": True}, "lets later tokens .*; use 'switch' or 'gshard'"),
    ({"router": "expert_choice", "capacity_factor": None}, "'expert_choice' needs a capacity_factor"),
    ({"capacity_factor": 0.0}, "must be at least 0.000001, or None to drop no tokens, got 0.0"),
    ({"min_capacity": 0}, "min_capacity must be at least 1, got 0"),
    ({"balance_weight": -1.0}, "balance_weight must be at least 0, got -1.0"),
    ({"jitter": 1.0}, "jitter must be at least 0 and below 1, got 1.0"),
    ({"random_second": True}, "random_second needs router 'gshard'"),
    ({"mlp_dim": 0}, "mlp_dim must be at least 1, got 0"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureOfExperts(**{"dim": 4, "mlp_dim": 4, "num_experts": 4, **options})


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"num_expert": 2}, "experts has no option 'num_expert'; did you mean 'num_experts'"),
        ({"num_experts": 2, "every": 3}, r"every must be from 1 to depth \(2\), got 3"),
        ([2], "experts must be a dict"),
    ],
)
def test_a_language_model_refuses_experts_in_a_sentence(experts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"model 'transformer_lm' could not be built: .*{message}"):
        ModelSpec("transformer_lm", SIZES | {"experts": experts}).build()


@pytest.mark.slow  # torch's compiler takes seconds to import
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_network_runs_its_mixtures_uncompiled() -> None:
    torch.manual_seed(0)
    net = ModelSpec("transformer_lm", SIZES | {"experts": {"num_experts": 3}}).build()
    ids = torch.randint(0, 11, (5, 7))
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(net, backend=backend, dynamic=True)
    try:
        with collect_reports() as plain, collect_reports() as reports:
            found = compiled(ids)
        assert len(reports.losses) == 1
        assert not plain.losses
        torch.testing.assert_close(found, net(ids))
        text = "".join(str(graph.graph) for graph in graphs)
        assert "attention" in text
        assert "mixture" not in text
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("factor", "wanted"), [(0.0004, 20), (1 / 3, 16_667), (1.1, 55_000), (1e15, 50_000_000)]
)
def test_the_capacity_follows_every_factor(factor: float, wanted: int) -> None:
    rule = CapacityRule(capacity_factor=factor, min_capacity=1)
    assert rule.most(100_000, 6, 3) == wanted
    assert rule.capacity(torch.tensor([100_000]), 6, 3).tolist() == [wanted]
