"""In-process ranks get the results of a real gang and never deadlock."""

from typing import Any

import pytest
import torch

from ringspark.estimators.collectives.in_process import InProcessCollective, RankError, run_in_turns


def test_every_operation_gives_what_a_gang_does():
    def work(collective: InProcessCollective) -> list[Any]:
        rank = collective.rank
        own = torch.tensor([float(rank), 1.0, 2.0])
        total = own.clone()
        wait = collective.start_sum(total, "total")
        receive = collective.start_receive(received := torch.empty(1), (rank - 1) % 3)
        collective.start_send(own[:1], (rank + 1) % 3)()
        receive()
        sent = [torch.full((to,), float(rank)) for to in range(3)]
        first = own.clone()
        collective.broadcast([first], root=2)
        part = collective.part([[0], [1, 2]])
        wait()
        found = [
            total,
            collective.all_reduce(own, op="max"),
            torch.cat(collective.all_gather(own[: rank + 1])),
            collective.start_reduce_scatter(own, [1, 1, 1])(),
            torch.cat(collective.all_to_all(sent, [rank] * 3)),
            received,
            first,
            part.all_reduce(own),
        ]
        return [tensor.tolist() for tensor in found]

    one = [[3.0, 3.0, 6.0], [2.0, 1.0, 2.0], [0.0, 1.0, 1.0, 2.0, 1.0, 2.0]]
    last = [2.0, 1.0, 2.0]
    pair = [3.0, 2.0, 4.0]
    assert run_in_turns(3, work) == [
        [*one, [3.0], [], [2.0], last, [0.0, 1.0, 2.0]],
        [*one, [3.0], [0.0, 1.0, 2.0], [0.0], last, pair],
        [*one, [6.0], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [1.0], last, pair],
    ]


def test_ranks_that_wait_for_each_other_and_ranks_that_fail_end_all_of_them():
    def waits(collective: InProcessCollective) -> None:
        if collective.rank:
            collective.barrier()

    with pytest.raises(RankError, match="all unfinished ranks wait for each other"):
        run_in_turns(3, waits)

    def fails(collective: InProcessCollective) -> None:
        if collective.rank == 1:
            raise ValueError("no")
        collective.barrier()

    with pytest.raises(RankError, match="rank 1: ValueError: no"):
        run_in_turns(3, fails)


def test_each_rank_draws_its_own_random_numbers():
    def work(collective: InProcessCollective) -> list[float]:
        torch.manual_seed(collective.rank)
        collective.barrier()
        first = torch.rand(1)
        collective.barrier()
        return [float(first), float(torch.rand(1))]

    with torch.random.fork_rng(devices=[]):
        together = run_in_turns(2, work)
        for rank, drawn in enumerate(together):
            torch.manual_seed(rank)
            assert drawn == [float(torch.rand(1)), float(torch.rand(1))]
