"""Hardware profile: speeds of operators and links, and the ranks per host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ringspark.extras.model_parallel.fake_collective import Message
from ringspark.extras.planning.exchange_time import Link, ring_seconds
from ringspark.extras.planning.meshes.work import Work


@dataclass(frozen=True, kw_only=True)
class OperatorRates:
    """Speed of one rank that has a core or a device to itself.

    Attributes:
        launch: Seconds per operator.
        flop: Seconds per floating-point operation of a matrix product.
        byte: Seconds per byte that an operator reads or writes.
    """

    launch: float
    flop: float
    byte: float

    def seconds(self, work: Work) -> float:
        return work.launches * self.launch + self.rest(work)

    def rest(self, work: Work) -> float:
        """Returns the part of the time that grows with the rows: everything except launching operators."""
        return work.flops * self.flop + work.num_bytes * self.byte

    def fit(self, measured: Mapping[float, tuple[Work, float]]) -> OperatorRates:
        """Returns rates that explain two measured steps; `measured` has (work, seconds) by number of rows.

        The ratio of `flop` and `byte` stays the same, because two steps are too few to separate them.
        """
        (few, quick), (many, slow) = measured[min(measured)], measured[max(measured)]
        grown = self.rest(many) - self.rest(few)
        scale = (slow - quick) / grown if grown > 0 else 0.0
        launch = (slow - scale * self.rest(many)) / many.launches
        if scale <= 0 or launch < 0:
            # Noise, or cache misses of the larger step: assume no launch time.
            scale, launch = slow / self.rest(many), 0.0
        return replace(self, launch=launch, flop=self.flop * scale, byte=self.byte * scale)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts with several ranks each, and the links between ranks.

    Attributes:
        inside: Links between ranks of one host, by the number of ranks that communicate. Measured
            links include the slowdown of ranks that share cores.
        between: Link between hosts; None if there is one host.
        wire: Link for a point-to-point send between two ranks of a host.
        cores_per_host: Number of ranks that a host runs at full speed.
    """

    rates: OperatorRates
    inside: Mapping[int, Link]
    between: Link | None
    wire: Link
    ranks_per_host: int
    cores_per_host: int

    def crowding(self, workers: int) -> float:
        """Returns the number of ranks per core, at least 1."""
        return max(1.0, min(workers, self.ranks_per_host) / self.cores_per_host)

    def hosts(self, workers: int) -> int:
        return -(-workers // self.ranks_per_host)

    def link(self, size: int, reach: int) -> Link:
        """Returns the link for a collective operation of `size` ranks spread over `reach` adjacent ranks."""
        if reach > self.ranks_per_host and self.between is not None:
            return self.between
        return self.inside[min(self.inside, key=lambda known: abs(known - size))]

    def exchange(self, messages: Iterable[Message], size: int, reach: int) -> float:
        """Returns the seconds of collective operations of `size` ranks spread over `reach` adjacent ranks."""
        link = self.link(size, reach)
        return sum(_seconds(message, size, link) for message in messages)

    def sending(self, num_bytes: float, workers: int) -> float:
        link = self.wire if workers <= self.ranks_per_host or self.between is None else self.between
        return link.alpha + num_bytes * link.beta


def _seconds(message: Message, size: int, link: Link) -> float:
    ring = ring_seconds(size, message.num_bytes, link)
    if message.kind == "all_reduce":
        return ring
    if message.kind == "all_to_all":
        # A rank sends everything except its own shard.
        return (size - 1) * (link.alpha + message.num_bytes / size**2 * link.beta)
    if message.kind == "shift":
        return link.alpha + message.num_bytes * link.beta
    return ring / 2
