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
UUIDS = {letter: f"{letter.lower() * 8}-0000-1111-2222-333333333333" for letter in "ABCD"}


def _claims(layout: str) -> list[Claim]:
    """Builds claims from "host/address/cards": A to D are cards; no address means no GPU scheduling."""
    claims = []
    for host, place, cards in (claim.split("/") for claim in layout.split()):
        kind, _, letter = place.partition("-")
        address = f"{kind}-{UUIDS[letter]}" if letter else place
        visible = tuple(UUIDS.get(card, card) for card in cards)
        claims.append(Claim(host=host, addresses=(address,) if address else (), visible=visible))
    return claims


# Claims -> the number of each rank's device.
LAYOUTS = {
    "standalone, the node's indices": ("h/3/ABCD h/0/ABCD i/3/BADC", [3, 0, 3]),
    "kubernetes, a pod with its own card": ("10.0.0.1/0/A 10.0.0.2/0/B", [0, 0]),
    "yarn, the node's index in a process that sees one card": ("h/2/C h/0/A", [0, 0]),
    "yarn, two containers of one host, each calling its card 0": ("h/0/A h/0/B", [0, 0]),
    "an executor with the upper half of a node": ("h/7/CD h/6/CD h/0/AB h/1/AB", [1, 0, 0, 1]),
    "indices beyond 9 keep their order": ("h/10/AB h/9/AB", [1, 0]),
    "addresses that are UUIDs": ("h/GPU-B/AB h/GPU-A/AB", [1, 0]),
    "a MIG slice, which is all that its process sees": ("h/MIG-C/A h/MIG-D/B", [0, 0]),
    "spark manages none": ("h//AB i//CD h//AB", [0, 0, 1]),
    "spark manages none, containers of one host": ("h//A h//B", [0, 0]),
    "a build without UUIDs": ("h/1/01 h/0/01", [1, 0]),
    "a worker narrowed by an earlier job, whose card is its own all the same": ("h/0/ABCD h/3/D", [0, 0]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_finds_the_card_that_spark_gave_it(name):
    layout, indices = LAYOUTS[name]
    claims = _claims(layout)
    assert assign_devices(claims) == [f"cuda:{index}" for index in indices]
    cards = {(claim.host, claim.visible[index]) for claim, index in zip(claims, indices, strict=True)}
    assert len(cards) == len(claims)


REFUSED = {
    "a fraction of a GPU for a task": (
        "h/0/AB h/0/AB h/1/AB",
        r"Spark gave GPU '0' of host h to 2 of them \(spark.task.resource.gpu.amount is below 1\); set ",
    ),
    "fewer cards than ranks": (
        "h//A h//A",
        "needs a GPU for each of the 2 workers on host h, but PyTorch sees 1 there; lower numWorkers",
    ),
    "torch without CUDA": (
        "h/0/ h/1/",
        r"on host h Spark assigned 0, 1, but PyTorch sees 0 device\(s\); install a CUDA build of torch",
    ),
    "an index of the node, and some of its cards hidden": (
        "h/5/AB",
        r"on host h Spark assigned 5, but PyTorch sees 2 device\(s\)",
    ),
    "a UUID that is not there": ("h/GPU-C/AB", r"assigned GPU-c{8}-\S+, but PyTorch sees 2 device\(s\)"),
    "workers narrowed to one card by an earlier job": (
        "h/0/A h/1/A",
        r"Spark assigned 0, 1, but PyTorch sees 1 device\(s\).*spark.python.worker.reuse=false",
    ),
    "one card under two numbers": ("h/0/AB h/1/BA", "two workers of host h resolve to device aaaaaaaa-"),
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
        Claim(host="h", addresses=pair, visible=tuple(UUIDS.values())) for pair in (("2", "3"), ("0", "1"))
    ]
    assert assign_devices(claims) == ["cuda:2", "cuda:0"]


def test_a_claim_survives_its_way_through_the_exchange():
    claim = Claim(host="h", addresses=("0",), visible=("A", "B"))
    assert record(Claim, json.loads(json.dumps(asdict(claim)))) == claim
