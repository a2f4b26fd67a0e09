"""The guard of Gloo's ports rejects machines without members; skipped if no hosts can be made."""

from __future__ import annotations

import subprocess
import sys

import pytest
from namespaces import Host, Network, refusal

pytestmark = pytest.mark.skipif(bool(refusal()), reason=f"no hosts here: {refusal()}")

# Listens on argument 1, admits the remaining arguments, and prints the port.
LISTEN = """
import socket, sys
from ringspark.estimators.collectives.rendezvous import own_sockets
listener = socket.create_server((sys.argv[1], 0), family=int(sys.argv[2]))
own_sockets.admit_only(own_sockets.listening(), sys.argv[3:])
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)"


@pytest.mark.slow
@pytest.mark.parametrize("version", [4, 6])
def test_only_members_machines_reach_a_guarded_port(version: int) -> None:
    with Network(num_hosts=3, version=version) as network:
        one, member, stranger = network.hosts
        # A member's machine has IPv4 and IPv6 addresses.
        admitted = [member.address, "10.9.9.9", "fd99::9"]
        family = {4: "2", 6: "10"}[version]
        server = one.start(
            [sys.executable, "-c", LISTEN, one.address, family, *admitted],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with server:
            port = server.stdout.readline().strip()

            def reaches(host: Host) -> bool:
                words = [sys.executable, "-c", CONNECT, one.address, port]
                return host.start(words, stderr=subprocess.DEVNULL).wait() == 0

            assert [reaches(host) for host in (member, stranger)] == [True, False]
            server.kill()
