"""Members can use the rendezvous and strangers cannot; with threads and real sockets."""

import asyncio
import os
import resource
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from urllib.request import Request, urlopen

import pytest
import rendezvous_crowd
from waiting import wait_for

from ringspark.estimators.collectives import CollectiveError, Member
from ringspark.estimators.collectives.rendezvous.channel import (
    MAGIC,
    MAX_FRAME_BYTES,
    prove_as_client,
)
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.horovod_proxy import HorovodProxy
from ringspark.estimators.collectives.rendezvous.member_port import MAX_STRANGERS
from ringspark.estimators.collectives.rendezvous.peer_proof import check_proofs, proofs_for
from ringspark.estimators.collectives.rendezvous.server import (
    MAX_STORED_BYTES,
    KeyValues,
    RendezvousServer,
    pack,
    rendezvous_ports,
    unpack,
)

SECRET = bytes(range(32))
HOST = "127.0.0.1"

_opened: list[RendezvousClient | socket.socket] = []


@pytest.fixture
def server():
    """Rendezvous server of a gang of two; closes the connections of `member` and `raw` at the end."""
    opened = RendezvousServer(HOST, 2, SECRET)
    yield opened
    opened.close()
    while _opened:
        _opened.pop().close()


def member(rank: int, server: RendezvousServer, size: int = 2) -> RendezvousClient:
    client = RendezvousClient(Member(rank=rank, size=size), server.address, SECRET, 10.0)
    _opened.append(client)
    return client


def raw(server: RendezvousServer) -> socket.socket:
    host, port = server.address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=10)
    _opened.append(connection)
    return connection


def is_closed(server: RendezvousServer, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            raw(server).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            pass  # the port closed during the connection attempt
        time.sleep(0.01)
    return False


def said_until_closed(connection: socket.socket) -> bytes:
    """Returns everything that the server sends before it closes the connection."""
    heard = b""
    try:
        while chunk := connection.recv(1 << 16):
            heard += chunk
    except ConnectionError:
        pass
    return heard


def test_members_share_keys_and_the_port_closes_when_all_have_come(server):
    first = member(0, server)
    assert not is_closed(server, 0.05)
    second = member(1, server)
    assert is_closed(server)
    first.set("a", b"1")
    assert second.get("a") == b"1"
    assert second.get("b") is None
    waiting = threading.Timer(0.2, first.set, ("b", b""))
    waiting.start()
    assert second.get("b", 10.0) == b""
    assert [first.add("n", 2), second.add("n", 3)] == [2, 5]
    assert second.delete("a")
    assert not second.delete("a")


def test_a_thread_that_waits_delays_no_other(server):
    first, second = member(0, server), member(1, server)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(first.get, key, 600.0) for key in "ab"]
        first.set("c", b"3")
        assert [first.get("c"), first.get("d", 0.1)] == [b"3", None]
        second.set("b", b"2")
        assert waiting[1].result() == b"2"
        assert not waiting[0].done()
        # Closing a rank's connection ends the requests of its threads.
        first.close()
        with pytest.raises(CollectiveError, match="rendezvous of rank 0 failed"):
            waiting[0].result()


def test_ranks_exchange_values_under_the_same_name_again_and_again(server):
    clients = member(0, server), member(1, server)

    def exchange(client: RendezvousClient) -> tuple[list[bytes], list[bytes]]:
        rank = client.member.rank
        values = client.all_gather("values", b"zero" if rank == 0 else b"", 600.0)
        return values, client.all_to_all("parts", [b"%d to %d" % (rank, to) for to in range(2)], 600.0)

    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            first, second = pool.map(exchange, clients)
            assert first == ([b"zero", b""], [b"0 to 0", b"1 to 0"])
            assert second == ([b"zero", b""], [b"0 to 1", b"1 to 1"])


def test_an_answer_that_is_too_long_asks_for_fewer_workers(server):
    clients = member(0, server), member(1, server)
    values = [os.urandom(MAX_FRAME_BYTES // 2 + 1) for _ in clients]

    def exchange(client: RendezvousClient) -> str:
        with pytest.raises(CollectiveError) as caught:
            client.all_gather("values", values[client.member.rank], 600.0)
        return str(caught.value)

    with ThreadPoolExecutor() as pool:
        assert all("lower numWorkers" in message for message in pool.map(exchange, clients))
    clients[0].set("a", b"1")
    assert clients[1].get("a") == b"1"


def test_ranks_that_do_not_come_are_named(server):
    with pytest.raises(CollectiveError, match=r"rank 1 of 2 did not come to the rendezvous within 0.2 s"):
        member(0, server).meet("ready", 0.2)


@pytest.mark.parametrize(
    ("most_bytes", "reason"), [(MAX_STORED_BYTES, "rank 1 of 2 did not come"), (0, "lower numWorkers")]
)
def test_the_reason_why_horovod_cannot_start_is_logged_once(server, monkeypatch, caplog, most_bytes, reason):
    client = member(0, server)
    monkeypatch.setattr("ringspark.estimators.collectives.rendezvous.server.MAX_STORED_BYTES", most_bytes)
    with HorovodProxy(client, [], 0.2) as proxy:
        put = Request(f"http://{proxy.address}:{proxy.port}/global/0", data=bytes(136), method="PUT")
        for _ in range(3):  # as often as Horovod
            with pytest.raises(OSError, match="closed connection"):
                urlopen(put)
    assert caplog.text.count(reason) == 1


def test_a_second_start_of_horovod_gets_no_address_of_the_first(server):
    def start(rank: int, address: bytes) -> bytes:
        time.sleep(0.2 * rank)  # rank 1 is late
        scope = f"http://{proxies[rank].address}:{proxies[rank].port}/global"
        urlopen(Request(f"{scope}/{rank}", data=address, method="PUT")).close()
        with urlopen(f"{scope}/{1 - rank}") as answer:
            return answer.read()

    proxies = [HorovodProxy(member(rank, server), [], 10.0) for rank in range(2)]
    with proxies[0], proxies[1], ThreadPoolExecutor() as pool:
        for addresses in ([b"a" * 136, b"b" * 136], [b"c" * 136, b"d" * 136]):
            assert list(pool.map(start, range(2), addresses)) == addresses[::-1]


def test_a_peer_without_the_secret_is_told_nothing(server):
    with pytest.raises(CollectiveError, match="could not join the rendezvous") as caught:
        RendezvousClient(Member(rank=1, size=2), server.address, b"\0" * 32, 0.5)
    assert "secret" in str(caught.value) or "closed" in str(caught.value)
    stranger = raw(server)
    stranger.sendall(b"\x01" * 32 + struct.pack("!I", 1) + b"\x02" * 32)
    assert len(said_until_closed(stranger)) == len(MAGIC) + 32


def test_a_proof_heard_before_is_worth_nothing(server):
    """A relay records the bytes of a member and sends them again."""
    relay = socket.create_server((HOST, 0))
    recorded = []

    def pass_on() -> None:
        inner, _ = relay.accept()
        with inner, raw(server) as outer:
            inner.sendall(outer.recv(len(MAGIC) + 32, socket.MSG_WAITALL))
            recorded.append(inner.recv(68, socket.MSG_WAITALL))
            outer.sendall(recorded[0])
            inner.sendall(outer.recv(32, socket.MSG_WAITALL))

    thread = threading.Thread(target=pass_on)
    thread.start()
    with socket.create_connection(relay.getsockname()) as connection:
        prove_as_client(connection, SECRET, 1)
    thread.join()
    relay.close()
    again = raw(server)
    again.sendall(recorded[0])
    assert len(said_until_closed(again)) == len(MAGIC) + 32


def test_a_server_without_the_secret_is_not_believed():
    with socket.create_server((HOST, 0)) as impostor:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(MAGIC + os.urandom(32))
                connection.recv(68, socket.MSG_WAITALL)
                connection.sendall(os.urandom(32))

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"{HOST}:{impostor.getsockname()[1]}"
        with pytest.raises(CollectiveError, match="does not know the secret of this run"):
            RendezvousClient(Member(rank=1, size=2), address, SECRET, 10.0)
        thread.join()


def test_a_changed_message_and_an_announced_flood_end_the_connection(server):
    for rank, sent in enumerate([pack(b"set", b"k", b"v") + b"\0" * 32, b""]):
        connection = raw(server)
        prove_as_client(connection, SECRET, rank)
        connection.settimeout(10)
        length = len(sent) - 32 if sent else MAX_FRAME_BYTES + 1
        connection.sendall(struct.pack("!I", length) + sent)
        assert said_until_closed(connection) == b""


def test_a_crowd_that_holds_connections_keeps_no_member_out(server):
    for _ in range(2 * MAX_STRANGERS):
        raw(server)
    first, second = member(0, server), member(1, server)
    second.set("a", b"")
    assert first.get("a") == b""


@pytest.mark.parametrize("size", [200, pytest.param(1024, marks=pytest.mark.slow)])
def test_many_ranks_meet_while_two_hundred_strangers_attack(size):
    assert rendezvous_crowd.run(size, 200) >= 200


def test_a_gang_raises_a_limit_of_open_files_that_is_too_low_for_it():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        assert rendezvous_crowd.run(200, 0) == 0
        with pytest.raises(ValueError, match=rf"but this process may open only {limits[1]} files; raise"):
            RendezvousServer(HOST, limits[1], SECRET)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_rank_comes_once(server):
    member(0, server)
    with pytest.raises(CollectiveError):
        member(0, server).set("a", b"")
    with pytest.raises(CollectiveError):
        member(7, server, size=8).set("a", b"")


def test_nothing_is_left_after_close(server):
    client = member(0, server)
    raw(server)
    server.close()
    assert is_closed(server, 1.0)
    with pytest.raises(CollectiveError, match="rendezvous of rank 0 failed"):
        client.get("a")
    threads = [t for t in threading.enumerate() if "ringspark-rendezvous" in t.name]
    wait_for("the end of the threads", lambda: not any(t.is_alive() for t in threads), seconds=10)


def test_the_store_is_bounded_and_refuses_odd_requests():
    loop = asyncio.new_event_loop()
    store, answers = KeyValues(loop), list[bytes]()
    big = b"x" * (MAX_STORED_BYTES // 4)
    for number in range(5):
        store.answer(pack(b"set", str(number).encode(), big), answers.append)
    assert [answer[:1] for answer in answers] == [b"\0", b"\0", b"\0", b"\2", b"\2"]
    store.answer(pack(b"delete", b"0"), answers.append)
    store.answer(pack(b"set", b"3", big), answers.append)
    assert [answer[:1] for answer in answers[5:]] == [b"\0", b"\0"]
    answers.clear()
    odd = (b"", pack(b"drop"), pack(b"set", b"k"), pack(b"add", b"k", b"x"), pack(b"get", b"k", b"9" * 30))
    for message in odd:
        with pytest.raises(ValueError, match=r"request|digits|invalid literal"):
            store.answer(message, answers.append)
    loop.close()
    assert not answers
    for message in (b"\0\0", struct.pack("!I", 2**31) + b"x"):
        with pytest.raises(ValueError, match=r"a message ends|bytes left for a string"):
            unpack(message)


def test_a_stranger_on_a_data_connection_is_found_out():
    nonce, members = os.urandom(32), [Member(rank=rank, size=2) for rank in range(2)]
    sent = [proofs_for(each, nonce, SECRET) for each in members]
    received = [b"".join(proofs[32 * rank : 32 * rank + 32] for proofs in sent) for rank in range(2)]
    for each, proofs in zip(members, received, strict=True):
        check_proofs(each, nonce, SECRET, proofs)
    with pytest.raises(CollectiveError, match="rank 0 is connected to a stranger instead of rank 1"):
        check_proofs(members[0], nonce, SECRET, received[0][:32] + os.urandom(32))
    with pytest.raises(CollectiveError, match="stranger instead of rank 0"):
        check_proofs(members[1], nonce, SECRET, received[0])
    # A stranger echoes the rank's own proof.
    echoed = received[0][:32] + sent[0][32:]
    with pytest.raises(CollectiveError, match="stranger instead of rank 1"):
        check_proofs(members[0], nonce, SECRET, echoed)


def test_ranks_that_were_told_no_port_meet_where_the_secret_says():
    """A stranger has the first port, and an earlier start of the gang has the second."""
    ports = rendezvous_ports(SECRET)
    assert rendezvous_ports(SECRET[::-1]) != ports
    address, heard = f"{HOST}:{','.join(map(str, ports))}", threading.Event()

    def greet(stranger: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with stranger.accept()[0] as connection:
                    heard.set()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))

    with (
        socket.create_server((HOST, ports[0])) as stranger,
        closing(RendezvousServer(HOST, 2, b"earlier", ports)) as earlier,
        ThreadPoolExecutor() as pool,
    ):
        pool.submit(greet, stranger)
        early = pool.submit(RendezvousClient, Member(rank=1, size=2), address, SECRET, 10.0)
        # The client tried the ports before rank 0 was ready.
        assert heard.wait(10.0)
        with closing(RendezvousServer(HOST, 2, SECRET, ports)) as now:
            first = RendezvousClient(Member(rank=0, size=2), now.address, SECRET, 10.0)
            with closing(early.result()) as second, closing(first):
                first.set("key", b"value")
                assert second.get("key") == b"value"
        stranger.shutdown(socket.SHUT_RDWR)
    opened = [server.address for server in (earlier, now)]
    assert opened == [f"{HOST}:{ports[1]}", f"{HOST}:{ports[2]}"]
