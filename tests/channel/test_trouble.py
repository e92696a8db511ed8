"""Peers that die, freeze, or do not read: only their own link suffers."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flwr_decentral.channel.connections import Settings
from flwr_decentral.channel.frames import PREAMBLE, FrameWriter
from flwr_decentral.channel.heads import MessageHead
from flwr_decentral.core.transcript import vector_digest

from .loopback import BRISK, LIMIT, Loopback, hello, loopback, model, run, until

pytestmark = pytest.mark.net

PEER = Path(__file__).with_name("peer_process.py")
WATCHFUL = Settings(limit=LIMIT, timing=replace(BRISK, keepalive=0.1, patience=1.0, stall=60.0))
IMPATIENT = Settings(limit=LIMIT, timing=replace(BRISK, keepalive=0.05, patience=60.0, stall=0.3))


@contextlib.contextmanager
def process(world: Loopback, index: int, incarnation: int = 1):
    """Run a node in a process of its own; kill it in the end."""
    security = world.identities[index].security
    config = {
        "index": index,
        "records": world.roster.records(),
        "edges": sorted(world.roster.edges),
        "hello": asdict(hello(index, incarnation=incarnation)),
        "files": {name: str(getattr(security, name)) for name in ("ca", "cert", "key")},
    }
    command = [sys.executable, str(PEER), json.dumps(config)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_peer_killed_in_mid_transfer_is_down_and_its_successor_up(passports):
    """Both directions are busy when it dies; the other link goes on, the queue comes back."""
    big = [model(4_000_000, seed) for seed in range(6)]

    async def work():
        async with loopback(passports.good, 3, edges=[(0, 1), (0, 2)]) as world:
            a, _ = await world.open(0), await world.open(2)
            me = world.diaries[0]
            with process(world, 1) as child:
                await until(lambda: a.up == (1, 2))
                for message in big:
                    assert a.send(1, message)
                await until(lambda: me.messages)  # one is through, the next one is on its way
                child.send_signal(signal.SIGKILL)
                await until(lambda: me.downs == [1])
            answered = len(me.messages)
            assert [m.kind for _, m in me.messages] == [
                vector_digest(m.payload) for m in big[:answered]
            ]
            assert me.dropped == big[len(big) - len(me.dropped) :]
            assert answered + len(me.dropped) < len(big)  # what was on its way is gone
            assert a.counters()["backlog"] == 0
            assert a.send(2, model(10))
            assert not a.send(1, model(10))
            await until(lambda: world.diaries[2].messages)
            with process(world, 1, incarnation=2) as child:
                await until(lambda: a.up == (1, 2))
                assert me.ups.count(1) == 2
                a.send(1, big[0])
                await until(lambda: me.messages[-1][1].kind == vector_digest(big[0].payload))
                child.stdin.close()
                await until(lambda: a.counters()["peers"][1]["breaks"].get("left"))
            assert world.diaries[2].downs == []

    run(work())


def test_a_frozen_peer_is_silent_and_taken_for_dead(passports):
    async def work():
        async with loopback(passports.good) as world:
            a = await world.open(0, settings=WATCHFUL)
            with process(world, 1) as child:
                await until(lambda: a.up)
                child.send_signal(signal.SIGSTOP)
                await until(lambda: world.diaries[0].downs)
                assert a.counters()["peers"][1]["breaks"] == {"silent": 1}
                os.kill(child.pid, signal.SIGCONT)
                await until(lambda: a.up)

    run(work())


def test_a_quiet_link_stays_up(passports):
    """Nothing to say for several times the patience: signs of life are enough."""
    settings = Settings(limit=LIMIT, timing=replace(BRISK, keepalive=0.02, patience=0.5))

    async def work():
        async with loopback(passports.good) as world:
            a, b = [await world.open(node, settings=settings) for node in (0, 1)]
            await until(lambda: a.up and b.up)
            links = [a._links[1], b._links[0]]
            before = [link.stream.written for link in links]
            # So many signs of life of 12 bytes take more than two patiences.
            await until(
                lambda: all(
                    link.stream.written - was > 60 * 12
                    for link, was in zip(links, before, strict=True)
                )
            )
            assert world.diaries[0].downs == world.diaries[1].downs == []

    run(work())


async def raw_peer(world: Loopback, node: int, index: int):
    """Connect in plaintext as a node, say HELLO, and read nothing."""
    _, writer = await asyncio.open_connection("127.0.0.1", world.ports[node], limit=1024)
    writer.transport.pause_reading()
    writer.writelines([PREAMBLE, *FrameWriter(checked=True).hello(hello(index))])
    return writer


def test_a_loop_that_was_held_up_does_not_take_its_peers_for_dead(passports):
    settings = Settings(limit=LIMIT, timing=replace(BRISK, keepalive=0.02, patience=0.2))

    async def work():
        async with loopback(passports.good) as world:
            a, b = [await world.open(node, settings=settings) for node in (0, 1)]
            await until(lambda: a.up and b.up)
            for _ in range(3):
                time.sleep(0.5)  # as a process that was suspended
                await asyncio.sleep(0.1)
            assert world.diaries[0].downs == world.diaries[1].downs == []

    run(work())


def test_a_peer_that_does_not_read_holds_up_nobody_else(passports):
    """Its share of the queue stays here, bounded by the credit; all else goes past it."""
    big = [model(4_000_000, seed) for seed in range(5)]

    async def work():
        edges = [(0, 2), (1, 2)]
        async with loopback(passports.good, 3, edges=edges, secure=False) as world:
            c, b = await world.open(2), await world.open(1)
            writer = await raw_peer(world, 2, 0)
            await until(lambda: c.up == (0, 1))
            for message in big:
                c.send(0, message)
            for message in big:
                c.send(1, message)
            await until(lambda: len(world.diaries[1].messages) == len(big))
            stuck = c.counters()["peers"][0]
            assert stuck["sent"] == 0
            assert stuck["in_flight_bytes"] <= 2 * (big[0].payload.nbytes + 64)
            assert c._links[0].stream.pending <= 1 << 20
            assert [message.step for message in c.drop(0)] == [1, 2, 3, 4]
            assert world.diaries[2].downs == []
            writer.transport.abort()
            await until(lambda: world.diaries[2].downs == [0])
            assert b.up == (2,)

    run(work())


def test_a_peer_that_takes_nothing_for_long_is_given_up(passports):
    """It sends signs of life all the while."""

    async def work():
        async with loopback(passports.good, secure=False) as world:
            b = await world.open(1, settings=IMPATIENT)
            writer = await raw_peer(world, 1, 0)
            await until(lambda: b.up)
            alive = asyncio.create_task(chatter(writer))
            b.send(0, model(8_000_000))
            b.send(0, model(1))
            await until(lambda: world.diaries[1].downs == [0])
            assert b.counters()["peers"][0]["breaks"] == {"stalled": 1}
            # The first had been begun, the second not.
            assert [len(message.payload) for message in world.diaries[1].dropped] == [1]
            alive.cancel()
            writer.transport.abort()

    run(work())


async def chatter(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            writer.writelines(FrameWriter(checked=True).ping())
            await asyncio.sleep(0.02)


def test_acknowledgements_do_not_pile_up_for_who_does_not_read(passports):
    """It sends small messages without end; what it is owed waits until it takes what it is sent."""
    frames = FrameWriter(checked=True)
    head = MessageHead(kind="x", step=1, numbers={}, length=None, wire="float32").encode()
    burst = b"".join(part for _ in range(500) for part in frames.first(head, b""))

    async def work():
        async with loopback(passports.good, secure=False) as world:
            b = await world.open(1)
            writer = await raw_peer(world, 1, 0)
            await until(lambda: b.up)
            b.send(0, model(8_000_000))
            stream = b._links[0].stream
            await until(lambda: stream.pending)
            owed = [(stream.pending + stream.written, len(stream._out))]
            for round in range(1, 6):
                writer.write(burst)
                await until(lambda n=500 * round: len(world.diaries[1].messages) == n)
                owed.append((stream.pending + stream.written, len(stream._out)))
            assert owed == owed[:1] * 6
            writer.transport.abort()

    run(work())


def exchange(passports, nodes: int, count: int, size: int) -> None:
    """Let every node send to every other, all at once; look at order and bytes."""
    pairs = [(a, b) for a in range(nodes) for b in range(nodes) if a != b]
    each = count // len(pairs)
    bases = [model(size, seed).payload for seed in range(nodes)]

    async def work():
        async with loopback(passports.good, nodes) as world:
            networks = [await world.open(node) for node in range(nodes)]
            await until(lambda: all(len(network.up) == nodes - 1 for network in networks))
            seen = dict.fromkeys(pairs, 0)

            def check(node: int):
                def on_message(source: int, message) -> None:
                    assert message.step == seen[source, node]
                    assert message.payload.tobytes() == bases[source].tobytes()
                    seen[source, node] += 1
                    world.diaries[node].messages.clear()

                return on_message

            for node, diary in enumerate(world.diaries):
                diary.on_message = check(node)
            for step in range(each):
                for a, b in pairs:
                    networks[a].send(b, replace(model(0), step=step, payload=bases[a]))
            await until(lambda: set(seen.values()) == {each}, seconds=300)
            assert all(network.counters()["refused"] == {} for network in networks)

    run(work(), seconds=300)


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_all_to_all_in_order_and_to_the_byte(passports, nodes):
    exchange(passports, nodes, count=48, size=250_000)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 4])
def test_a_thousand_messages_of_a_megabyte(passports, nodes):
    exchange(passports, nodes, count=1008, size=250_000)
