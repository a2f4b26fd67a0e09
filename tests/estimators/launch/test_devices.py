"""Device assignment from recorded layouts: the addresses from Spark and the devices that PyTorch saw."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspark.estimators.launch.devices import Claim, assign_devices
from ringspark.pipelines.typed_json import record

# GPU names as PyTorch reports them.
A, B, C, D = (f"{letter * 8}-0000-1111-2222-333333333333" for letter in "abcd")

Layout = list[tuple[str, str, tuple[str, ...]]]


def _claims(layout: Layout) -> list[Claim]:
    """Builds claims from (host, assigned address, visible devices). The address is empty without GPU
    scheduling.
    """
    return [
        Claim(host=host, addresses=(address,) if address else (), visible=visible)
        for host, address, visible in layout
    ]


LAYOUTS: dict[str, tuple[Layout, list[str]]] = {
    "standalone, the node's indices": (
        [("h", "3", (A, B, C, D)), ("h", "0", (A, B, C, D)), ("i", "3", (B, A, D, C))],
        ["cuda:3", "cuda:0", "cuda:3"],
    ),
    "kubernetes, a pod with its own card": (
        [("10.0.0.1", "0", (A,)), ("10.0.0.2", "0", (B,))],
        ["cuda:0", "cuda:0"],
    ),
    "yarn, the node's index in a process that sees one card": (
        [("h", "2", (C,)), ("h", "0", (A,))],
        ["cuda:0", "cuda:0"],
    ),
    "yarn, two containers of one host, each calling its card 0": (
        [("h", "0", (A,)), ("h", "0", (B,))],
        ["cuda:0", "cuda:0"],
    ),
    "an executor with the upper half of a node": (
        [("h", "7", (C, D)), ("h", "6", (C, D)), ("h", "0", (A, B)), ("h", "1", (A, B))],
        ["cuda:1", "cuda:0", "cuda:0", "cuda:1"],
    ),
    "indices beyond 9 keep their order": (
        [("h", "10", (A, B)), ("h", "9", (A, B))],
        ["cuda:1", "cuda:0"],
    ),
    "addresses that are UUIDs": (
        [("h", f"GPU-{B}", (A, B)), ("h", f"GPU-{A}", (A, B))],
        ["cuda:1", "cuda:0"],
    ),
    "a MIG slice, which is all that its process sees": (
        [("h", f"MIG-{C}", (A,)), ("h", f"MIG-{D}", (B,))],
        ["cuda:0", "cuda:0"],
    ),
    "spark manages none": (
        [("h", "", (A, B)), ("i", "", (C, D)), ("h", "", (A, B))],
        ["cuda:0", "cuda:0", "cuda:1"],
    ),
    "spark manages none, containers of one host": (
        [("h", "", (A,)), ("h", "", (B,))],
        ["cuda:0", "cuda:0"],
    ),
    "a build without UUIDs": (
        [("h", "1", ("0", "1")), ("h", "0", ("0", "1"))],
        ["cuda:1", "cuda:0"],
    ),
    "a worker narrowed by an earlier job, whose card is its own all the same": (
        [("h", "0", (A, B, C, D)), ("h", "3", (D,))],
        ["cuda:0", "cuda:0"],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_finds_the_card_that_spark_gave_it(name):
    layout, devices = LAYOUTS[name]
    claims = _claims(layout)
    assert assign_devices(claims) == devices
    indices = [int(device.removeprefix("cuda:")) for device in devices]
    cards = {(claim.host, claim.visible[index]) for claim, index in zip(claims, indices, strict=True)}
    assert len(cards) == len(claims)


REFUSED: dict[str, tuple[Layout, str]] = {
    "a fraction of a GPU for a task": (
        [("h", "0", (A, B)), ("h", "0", (A, B)), ("h", "1", (A, B))],
        r"Spark gave GPU '0' of host h to 2 of them \(spark.task.resource.gpu.amount is below 1\); set ",
    ),
    "fewer cards than ranks": (
        [("h", "", (A,)), ("h", "", (A,))],
        "needs a GPU for each of the 2 workers on host h, but PyTorch sees 1 there; lower numWorkers",
    ),
    "torch without CUDA": (
        [("h", "0", ()), ("h", "1", ())],
        r"on host h Spark assigned 0, 1, but PyTorch sees 0 device\(s\); install a CUDA build of torch",
    ),
    "an index of the node, and some of its cards hidden": (
        [("h", "5", (A, B))],
        r"on host h Spark assigned 5, but PyTorch sees 2 device\(s\)",
    ),
    "a UUID that is not there": (
        [("h", f"GPU-{C}", (A, B))],
        rf"Spark assigned GPU-{C}, but PyTorch sees 2 device\(s\)",
    ),
    "workers narrowed to one card by an earlier job": (
        [("h", "0", (A,)), ("h", "1", (A,))],
        r"Spark assigned 0, 1, but PyTorch sees 1 device\(s\).*spark.python.worker.reuse=false",
    ),
    "one card under two numbers": (
        [("h", "0", (A, B)), ("h", "1", (B, A))],
        "two workers of host h resolve to device aaaaaaaa-",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_gang_without_a_card_for_each_rank_is_refused_in_one_sentence(name):
    layout, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        assign_devices(_claims(layout))
    assert "\n" not in str(caught.value)
    assert "useGpu=False" in str(caught.value)


@given(st.data())
def test_no_two_ranks_share_a_card_on_any_node(data):
    num_cards = data.draw(st.integers(1, 8))
    visible = tuple(f"card-{number}" for number in range(num_cards))
    given_addresses = data.draw(st.lists(st.integers(0, num_cards - 1), min_size=1, max_size=8))
    claims = [Claim(host="h", addresses=(str(a),), visible=visible) for a in given_addresses]
    if len(set(given_addresses)) < len(given_addresses):
        with pytest.raises(ValueError, match="needs a separate GPU"):
            assign_devices(claims)
    else:
        assert assign_devices(claims) == [f"cuda:{a}" for a in given_addresses]


def test_a_task_with_several_gpus_computes_on_its_first():
    claims = [
        Claim(host="h", addresses=("2", "3"), visible=(A, B, C, D)),
        Claim(host="h", addresses=("0", "1"), visible=(A, B, C, D)),
    ]
    assert assign_devices(claims) == ["cuda:2", "cuda:0"]


def test_a_claim_survives_its_way_through_the_exchange():
    claim = Claim(host="h", addresses=("0",), visible=(A, B))
    assert record(Claim, json.loads(json.dumps(asdict(claim)))) == claim
