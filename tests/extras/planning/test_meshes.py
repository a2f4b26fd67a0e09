"""Predicted step time and memory of meshes: closed forms, trends, and error messages."""

import math
from dataclasses import replace
from typing import Any

import pytest
from simulation import simulate
from small_training import bare_config

from ringspark.estimators import plan_parallelism
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.extras.model_parallel.fake_collective import Message
from ringspark.extras.model_parallel.pipeline.actions import Action, PassType
from ringspark.extras.model_parallel.pipeline.orders import one_forward_one_backward
from ringspark.extras.planning import Link, MeshPlan, ParallelismPlan
from ringspark.extras.planning.exchange_time import ring_seconds
from ringspark.extras.planning.memory.columns import columns_of
from ringspark.extras.planning.memory.measured_ranks import MeasuredRanks
from ringspark.extras.planning.memory.plan import plan_memory
from ringspark.extras.planning.meshes.candidates import candidates, explain_refusal, micro_batches, with_mesh
from ringspark.extras.planning.meshes.machine import Machine
from ringspark.extras.planning.meshes.report import name_options
from ringspark.extras.planning.meshes.step_time import predict_step_time, simulate_makespan
from ringspark.extras.planning.work import ASSUMED, OperatorRates, Work
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta

# Four equal matrices and a tiny head; tensor parallelism shards the matrices in pairs.
ROWS, WIDTH, DEPTH = 16, 64, 4
SPEC = ModelSpec("mlp", {"in_features": WIDTH, "hidden": [WIDTH] * DEPTH, "out_features": 1})
BATCH = (((ROWS, WIDTH), "float32"), ((ROWS, 1), "float32"))
LINK = Link(alpha=1e-3, beta=1e-6)
# Only matrix products, so that the expected time is easy to compute.
FLOPS = OperatorRates(launch=0.0, flop=1e-6, byte=0.0)


def _machine(**changes: Any) -> Machine:
    machine = Machine(
        rates=FLOPS, inside={2: LINK}, between=None, wire=LINK, ranks_per_host=64, cores_per_host=64
    )
    return replace(machine, **changes)


@pytest.fixture(scope="module")
def training() -> MeasuredRanks:
    config = bare_config(model=SPEC, losses=("mse",), batch_size=ROWS, collective="torch")
    return MeasuredRanks(config, UserObjects(), *columns_of(BATCH))


def _time(training: MeasuredRanks, machine: Machine, micro: int = 1, **mesh: Any) -> Any:
    workers = math.prod(size for size in mesh.values() if isinstance(size, int))
    sizes = {axis: size for axis, size in mesh.items() if isinstance(size, int)}
    options = {key: value for key, value in mesh.items() if key not in sizes}
    config = with_mesh(training.config, workers, name_options(sizes, options), micro)
    rows = -(-ROWS // (config.num_copies * micro))
    mesh = MeshPlan(sizes=sizes, options=options)
    return predict_step_time(mesh, config, training.measure(config, rows), machine)


def test_a_step_is_what_its_axes_divide_and_what_they_exchange(training: MeasuredRanks) -> None:
    free = _machine(inside={2: Link(alpha=0, beta=0)}, wire=Link(alpha=0, beta=0))
    one = _time(training, free).step_seconds
    # The inputs need no gradient: 3 products per matrix, 2 for the first.
    layer = 2 * ROWS * WIDTH**2 * 1e-6
    assert one == pytest.approx((3 * DEPTH - 1) * layer + 3 * layer / WIDTH, rel=1e-6)
    assert _time(training, free, data=4).step_seconds == pytest.approx(one / 4)
    # The head is not sharded. It pairs with the layer before it only if the number of layers is odd.
    assert _time(training, free, tensor=2).step_seconds == pytest.approx(one / 2, rel=0.02)
    parameters = DEPTH * (WIDTH**2 + WIDTH) + WIDTH + 1
    both = _time(training, _machine(), data=4)
    assert both.exposed_seconds == pytest.approx(ring_seconds(4, 4 * parameters, LINK))
    assert both.step_seconds == pytest.approx(one / 4 + both.exposed_seconds)
    # Each of the two pairs has one all-reduce forward, and one backward except the first, whose inputs need
    # no gradient.
    hidden = ring_seconds(2, 4 * ROWS * WIDTH, LINK)
    assert _time(training, _machine(), tensor=2).exposed_seconds == pytest.approx(3 * hidden)


def test_a_pipeline_waits_as_its_schedule_says(training: MeasuredRanks) -> None:
    """Each stage takes three units, the first one two, as inputs need no gradient: 3 (m+p-1) - 1 in total."""
    free = _machine(wire=Link(alpha=0, beta=0))
    cuts = ["trunk.1", "trunk.2", "trunk.3"]
    for micro in (4, 8):
        found = _time(training, free, micro, pipeline=4, schedule="1f1b", cuts=cuts)
        assert found.bubble == pytest.approx(1 - 11 / 4 * micro / (3 * (micro + 3) - 1), abs=0.01)
    # Ranks that share one core fill each other's gaps, so the core is never idle.
    crowded = _time(training, replace(free, cores_per_host=1), 4, pipeline=4, schedule="1f1b", cuts=cuts)
    assert crowded.bubble == pytest.approx(0, abs=1e-9)
    assert crowded.step_seconds == pytest.approx(_time(training, free).step_seconds, rel=0.01)
    # The two halves of a split backward pass take as long as the whole backward pass.
    split = _time(training, replace(free, cores_per_host=1), 4, pipeline=4, schedule="zero_bubble", cuts=cuts)
    assert split.step_seconds == pytest.approx(crowded.step_seconds)
    sent = _time(training, _machine(), 4, pipeline=4, schedule="1f1b", cuts=cuts)
    assert sent.exposed_seconds > 4 * LINK.alpha


@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 4), (4, 8), (3, 1)])
def test_ranks_that_share_cores_fill_the_gaps_that_there_are(ranks: int, micro: int) -> None:
    orders = one_forward_one_backward(ranks, 1, micro)

    def cost(action: Action) -> float:
        return 1.0 if action.kind is PassType.FORWARD else 2.0

    free = simulate_makespan(orders, ranks, cost, ranks)
    assert free == max(timed.end for rank in simulate(orders, ranks, cost) for timed in rank)
    assert free == 3 * (micro + ranks - 1)
    work = 3.0 * ranks * micro
    assert simulate_makespan(orders, ranks, cost, 1) == pytest.approx(work)
    assert simulate_makespan(orders, ranks, cost, 0.5) == pytest.approx(2 * work)
    # At the ends of a step only some ranks have work, so the time is between both bounds (Graham 1969).
    two = simulate_makespan(orders, ranks, cost, 2)
    assert max(free, work / 2) <= two <= work / 2 + free / 2


def test_more_micro_batches_need_less_and_slower_links_take_longer(training: MeasuredRanks) -> None:
    slow = _machine(inside={2: Link(alpha=1e-2, beta=1e-5)}, wire=Link(alpha=1e-2, beta=1e-5))
    for mesh in ({"data": 4}, {"tensor": 4}, {"pipeline": 4}):
        slower, quicker = (_time(training, each, 4, **mesh).step_seconds for each in (slow, _machine()))
        assert slower > quicker
    plain = _time(training, _machine(), data=4).step_seconds
    assert _time(training, _machine(cores_per_host=2), data=4).step_seconds > plain
    # With two hosts the data all-reduce crosses the network, and tensor parallelism stays within a host.
    hosts = _machine(between=Link(alpha=1e-2, beta=1e-5), ranks_per_host=2)
    assert _time(training, hosts, data=4).step_seconds > plain
    assert _time(training, hosts, tensor=2).step_seconds == _time(training, _machine(), tensor=2).step_seconds


def test_messages_of_each_kind_are_parts_of_a_ring() -> None:
    machine = _machine()
    ring = ring_seconds(4, 8e6, LINK)
    for kind, share in (("all_reduce", 1.0), ("all_gather", 0.5), ("reduce_scatter", 0.5)):
        assert machine.exchange([Message(kind, int(8e6))] * 3, 4, 4) == pytest.approx(3 * share * ring)
    # Each of 4 ranks has 2 MB, of which 1.5 MB go to other ranks.
    expected = 3 * LINK.alpha + 1.5e6 * LINK.beta
    assert machine.exchange([Message("all_to_all", int(8e6))], 4, 4) == pytest.approx(expected)
    # Each rank sends to one other rank.
    expected = LINK.alpha + 2e6 * LINK.beta
    assert machine.exchange([Message("shift", int(2e6))], 4, 4) == pytest.approx(expected)


def test_rates_take_what_two_steps_took() -> None:
    few, many = (Work(launches=100, flops=flops, num_bytes=10**6) for flops in (10**6, 10**7))
    rates = ASSUMED.fit({4: (few, 0.02), 16: (many, 0.05)})
    assert rates.seconds(few) == pytest.approx(0.02)
    assert rates.seconds(many) == pytest.approx(0.05)
    # The larger step took no longer. Then the whole time counts as work, and operators have no overhead.
    noise = ASSUMED.fit({4: (few, 0.05), 16: (many, 0.05)})
    assert noise.launch == 0
    assert noise.seconds(many) == pytest.approx(0.05)


def test_every_product_of_sizes_is_a_candidate(training: MeasuredRanks) -> None:
    found = candidates(training.config, training.empty, 4, interleaves=False)
    shapes = {tuple(sorted(c.sizes.items())) for c in found}
    assert len(found) == len(shapes) == 6
    assert all(math.prod(c.sizes.values()) == 4 for c in found)
    both = candidates(training.config, training.empty, 4)
    # Four layers are enough for two stages per worker on two workers, but not on four.
    assert [c.sizes["pipeline"] for c in both if c.options.get("virtual")] == [2, 2]
    (whole, *_) = found
    assert dict(whole.sizes) == {"data": 4}
    assert micro_batches(whole, 16, None) == [1, 2, 4, 8]
    assert micro_batches(found[-1], 3, 4) == []


def test_each_axis_says_how_far_a_network_can_be_spread(training: MeasuredRanks) -> None:
    given = training.config, training.empty
    assert explain_refusal(*given, "data", ROWS) == ""
    assert "is too small for 17 workers" in explain_refusal(*given, "data", 17)
    assert "needs sharding='parameters'" in explain_refusal(*given, "shard", 2)
    assert explain_refusal(replace(training.config, sync=Zero(stage=3)), training.empty, "shard", 2) == ""
    assert explain_refusal(*given, "tensor", WIDTH) == ""
    assert "is too small for that many shards" in explain_refusal(*given, "tensor", WIDTH + 1)
    assert explain_refusal(*given, "pipeline", DEPTH + 1) == ""
    assert "has 5 blocks, too few for 6 stages" in explain_refusal(*given, "pipeline", DEPTH + 2)
    assert "does not support parallelism's 'sequence'" in explain_refusal(*given, "sequence", 2)
    assert "has no experts" in explain_refusal(*given, "expert", 2)
    heads = {"vocab_size": 8, "max_seq_len": 4, "dim": 6, "depth": 1, "num_heads": 3}
    lm = training.config, build_on_meta(ModelSpec("transformer_lm", heads).build)
    assert "must divide num_heads (3)" in explain_refusal(*lm, "tensor", 2)
    assert explain_refusal(*lm, "sequence", 2) == ""
    assert {"data": 2, "sequence": 2} in [dict(c.sizes) for c in candidates(*lm, 4) if not c.refusal]


def test_mixtures_are_spread_over_experts_and_other_networks_are_not(training: MeasuredRanks) -> None:
    """A mixture sends its tokens and gets them back, forward and backward. Before, it sends their number."""
    sizes = {"vocab_size": 8, "max_seq_len": 4, "dim": 8, "depth": 1, "num_heads": 2}
    spec = ModelSpec("transformer_lm", sizes | {"experts": {"num_experts": 4, "every": 1}})
    ids = ((ROWS, 4), "int64")
    config = replace(training.config, model=spec.to_json(), losses=("cross_entropy",))
    mixed = MeasuredRanks(config, UserObjects(), *columns_of((ids, ids)))
    shapes = [dict(c.sizes) for c in candidates(mixed.config, mixed.empty, 4) if not c.refusal]
    assert {"expert": 4} in shapes
    assert {"data": 2, "expert": 2} in shapes
    assert not any("expert" in c.sizes for c in candidates(training.config, training.empty, 4))
    assert "more than the 4 experts" in explain_refusal(mixed.config, mixed.empty, "expert", 5)
    sharded = replace(config, sync=Zero(stage=1))
    assert "not planned with sharding='optimizer'" in explain_refusal(sharded, mixed.empty, "expert", 2)
    tokens = 4 * ROWS * 4 * 8  # bytes of one rank's tokens
    (rank,) = mixed.measure(with_mesh(mixed.config, 2, {"expert": 2}, 1), ROWS).ranks
    forward, backward = (list(rank.first[0, way].messages["expert"]) for way in (True, False))
    counts = Message("all_gather", 2 * 4 * 8)
    assert forward == [counts, *[Message("all_to_all", 2 * tokens)] * 2]
    assert backward == [Message("all_to_all", 2 * tokens)] * 2
    # With sequence-sharded rows, each rank sends only its tokens.
    spread = with_mesh(mixed.config, 4, {"expert": 2, "sequence": 2}, 1)
    (rank,) = mixed.measure(spread, ROWS).ranks
    assert Message("all_to_all", tokens) in rank.first[0, True].messages["expert"]
    # Each rank has half of the rows. Experts' gradients are all-reduced only over ranks with the same
    # experts: one.
    link = replace(LINK, alpha=0.0)
    named = dict(mixed.empty.named_parameters())
    experts = 4 * sum(p.numel() for n, p in named.items() if ".experts." in n)
    rest = 4 * sum(p.numel() for p in named.values()) - experts
    found = _time(mixed, _machine(inside={2: link}), expert=2).exposed_seconds
    inside = 4 * tokens / 4 * link.beta + ring_seconds(2, counts.num_bytes, link) / 2
    assert found == pytest.approx(ring_seconds(2, rest, link) + inside, rel=0.01)


GIVEN: dict[str, Any] = {"link": LINK, "stepSeconds": {4: 0.01, 16: 0.02}}


@pytest.fixture(scope="module")
def free() -> ParallelismPlan:
    return plan_parallelism(SPEC, BATCH, 4, **GIVEN)


def test_a_plan_tells_memory_time_and_the_choice(free: ParallelismPlan) -> None:
    plan = free
    assert len(plan.meshes) == 6
    assert all(mesh.fits for mesh in plan.meshes)
    assert plan.meshes[0].step_seconds == min(mesh.step_seconds for mesh in plan.meshes)
    # As in `plan_memory`, with the rows of a replica and the copy for a checkpoint.
    inputs, labels = (((ROWS // 4, *shape[1:]), dtype) for shape, dtype in BATCH)
    alone = plan_memory(SPEC, (inputs, labels), numWorkers=4, collective="torch")
    assert plan.of(data=4).peak == pytest.approx(alone.peak + alone.checkpoint, rel=0.02)
    mesh = plan.of(tensor=2, data=2)
    half = tuple(((ROWS // 2, *shape[1:]), dtype) for shape, dtype in BATCH)
    settings = {"parallelism": mesh.parallelism, "gradientAccumulation": mesh.num_micro}
    again = plan_memory(SPEC, half, numWorkers=4, collective="torch", **settings)
    assert mesh.peak == again.peak + again.checkpoint
    told = str(plan)
    assert told.count("chosen") == 2
    assert plan.verdict in told
    assert "data 2 x tensor 2" in plan._repr_html_()
    with pytest.raises(KeyError, match="no mesh of 4 workers"):
        plan.of(data=3)


@pytest.mark.telling
def test_what_does_not_fit_is_refused_in_a_sentence_and_another_mesh_is_chosen(free: ParallelismPlan) -> None:
    peaks = sorted(mesh.peak for mesh in free.meshes)
    limit = (free.of(data=4).peak + peaks[0]) // 2
    plan = plan_parallelism(SPEC, BATCH, 4, limit, **GIVEN)
    assert plan.of(data=4).refusal.startswith("needs ")
    assert plan.chosen is not None
    assert plan.chosen.peak <= limit
    assert plan.best == plan.chosen.parallelism != {}
    assert "data parallelism is not possible: needs " in plan.verdict
    none = plan_parallelism(SPEC, BATCH, 4, 1000, **GIVEN)
    assert none.chosen is None
    with pytest.raises(ValueError, match=r"no mesh of 4 workers fits: .*, needs .* are available; give"):
        _ = none.best


def _mesh(seconds: float, **sizes: int) -> MeshPlan:
    return MeshPlan(sizes=sizes, peak=1, step_seconds=seconds)


def test_only_a_clearly_faster_mesh_replaces_data_parallelism() -> None:
    def plan(*meshes: MeshPlan) -> ParallelismPlan:
        return ParallelismPlan(workers=4, rows=8, meshes=meshes, memory=None, facts="")

    near = plan(_mesh(0.95, tensor=4), _mesh(1.0, data=4))
    assert near.best == {}
    assert "which gains too little" in near.verdict
    far = plan(_mesh(0.8, tensor=4), _mesh(1.0, data=4))
    assert far.best == {"tensor": 4}
    assert "and data parallelism takes 1 s" in far.verdict


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"workers": 2, "link": {"alpha": 1}}, "link must be a Link, or a dict of seconds per message"),
        ({"workers": 2, "stepSeconds": {4: 1.0}}, "stepSeconds must map at least two numbers of rows"),
        ({"workers": 2, "coresPerHost": 0}, "coresPerHost must be at least 1, got 0"),
        ({"workers": 2, "repeats": 0}, "repeats must be at least 1, got 0"),
        ({"workers": 2, "gradientAccumulation": 0}, "gradientAccumulation must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_parallelism(SPEC, BATCH, **{**GIVEN, **arguments})
