"""A network on the loopback interface: links that come up, carry messages, break and come back."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from flwr_decentral.channel import sockets
from flwr_decentral.channel.connections import Settings, pause
from flwr_decentral.channel.frames import PREAMBLE, FrameWriter
from flwr_decentral.channel.links import Timing
from flwr_decentral.channel.network import Network
from flwr_decentral.channel.roster import Address, Roster
from flwr_decentral.core import AlgorithmError, ConfigurationError, Message, Seeds

from .loopback import BRISK, INSECURE, LIMIT, hello, loopback, model, run, same, until

pytestmark = pytest.mark.net


@pytest.fixture(params=[True, False], ids=["tls", "plain"])
def secure(request) -> bool:
    return request.param


def test_messages_of_all_kinds_arrive_as_they_were_sent_and_in_order(passports, secure):
    messages = [
        model(10),
        Message(kind="hi", step=-3, header={"a": 1, "b": 2.5, "c": -(2**40)}),
        Message(kind="empty", step=2**62, payload=np.empty(0, np.float32)),
        model(1 << 20, 5, header={"fragment": 3}),  # four pieces
        model(4099, 6),
    ]

    async def work():
        async with loopback(passports.good, secure=secure) as world:
            a, b = await world.open(0), await world.open(1)
            await until(lambda: a.up == (1,) and b.up == (0,))
            for message in messages:
                assert a.send(1, message)
                assert b.send(0, message)
            for diary in world.diaries:
                await until(lambda diary=diary: len(diary.messages) == len(messages))
            for node, diary in enumerate(world.diaries):
                assert [source for source, _ in diary.messages] == [1 - node] * len(messages)
                got = [message for _, message in diary.messages]
                assert all(map(same, got, messages))
                payloads = [message.payload for message in got if message.payload is not None]
                assert all(p.dtype == np.float32 and not p.flags.writeable for p in payloads)
            counters = a.counters()
            assert counters["sent"] == counters["received"] == len(messages)
            assert counters["sent_bytes"] == sum(message.nbytes for message in messages)
            assert counters["refused"] == {}
            assert counters["reconnects"] == 0
            await until(lambda: not a.counters()["peers"][1]["in_flight_bytes"])

    run(work())


def test_one_stream_for_each_edge_whoever_can_be_dialed(passports):
    async def work():
        async with loopback(passports.good, 3, unreachable=[1], edges=[(0, 1), (1, 2)]) as world:
            nodes = [await world.open(node) for node in range(3)]
            await until(lambda: [node.up for node in nodes] == [(1,), (0, 2), (1,)])
            assert world.roster.dialer(0, 1) == world.roster.dialer(1, 2) == 1
            assert nodes[1].send(0, model(5))
            assert nodes[0].send(1, model(6))
            await until(lambda: world.diaries[0].messages and world.diaries[1].messages)
            for network in nodes:
                accounts = network.counters()["peers"].values()
                assert all(account["connected"] == 1 for account in accounts)

    run(work())


def test_nothing_is_queued_for_who_is_not_up(passports):
    async def work():
        async with loopback(passports.good) as world:
            a = await world.open(0)
            assert not a.send(1, model(3))
            assert not a.send(9, model(3))
            assert a.counters()["backlog"] == 0
            assert a.drop() == []

    run(work())


@pytest.mark.parametrize(
    "message",
    [
        Message(kind="x" * 33, step=0),
        Message(kind="x", step=2**63),
        Message(kind="x", step=0, header={str(k): k for k in range(6)}),
        Message(kind="x", step=0, header={"a": float("nan")}),
        Message(kind="x", step=0, header={"a": 2**63}),
        Message(kind="x", step=0, payload=np.zeros(2, np.float64)),
        Message(kind="x", step=0, payload=np.zeros((1 << 24) + 1, np.float32)),
    ],
)
def test_what_a_peer_would_refuse_is_the_algorithms_fault_here(passports, message):
    async def work():
        async with loopback(passports.good, secure=False) as world:
            a, b = await world.open(0), await world.open(1)
            await until(lambda: a.up)
            with pytest.raises(AlgorithmError):
                a.send(1, message)
            assert a.send(1, model(3))
            await until(lambda: world.diaries[1].messages)
            assert b.up == (0,)

    run(work())


def test_a_payload_that_is_not_finite_is_counted_by_peer_and_left_to_the_machine(passports, caplog):
    async def work():
        async with loopback(passports.good) as world:
            a, b = await world.open(0), await world.open(1)
            await until(lambda: a.up)
            for bad in (np.nan, np.inf, -np.inf):
                a.send(1, Message(kind="bad", step=1, payload=np.array([1, bad], np.float32)))
            a.send(1, model(3))
            await until(lambda: len(world.diaries[1].messages) == 4)
            assert b.counters()["not_finite"] == b.counters()["peers"][0]["not_finite"] == 3
            assert b.up == (0,)

    run(work())
    assert caplog.text.count("node 0 sends a 'bad' message with NaN or infinity") == 1


def test_drop_hands_back_what_has_not_been_begun(passports):
    async def work():
        async with loopback(passports.good, 3) as world:
            nodes = [await world.open(node) for node in range(3)]
            await until(lambda: nodes[0].up == (1, 2))
            messages = [model(3, seed) for seed in range(6)]
            for seed, message in enumerate(messages):
                nodes[0].send(1 + seed % 2, message)
            assert nodes[0].drop(1) == messages[::2]  # nothing starts before all is asked for
            assert nodes[0].drop() == messages[1::2]
            assert nodes[0].drop() == []
            nodes[0].send(1, model(1))
            await until(lambda: world.diaries[1].messages)
            assert nodes[0].counters()["sent"] == 1
            assert world.diaries[0].idles <= 1  # and none for what was never sent

    run(work())


def test_link_idle_comes_once_when_the_queue_has_run_empty(passports):
    async def work():
        async with loopback(passports.good) as world:
            a = await world.open(0)
            await world.open(1)
            await until(lambda: a.up)
            assert world.diaries[0].idles == 0
            for seed in range(20):
                a.send(1, model(100_000, seed))
            await until(lambda: world.diaries[0].idles)
            assert a.counters()["backlog"] == 0
            assert a.counters()["sent"] == 20
            a.send(1, model(1))
            await until(lambda: world.diaries[0].idles == 2)
            await until(lambda: len(world.diaries[1].messages) == 21)
            assert world.diaries[0].idles == 2

    run(work())


def test_a_capped_uplink_takes_its_time(passports):
    """Half a megabit at four megabits a second: an eighth of a second, whatever else goes on."""
    settings = Settings(limit=LIMIT, timing=BRISK, uplink_bps=4e6)

    async def work():
        async with loopback(passports.good, 3) as world:
            a = await world.open(0, settings=settings)
            await world.open(1), await world.open(2)
            await until(lambda: a.up == (1, 2))
            began = asyncio.get_running_loop().time()
            for seed in range(4):
                a.send(1 + seed % 2, model(4096, seed))
            await until(lambda: world.diaries[0].idles)
            assert asyncio.get_running_loop().time() - began >= 4 * 4096 * 32 / 4e6

    run(work())


# --- the end of a link ----------------------------------------------------------------------------


def test_who_leaves_says_so_and_who_returns_is_up_again(passports, secure):
    async def work():
        async with loopback(passports.good, secure=secure) as world:
            a, b = await world.open(0), await world.open(1)
            await until(lambda: a.up and b.up)
            await b.close()
            await until(lambda: world.diaries[0].downs == [1])
            assert a.counters()["peers"][1]["breaks"] == {"left": 1}
            assert world.diaries[1].downs == []  # it is not called any more
            again = await world.open(1, incarnation=2)
            await until(lambda: a.up and again.up)
            assert world.diaries[0].ups == [1, 1]
            assert a.counters()["reconnects"] == 1

    run(work())


def test_close_sends_what_is_queued(passports, secure):
    messages = [model(300_000, seed) for seed in range(20)]

    async def work():
        async with loopback(passports.good, secure=secure) as world:
            a, b = await world.open(0), await world.open(1)
            await until(lambda: a.up and b.up)
            for message in messages:
                a.send(1, message)
            await a.close()
            await until(lambda: world.diaries[1].downs == [0])
            assert [m.step for _, m in world.diaries[1].messages] == list(range(20))
            assert b.counters()["peers"][0]["breaks"] == {"left": 1}

    run(work())


def test_close_gives_up_in_mid_message_what_is_not_quick(passports):
    """At 4 Mbit/s, 8 MB would take 16 s: after its grace the node abandons them and leaves."""
    timing = replace(BRISK, grace=0.3)
    slow = Settings(limit=LIMIT, timing=timing, uplink_bps=4e6)

    async def work():
        async with loopback(passports.good) as world:
            a, b = await world.open(0, settings=slow), await world.open(1)
            await until(lambda: a.up and b.up)
            a.send(1, model(2_000_000))
            a.send(1, model(1))
            await a.close()
            await until(lambda: world.diaries[1].downs == [0])
            account = b.counters()["peers"][0]
            assert account["breaks"] == {"left": 1}
            assert 0 < account["abandoned_bytes"] < 8_000_000
            assert world.diaries[1].messages == []

    run(work())


def test_a_broken_link_hands_back_its_queue_and_leaves_the_others_alone(passports):
    big = [model(2_000_000, seed) for seed in range(4)]

    async def work():
        async with loopback(passports.good, 3, edges=[(0, 1), (0, 2)]) as world:
            nodes = [await world.open(node) for node in range(3)]
            await until(lambda: nodes[0].up == (1, 2))
            for message in big:
                nodes[0].send(1, message)
            nodes[0].send(2, big[0])
            await until(lambda: world.diaries[1].messages)
            nodes[1]._links[0].stream.abort()
            await until(lambda: world.diaries[0].downs == [1])
            begun = 4 - len(world.diaries[0].dropped)
            assert [m.step for m in world.diaries[0].dropped] == list(range(begun, 4))
            await until(lambda: world.diaries[2].messages)
            assert world.diaries[2].downs == []
            await until(lambda: nodes[0].up == (1, 2))
            assert nodes[0].counters()["backlog"] == 0

    run(work())


def test_a_newer_incarnation_replaces_the_old_connection(passports, secure):
    """Node 0 dials; its old process still holds a connection when the new one comes."""

    async def work():
        async with loopback(passports.good, secure=secure) as world:
            old, b = await world.open(0), await world.open(1)
            await until(lambda: old.up and b.up)
            new = await world.open(0, incarnation=2)
            await until(lambda: b.counters()["peers"][0]["breaks"].get("replaced"))
            await until(lambda: new.up == (1,))
            assert world.diaries[1].ups == [0, 0]
            assert world.diaries[1].downs == [0]
            # The old process dials again, is refused, and the new one's link stays.
            await until(lambda: b.counters()["refused"].get("older-incarnation"))
            await until(lambda: old.counters()["refused"].get("peer:older-incarnation"))
            assert new.up == (1,)
            assert world.diaries[1].ups == [0, 0]

    run(work())


def test_of_one_incarnation_the_connection_stays_that_the_lower_index_dialed(passports):
    """Both ends dial, by rosters that differ in who can be reached."""

    async def work():
        async with loopback(passports.good) as world:
            backward = world.roster.of(
                [replace(world.roster.members[0]), replace(world.roster.members[1], address=None)],
                [(0, 1)],
            )
            listening = Settings(
                limit=LIMIT, timing=BRISK, listen=Address("127.0.0.1", world.ports[1])
            )
            b = world.make(1, roster=backward, settings=listening)
            a = world.make(0)
            for network, diary in ((a, world.diaries[0]), (b, world.diaries[1])):
                contexts = network._security.load()
                network._listener = diary
                connections = network._connections
                connections._contexts = contexts
                place = Address("127.0.0.1", world.ports[network.hello.index])
                connections._entrance = await connections._listen(place)
                connections._spawn(connections._accept(connections._entrance))
            first = await b._connections._call(0)
            await until(lambda: a.up and b.up)
            second = await a._connections._call(1)
            await until(lambda: first.over.done())
            await until(lambda: a.up and b.up)
            assert a._links[1] is second
            assert not b._links[0].calling
            third = await b._connections._call(0)
            await until(lambda: third.over.done())
            assert a._links[1] is second
            assert b._links[0].up
            assert b.counters()["refused"] == {"second-connection": 1}
            await until(lambda: a.counters()["refused"] == {"peer:second-connection": 1})

    run(work())


# --- configuration --------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_when_it_is_opened(passports, tmp_path):
    async def work():
        async with loopback(passports.good) as world:
            await world.open(1)
            with pytest.raises(ConfigurationError, match="cannot listen at 127.0.0.1:.*in use"):
                await world.open(1)
            with pytest.raises(ConfigurationError, match="the roster knows node 0 by certificate"):
                await world.open(0, security=passports.stranger.security)
            with pytest.raises(ConfigurationError, match="certificate has expired"):
                await world.open(0, security=passports.expired.security)
            with pytest.raises(ConfigurationError, match="is not in the roster of 2 nodes"):
                Network(world.roster, hello(5), INSECURE, Settings(limit=1), None)
            bare = world.roster.of(
                [replace(m, fingerprint="") for m in world.roster.members], world.roster.edges
            )
            with pytest.raises(ConfigurationError, match="holds no certificate fingerprints"):
                world.make(0, roster=bare)

    run(work())


def test_pauses_double_to_a_limit_and_jitter_comes_from_the_given_generator():
    timing = Timing(shortest=0.5, longest=6.0)
    for attempts, usual in ((0, 0.5), (1, 1.0), (3, 4.0), (4, 6.0), (10**6, 6.0)):
        drawn = [pause(timing, attempts, Seeds(seed).generator(0, "x")) for seed in range(50)]
        assert all(0.5 * usual <= one < 1.5 * usual for one in drawn)
        assert len(set(drawn)) == 50
        assert drawn[7] == pause(timing, attempts, Seeds(7).generator(0, "x"))


def test_a_peer_that_is_away_is_called_again_and_again_and_logged_once(passports, caplog):
    async def work():
        async with loopback(passports.good) as world:
            a = await world.open(0)
            await until(lambda: a.counters()["peers"][1]["unreachable"] >= 3)
            b = await world.open(1)
            await until(lambda: a.up and b.up)
            assert a.counters()["peers"][1]["unreachable"] == 0

    run(work())
    assert caplog.text.count("node 1 cannot be reached at 127.0.0.1") == 1


def test_running_out_of_descriptors_is_counted_and_passes(passports, monkeypatch):
    async def work():
        async with loopback(passports.good) as world:
            accept, failures = sockets.accept, [OSError(24, "Too many open files")] * 2

            async def accept_or_fail(listening):
                if failures:
                    raise failures.pop()
                return await accept(listening)

            monkeypatch.setattr(sockets, "accept", accept_or_fail)
            a, b = await world.open(0), await world.open(1)
            await until(lambda: a.up and b.up)
            assert b.counters()["refused"] == {"cannot-accept": 2}

    run(work())


def test_a_host_name_that_is_nowhere_is_tried_again(passports):
    async def work():
        async with loopback(passports.good, secure=False) as world:
            members = [
                world.roster.members[0],
                replace(world.roster.members[1], address=Address("no.such.host.invalid", 1)),
            ]
            a = await world.open(0, roster=Roster.of(members, [(0, 1)]))
            await until(lambda: a.counters()["peers"][1]["unreachable"] >= 2)

    run(work())


@pytest.mark.slow
def test_close_waits_for_nobody_who_does_not_close(passports):
    """The other end is up and does nothing more: neither reads nor hangs up."""
    greeting = [PREAMBLE, *FrameWriter(checked=True).hello(hello(1))]

    async def work():
        async with loopback(passports.good, secure=False) as world:
            deaf = asyncio.Event()

            async def answer(reader, writer):
                writer.transport.pause_reading()
                writer.writelines(greeting)
                await deaf.wait()
                writer.transport.abort()

            async with await asyncio.start_server(answer, "127.0.0.1", world.ports[1]):
                a = await world.open(0)
                await until(lambda: a.up)
                a.send(1, model(4_000_000))
                async with asyncio.timeout(BRISK.grace + BRISK.linger + 5):
                    await a.close()
                assert a.up == ()
                deaf.set()

    run(work())
