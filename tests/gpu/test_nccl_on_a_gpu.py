"""The torch collective's operations by NCCL, with the one rank that a single GPU allows."""

from __future__ import annotations

import secrets

import pytest
import torch

from ringspark.estimators.collectives import RendezvousInfo, collective_class
from ringspark.estimators.launch.gang_task import assign_ranks


@pytest.mark.filterwarnings("default")
def test_nccl_takes_every_operation(device: str) -> None:
    if device == "cpu":
        pytest.skip("NCCL needs a GPU")
    (member,), secret = assign_ranks(["127.0.0.1"]), secrets.token_bytes(32)
    kind = collective_class("torch")
    rendezvous = kind.open_rendezvous(member, secret)
    info = RendezvousInfo(address=rendezvous.address, secret=secret, use_gpu=True)
    collective = kind.connect(member, info)
    try:
        values = torch.arange(10.0, device=device)
        on_the_host = torch.arange(3)
        assert collective.all_reduce(values, "max").equal(values)
        assert collective.all_reduce(on_the_host).equal(on_the_host)
        summed = values.clone()
        wait = collective.start_sum(summed, "bucket")
        wait()
        assert summed.equal(values)
        for found in (
            collective.all_gather(values)[0],
            collective.all_gather(values, [10])[0],
            collective.gather(values)[0],
            collective.all_to_all([values], [10])[0],
            collective.start_reduce_scatter(values, [10])(),
        ):
            assert found.device == values.device
            assert found.equal(values)
        collective.broadcast([summed])
        collective.barrier()
        assert summed.equal(values)
    finally:
        collective.close()
        rendezvous.close()
