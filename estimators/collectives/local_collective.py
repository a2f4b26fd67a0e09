"""The collective of a single rank: every operation is the identity."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringspark.estimators.collectives.base import ConnectedMember, ReduceOp, RendezvousInfo
from ringspark.estimators.collectives.traffic import Member


class LocalRendezvous:
    address = "local:0"

    def close(self) -> None:
        return


class LocalCollective(ConnectedMember):
    name = "local"

    def __init__(self, member: Member | None = None) -> None:
        super().__init__(member or Member())
        assert self.member.size == 1

    @staticmethod
    def open_rendezvous(member: Member, secret: bytes, ports: Sequence[int] = (0,)) -> LocalRendezvous:
        return LocalRendezvous()

    @classmethod
    def connect(cls, member: Member, rendezvous: RendezvousInfo) -> LocalCollective:
        return cls(member)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        return tensor.clone()

    def start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        return lambda: None

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        return [tensor.detach().clone()]

    def gather(
        self, tensor: torch.Tensor, counts: Sequence[int] | None = None, root: int = 0
    ) -> list[torch.Tensor]:
        return self.all_gather(tensor)

    def all_to_all(self, pieces: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        return [piece.detach().clone() for piece in pieces]

    def start_reduce_scatter(self, tensor: torch.Tensor, counts: Sequence[int]) -> Callable[[], torch.Tensor]:
        return tensor.clone

    def broadcast(self, tensors: list[torch.Tensor], root: int = 0) -> None:
        return

    def barrier(self) -> None:
        return

    close = abort = barrier
