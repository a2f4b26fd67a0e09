"""Connects many ranks, one per thread, to one rendezvous while attackers of another process connect too."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

from stranger import ATTACKS

from ringspark.estimators.collectives import Member
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.server import RendezvousServer

HOST = "127.0.0.1"
# A rank fails if it waits longer than this for the other ranks.
TIMEOUT_SECONDS = 60.0
_PAUSE_SECONDS = 0.1


def run(size: int, num_strangers: int) -> int:
    """Runs `size` ranks that join, synchronize, and all-gather their numbers.

    Returns:
        Number of attackers' connections in the meantime.

    Raises:
        CollectiveError: A rank failed.
    """
    secret = os.urandom(32)
    barrier = threading.Barrier(size)

    def join(rank: int) -> RendezvousClient:
        barrier.wait()
        return RendezvousClient(Member(rank=rank, size=size), server.address, secret, TIMEOUT_SECONDS)

    def meet(client: RendezvousClient) -> None:
        client.meet("met", TIMEOUT_SECONDS)

    def gather(numbered: tuple[int, RendezvousClient]) -> list[bytes]:
        rank, client = numbered
        return client.all_gather("numbers", str(rank).encode(), TIMEOUT_SECONDS)

    with (
        closing(RendezvousServer(HOST, size, secret)) as server,
        _strangers(server.address, num_strangers) as counts,
        ThreadPoolExecutor(size) as pool,
    ):
        clients = list(pool.map(join, range(size)))
        list(pool.map(meet, clients))
        gathered_by_rank = list(pool.map(gather, enumerate(clients)))
        for client in clients:
            client.close()
    assert gathered_by_rank == [[str(rank).encode() for rank in range(size)]] * size
    return sum(counts)


@contextmanager
def _strangers(address: str, number: int) -> Iterator[list[int]]:
    """Runs attackers inside the context; appends their number of connections to the list at its end."""
    counts: list[int] = []
    if not number:
        yield counts
        return
    command = [sys.executable, __file__, address, str(number)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        yield counts
        counts.append(int(process.communicate()[0]))


async def _attack(address: str, number: int) -> None:
    """Attacks until the end of the input."""
    host, port = address.rsplit(":", 1)
    connected = [0] * number
    attacks = list(ATTACKS.values())

    async def attack(stranger: int) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                connected[stranger] += 1
                with closing(writer):
                    writer.write(attacks[stranger % len(attacks)])
                    while await reader.read(1 << 10):
                        pass
            await asyncio.sleep(_PAUSE_SECONDS)

    strangers = [asyncio.create_task(attack(stranger)) for stranger in range(number)]
    while not all(connected):
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for stranger in strangers:
        stranger.cancel()
    print(sum(connected))


if __name__ == "__main__":
    asyncio.run(_attack(sys.argv[1], int(sys.argv[2])))
