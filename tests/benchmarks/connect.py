"""Control plane of a gang by number of ranks: connecting, heartbeats, and noticing a lost rank.

Ranks are processes that connect by the library, or threads that send the requests of a rank with `torch`.
The hang detector runs in simulated time; 5 % of heartbeats and of the driver's polls come 30 s late.

    OMP_NUM_THREADS=1 make bench ARGS="connect"
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import partial
from math import log
from typing import Any
from unittest.mock import patch

import harness

from ringspark.estimators.collectives import Member
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.gloo_ports import PortGuard, machines_of
from ringspark.estimators.collectives.rendezvous.peer_proof import shared_nonce
from ringspark.estimators.collectives.rendezvous.server import KeyValues, RendezvousServer, Reply
from ringspark.estimators.collectives.torch_collective import MemberStore
from ringspark.estimators.launch.hang_detector import HangDetector
from ringspark.estimators.launch.heartbeat import Beat, beat_uri, interval_seconds, read_beats
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.launch.monitor import POLL_SECONDS, pause_after

TIMEOUT = 600.0
LOST, BEGIN = 7, 600.0  # a rank of the simulation, and the second at which something happens to it
counts: Counter[str] = Counter()


def count(self: KeyValues, message: bytes, reply: Reply, answer: Any = KeyValues.answer) -> None:
    def count_reply(data: bytes) -> None:
        counts["sent"] += len(data)
        reply(data)

    counts.update(requests=1, arrived=len(message))
    answer(self, message, count_reply)


def connect_threads(size: int) -> None:
    secret = os.urandom(32)
    server = RendezvousServer("127.0.0.1", size, secret)

    def connect(rank: int) -> None:
        member = Member(rank=rank, size=size)
        with closing(RendezvousClient(member, server.address, secret, TIMEOUT)) as client:
            store = MemberStore(client, PortGuard(machines_of(client, member)), TIMEOUT)
            keys = [f"0//cpu//0/{peer}" for peer in range(size)]
            # As long as Gloo's address, in which few bytes differ between ranks.
            store.set(keys[rank], os.urandom(8) + bytes(150))
            for begin in range(0, size, 128):
                store.multi_get(keys[begin : begin + 128])
            shared_nonce(client, member, TIMEOUT)

    # The threads open no ports, and looking for new ones among all their sockets would take minutes.
    no_ports = patch.multiple(PortGuard, __init__=lambda *_: None, restrict=lambda _: None)
    with closing(server), no_ports, ThreadPoolExecutor(size) as pool:
        list(pool.map(connect, range(size)))


def connect_lines(name: str, sizes: list[int], connect: Callable[[int], object]) -> list[list[str]]:
    lines, found = [], []
    for size in sizes:
        counts.clear()
        seconds = harness.seconds_of(partial(connect, size))
        found.append([counts[name] for name in ("requests", "arrived", "sent")])
        lines.append([f"{name}, {size:,}", *(f"{value:,}" for value in found[-1]), f"{seconds:.1f}"])
    slopes = [log(b / a) / log(sizes[-1] / sizes[-2]) for a, b in zip(*found[-2:], strict=True)]
    return [*lines, [f"{name}, growth", *(f"N^{slope:.2f}" for slope in slopes), ""]]


def beat(rank: int, number: int = 0, ticks: int = 0) -> Beat:
    place: dict[str, Any] = {"token": "token", "host": "10.0.0.1", "task": rank, "pid": rank, "launch": 0}
    return Beat(rank=rank, phase="training", ticks=ticks, beats=number, **place)


def heartbeat_line(polls: int, size: int) -> list[str]:
    with tempfile.TemporaryDirectory() as run:
        os.mkdir(os.path.join(run, "heartbeat"))
        for rank in range(size):
            with open(beat_uri(run, rank), "w") as file:
                json.dump(asdict(beat(rank)), file)
        detector, start = HangDetector(size, TIMEOUT), time.process_time()
        for now in range(polls + 1):
            if now == polls:
                cost = 1e3 * (time.process_time() - start) / polls
                tracemalloc.start()
            detector.update(read_beats(run, size, "token", 0), now)
            assert detector.find_hung(now) is None
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
    pause = max(POLL_SECONDS, pause_after(cost / 1e3, interval_seconds(TIMEOUT)))
    hour = 3600.0 / (pause + cost / 1e3) * cost / 1e3
    return [f"{size:,}", f"{cost:,.1f}", f"{hour:,.0f}", f"{peak:,.2f}"]


def simulate(size: int, seconds: float, step: float, dies: bool = False) -> list[str]:
    """Returns the verdict on ranks that tick each second, and after `BEGIN` every `step` seconds."""
    draw, detector, now = random.Random(0), HangDetector(size, TIMEOUT), 0.0
    due, beats = [draw.uniform(0, 5) for _ in range(size)], list(map(beat, range(size)))
    while now < seconds:
        now += 2.5 + 30.0 * (draw.random() < 0.05)
        late = max(0.0, now - BEGIN)
        ticks = int(min(now, BEGIN) + late // step)
        for rank in (rank for rank in range(size) if due[rank] <= now):
            if not (dies and rank == LOST and late):
                beats[rank] = beat(rank, beats[rank].beats + 1, ticks + (late > 0 and rank != LOST))
                due[rank] = now + 5 + 30.0 * (draw.random() < 0.05)
        detector.update(beats, now)
        if hung := detector.find_hung(now):
            return [f"rank {hung.rank} {hung.reason}", f"{now - BEGIN:,.0f}"]
    return ["no alarm", "never"]


@patch.object(KeyValues, "answer", count)
@patch.dict(os.environ, RINGSPARK_SHARED_MEMORY="0")
def main() -> None:
    args = harness.parse(__doc__, repeats=(20, 1), ranks=(8, 4), threads=(1024, 16), hours=(24, 1))
    few = sorted({2, args.ranks // 2, args.ranks})
    many = [args.threads // 16, args.threads // 4, args.threads]
    gang = partial(partial, run_spawned, work=lambda *rank: "", timeout_seconds=TIMEOUT)
    lines = connect_lines("torch", few, gang(collective="torch"))
    lines += connect_lines("horovod", few, gang(collective="horovod"))
    lines += connect_lines("threads", many, connect_threads)
    harness.print_table("Connecting, at rank 0", ["ranks", "requests", "bytes in", "out", "seconds"], lines)
    beats = [heartbeat_line(args.repeats, size) for size in (16, *many, 4 * args.threads)]
    harness.print_table(
        "The driver's cost of a poll", ["ranks", "CPU, ms", "CPU per hour, s", "peak, MiB"], beats
    )
    last = partial(simulate, args.threads, 7200.0)
    rows = [
        [f"64 ranks train for {args.hours} h", *simulate(64, 3600.0 * args.hours, 1.0)],
        [f"one rank of {args.threads:,} dies", *last(1e6, dies=True)],
        ["one stops", *last(1e6)],
        ["one needs 120 s per step", *last(120.0)],
    ]
    harness.print_table("Hang detector, timeoutSeconds=600", ["what happens", "verdict", "after, s"], rows)


if __name__ == "__main__":
    main()
