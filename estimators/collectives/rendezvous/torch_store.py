"""A `torch.distributed.Store` over the authenticated connection to the rendezvous."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from ringspark.estimators.collectives.base import CollectiveError
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.gloo_ports import PortGuard


class MemberStore(Store):
    """Replaces `TCPStore`, which serves anybody. torch's C++ code calls it too.

    Attributes:
        guard: Guard of the open ports; each process group has its own guard.
    """

    def __init__(self, client: RendezvousClient, guard: PortGuard, timeout_seconds: float) -> None:
        super().__init__()
        self._client = client
        self.guard = guard
        self._seconds = timeout_seconds

    def set(self, key: str, value: str | bytes) -> None:
        # The value may be the address of a new port.
        self.guard.restrict()
        self._client.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        value = self._client.get(key, self._seconds)
        if value is None:
            raise _no_keys([key], self._seconds)
        return value

    def add(self, key: str, amount: int) -> int:
        return self._client.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._client.wait(keys, 0.0)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        if not self._client.wait(keys, seconds):
            raise _no_keys(keys, seconds)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = (v.encode() if isinstance(v, str) else bytes(v) for v in (expected, desired))
        return self._client.swap(key, old, new)

    def delete_key(self, key: str) -> bool:
        return self._client.delete(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def clone(self) -> MemberStore:
        """Returns this same store, because the server accepts one connection per rank."""
        return MemberStore(self._client, self.guard, self._seconds)


def _no_keys(keys: list[str], seconds: float) -> CollectiveError:
    return CollectiveError(
        f"the other ranks did not come to the rendezvous within {seconds:g} s: no {', '.join(keys)}"
    )
