"""Who is refused: by which end, for which reason, how often, and that nothing else is disturbed."""

import asyncio
import contextlib
import socket
import ssl
from dataclasses import replace

import pytest

from flwr_decentral.channel.connections import Settings
from flwr_decentral.channel.frames import PREAMBLE, VERSION, FrameWriter
from flwr_decentral.channel.gate import Places
from flwr_decentral.channel.roster import Member, Roster

from .loopback import BRISK, INSECURE, LIMIT, Loopback, hello, loopback, model, run, until

pytestmark = pytest.mark.net

HASTY = replace(BRISK, handshake=0.2)


def refusals(world: Loopback, index: int) -> dict[str, int]:
    return world.networks[index].counters()["refused"]


def alone(world: Loopback) -> bool:
    return not any(diary.ups for diary in world.diaries)


@contextlib.contextmanager
def lax(monkeypatch):
    """Let a node open with a certificate that its peers will refuse."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "flwr_decentral.channel.tls._meet_oneself", lambda contexts: b"whatever it holds"
        )
        patch.setattr("flwr_decentral.channel.network.Network._check_own", lambda *_: None)
        yield


CERTIFICATES = {
    "expired": ("certificate-expired", "peer:certificate-expired"),
    "early": ("certificate-not-yet-valid", "peer:certificate-unfit"),
    "foreign": ("certificate-of-another-ca", "peer:certificate-of-another-ca"),
    "stranger": ("not-in-roster", "peer:not-in-roster"),
}


@pytest.mark.parametrize("bad", [0, 1], ids=["dialer", "called"])
@pytest.mark.parametrize("kind", CERTIFICATES)
def test_a_bad_certificate_is_refused_and_both_ends_know_why(
    passports, monkeypatch, caplog, kind, bad
):
    """The roster knows it even: its dates and its chain count all the same."""
    here, there = CERTIFICATES[kind]
    identity = getattr(passports, kind)

    async def work():
        async with loopback(passports.good) as world:
            if kind != "stranger":
                members = list(world.roster.members)
                members[bad] = replace(members[bad], fingerprint=identity.fingerprint)
                world.roster = Roster.of(members, world.roster.edges)
            with lax(monkeypatch):
                for node in (0, 1):
                    how = {"security": identity.security} if node == bad else {}
                    await world.open(node, **how)
            await until(lambda: refusals(world, 1 - bad).get(here, 0) >= 2)
            await until(lambda: refusals(world, bad).get(there, 0) >= 2)
            assert set(refusals(world, 1 - bad)) == {here}
            assert set(refusals(world, bad)) == {there}
            assert alone(world)

    run(work())
    for reason in (here, there):
        lines = [r.getMessage() for r in caplog.records if f"({reason})" in r.getMessage()]
        assert len(lines) == 1, lines


def test_a_member_that_answers_for_another_one_is_refused(passports, monkeypatch):
    """Node 2's certificate, which is good, at node 1's address, and the other way around."""

    async def work():
        async with loopback(passports.good, 3, edges=[(0, 1), (0, 2), (1, 2)]) as world:
            with lax(monkeypatch):
                await world.open(0)
                await world.open(1, security=passports.good[2].security)
            await until(lambda: refusals(world, 0).get("certificate-of-another-index"))
            await until(lambda: refusals(world, 1).get("peer:certificate-of-another-index"))
            assert alone(world)

    run(work())


def test_a_member_that_says_it_is_another_one_is_refused(passports, monkeypatch):
    """The certificate is node 0's, and so is the call; the HELLO says node 2."""

    async def work():
        async with loopback(passports.good, 3, edges=[(0, 1), (0, 2), (1, 2)]) as world:
            a, _ = world.make(0), await world.open(1)
            await a.open(world.diaries[0])
            a.hello = replace(a.hello, index=2)  # it has not called yet
            await until(lambda: refusals(world, 1).get("other-index"))
            await until(lambda: refusals(world, 0).get("peer:other-index"))
            assert world.diaries[1].ups == []

    run(work())


def test_a_node_that_is_no_neighbor_is_refused(passports):
    async def work():
        async with loopback(passports.good, 3, edges=[(0, 2)]) as world:
            await world.open(2)
            await world.open(1, roster=Roster.of(world.roster.members, [(1, 2)]))
            await until(lambda: refusals(world, 0).get("not-a-neighbor"))
            await until(lambda: refusals(world, 1).get("peer:not-a-neighbor"))
            assert alone(world)

    run(work())


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize(
    ("other", "reason", "says"),
    [
        ({"run": "8"}, "other-run", "node 1 has run '8', node 0 has '7'"),
        ({"epoch": 1}, "other-epoch", "node 1 has epoch 1, node 0 has 0"),
        ({"algorithm": "divshare"}, "other-algorithm", "has algorithm 'divshare'"),
        ({"version": "0.2.0"}, "other-algorithm-version", "has algorithm version '0.2.0'"),
        ({"layout": "cd" * 16}, "other-layout", "has model layout 'cdcd"),
    ],
)
def test_a_hello_that_does_not_fit_has_its_own_reason(
    passports, caplog, secure, other, reason, says
):
    async def work():
        async with loopback(passports.good, secure=secure) as world:
            await world.open(0), await world.open(1, **other)
            await until(lambda: refusals(world, 0).get(reason, 0) >= 2)
            await until(lambda: refusals(world, 1).get(f"peer:{reason}", 0) >= 2)
            assert {*refusals(world, 0), *refusals(world, 1)} == {reason, f"peer:{reason}"}
            assert alone(world)

    run(work())
    assert caplog.text.count(f"node 1 refused ({reason})") == 1
    caller = "node 0" if secure else "127.0.0.1"  # which has not said its name yet
    assert caplog.text.count(f"{caller} refused (peer:{reason})") == 1
    assert says in caplog.text


def test_another_version_of_the_protocol_has_its_own_reason(passports, monkeypatch):
    newer = PREAMBLE[:-1] + bytes([VERSION + 1])

    async def work():
        async with loopback(passports.good) as world:
            b = await world.open(1)
            connection = await tls_connection(world, 1, passports.good[0].security)
            reader, writer = connection
            writer.write(newer)
            await until(lambda: b.counters()["refused"].get("other-protocol-version"))
            assert b"speaks version 2 of the protocol, this end 1" in await reader.read()
            writer.close()

    run(work())


# --- plaintext ------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [0, 1], ids=["plain-calls-tls", "tls-calls-plain"])
def test_plaintext_and_tls_refuse_each_other_at_both_ends(passports, plain):
    async def work():
        async with loopback(passports.good) as world:
            bare = Roster.of([replace(m, fingerprint="") for m in world.roster.members], [(0, 1)])
            await world.open(plain, security=INSECURE, roster=bare)
            await world.open(1 - plain)
            insecure, secure = world.networks
            await until(lambda: insecure.counters()["refused"].get("tls-against-plaintext", 0) > 1)
            await until(lambda: secure.counters()["refused"].get("plaintext-against-tls", 0) > 1)
            assert set(insecure.counters()["refused"]) == {"tls-against-plaintext"}
            assert set(secure.counters()["refused"]) == {"plaintext-against-tls"}
            assert alone(world)

    run(work())


def test_insecure_warns(passports, caplog):
    async def work():
        async with loopback(passports.good, secure=False) as world:
            await world.open(0)

    run(work())
    assert "insecure = true: models travel in plaintext" in caplog.text


def test_plaintext_carries_checksums_and_a_broken_one_ends_the_link(passports):
    async def work():
        async with loopback(passports.good, secure=False) as world:
            b = await world.open(1)
            reader, writer = await asyncio.open_connection("127.0.0.1", world.ports[1])
            frames = FrameWriter(checked=True)
            writer.writelines([PREAMBLE, *frames.hello(hello(0)), *frames.ping()])
            await until(lambda: b.up)
            (spoiled,) = frames.acknowledge(0)
            writer.write(spoiled[:-1] + b"\1")
            await until(lambda: b.counters()["refused"].get("bad-checksum"))
            assert b.counters()["peers"][0]["breaks"] == {"refused": 1}
            assert world.diaries[1].downs == [0]
            assert b"checksum does not fit" in await reader.read()
            writer.close()

    run(work())


# --- strangers ------------------------------------------------------------------------------------


async def tls_connection(world, node, security):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(security.ca)
    if security.cert is not None:
        context.load_cert_chain(security.cert, security.key)
    return await asyncio.open_connection(
        "127.0.0.1", world.ports[node], ssl=context, server_hostname=""
    )


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(4096),
    "text": b"hello?\n" * 50,
    "noise": bytes(range(1, 256)) * 300,
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_garbage_on_the_port_is_refused_at_once_and_disturbs_nobody(passports, secure, name):
    async def work():
        async with loopback(passports.good, secure=secure) as world:
            a, b = await world.open(0), await world.open(1)
            await until(lambda: a.up and b.up)
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", world.ports[1])
                writer.write(GARBAGE[name])
                answer = await reader.read()  # and no reset, which would lose the answer
                assert (answer[:2] == b"\x15\x03") if secure else (b"not-our-protocol" in answer)
                writer.close()
            await until(lambda: sum(refusals(world, 1).values()) == 3)
            assert refusals(world, 1) == (
                {"plaintext-against-tls": 3} if secure else {"not-our-protocol": 3}
            )
            a.send(1, model(10))
            await until(lambda: world.diaries[1].messages)
            assert b.counters()["handshakes"] == 0
            assert world.diaries[1].downs == []
            await until(lambda: len(b._connections._streams) == 1)  # nothing of them is kept

    run(work())


def test_a_caller_without_a_certificate_is_refused(passports):
    nobody = replace(passports.good[0].security, cert=None, key=None, ca=None, insecure=True)

    async def work():
        async with loopback(passports.good) as world:
            b = await world.open(1)
            object.__setattr__(nobody, "ca", passports.good[0].security.ca)
            reader, writer = await tls_connection(world, 1, nobody)
            with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
                await reader.read()
            await until(lambda: b.counters()["refused"] == {"no-certificate": 1})
            writer.transport.abort()

    run(work())


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_who_says_nothing_runs_out_of_time(passports, secure):
    settings = Settings(limit=LIMIT, timing=HASTY)

    async def work():
        async with loopback(passports.good, secure=secure) as world:
            b = await world.open(1, settings=settings)
            reader, writer = await asyncio.open_connection("127.0.0.1", world.ports[1])
            await reader.read()
            await until(lambda: b.counters()["refused"] == {"handshake-timeout": 1})
            assert b.counters()["handshakes"] == 0
            writer.close()

    run(work())


@pytest.mark.slow
@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_two_hundred_half_open_connections_keep_nobody_out(passports, secure):
    """They come from the very address of the roster; the oldest make room."""

    async def work():
        async with loopback(passports.good, 3, secure=secure) as world:
            c = await world.open(2)
            idle = []
            for _ in range(200):
                connection = socket.socket()
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    connection.connect(("127.0.0.1", world.ports[2]))
                idle.append(connection)
            await until(lambda: c.counters()["refused"].get("too-many-handshakes", 0) > 150)
            # Nodes 0 and 1 have the same address: there is a place for each.
            assert c.counters()["handshakes"] == Places().per_address + 2
            a, b = await world.open(0), await world.open(1)
            await until(lambda: a.up == (1, 2) and b.up == (0, 2) and c.up == (0, 1))
            assert len(world.diaries[0].ups) == 2
            a.send(2, model(100))
            await until(lambda: world.diaries[2].messages)
            for connection in idle:
                connection.close()
            await until(lambda: c.counters()["handshakes"] == 0)

    run(work())


def test_a_peer_that_lies_about_what_it_has_consumed_is_cut_off(passports):
    async def work():
        async with loopback(passports.good, secure=False) as world:
            b = await world.open(1)
            _, writer = await asyncio.open_connection("127.0.0.1", world.ports[1])
            frames = FrameWriter(checked=True)
            writer.writelines([PREAMBLE, *frames.hello(hello(0)), *frames.acknowledge(5)])
            await until(lambda: b.counters()["refused"] == {"bad-frame": 1})
            assert b.up == ()
            writer.close()

    run(work())


def test_a_frame_before_the_hello_and_a_second_hello_are_refused(passports):
    async def work():
        async with loopback(passports.good, secure=False) as world:
            b = await world.open(1)
            frames = FrameWriter(checked=True)
            for opening in (frames.ping(), frames.hello(hello(0)) * 2):
                _, writer = await asyncio.open_connection("127.0.0.1", world.ports[1])
                writer.writelines([PREAMBLE, *opening])
                await until(lambda: b.counters()["refused"].get("bad-frame"))
                b.refusals.counts.clear()
                writer.close()

    run(work())


def test_a_roster_of_strangers_is_complete(passports):
    """A member without an address dials, and is known by its certificate alone."""

    async def work():
        async with loopback(passports.good, unreachable=[0]) as world:
            assert world.roster.members[0] == Member(
                index=0, fingerprint=passports.good[0].fingerprint
            )
            a, b = await world.open(0), await world.open(1)
            await until(lambda: a.up and b.up)

    run(work())
