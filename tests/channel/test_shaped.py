"""Trouble on the way: links that are cut, stalled, late or apart, under TLS, through proxies."""

import asyncio
import contextlib
import itertools
import math
import random
import re
import secrets
import sys
import time
from collections import Counter, defaultdict
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.channel.attachment import Attachment
from flwr_decentral.channel.client import ask
from flwr_decentral.channel.clock import LoopClock
from flwr_decentral.channel.connections import Settings
from flwr_decentral.channel.keys import make_keys
from flwr_decentral.channel.links import Timing
from flwr_decentral.channel.network import Network
from flwr_decentral.channel.orders import Order
from flwr_decentral.channel.pump import Pump
from flwr_decentral.channel.roster import Address, Roster
from flwr_decentral.channel.rounds import Segment
from flwr_decentral.channel.sidecar import Options, Sidecar
from flwr_decentral.core import SECOND, ConfigurationError, RuntimeFault, Seeds
from flwr_decentral.plugins import installed
from flwr_decentral.testing.ports import free_ports
from flwr_decentral.testing.shaped import Neighborhood, Steady
from flwr_decentral.testing.sites import make_site
from flwr_decentral_adpsgd import ADPSGD
from flwr_decentral_dpsgd import DPSGD

from .loopback import LIMIT, Diary, model, run, same, until

pytestmark = pytest.mark.net

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
QUICK = Timing(
    handshake=1.0,
    keepalive=0.1,
    patience=1.5,
    shortest=0.02,
    longest=0.1,
    grace=1.0,
    linger=0.3,
)
RING = nx.cycle_graph(4)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shaped") / "keys"
    make_keys(folder, 4, 1)
    return folder


async def opened(world: Neighborhood, **how):
    """Open the networks of all nodes, and wait until all their links are up."""
    diaries = [Diary() for _ in world.graph]
    networks = [world.network(node, **how) for node in world.graph]
    for network, diary in reversed(list(zip(networks, diaries, strict=True))):
        await network.open(diary)  # whoever is dialed is there by then
    await until(lambda: all(n.up == tuple(sorted(world.graph[i])) for i, n in enumerate(networks)))
    return networks, diaries


# --- one link -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [2_000, 600_000], ids=["short", "in-pieces"])
def test_a_link_that_is_cut_and_healed(keys, caplog, size):
    """Each message has one fate, and what comes, comes once and in order; five cuts, under way."""

    async def work():
        async with Neighborhood(nx.path_graph(2), keys, timing=QUICK) as world:
            networks, diaries = await opened(world)
            a, b = networks
            proxy = world.proxy(0, 1)
            proxy.there.line.bps = 200e6
            steps, queued = itertools.count(), []
            for cut in range(1, 6):
                heard = len(diaries[1].messages)
                for step in itertools.islice(steps, 20):
                    message = replace(model(size), step=step)
                    if a.send(1, message):
                        queued.append(message)
                await until(lambda heard=heard: len(diaries[1].messages) >= heard + 3)
                await proxy.cut()
                await until(lambda: not a.up and not b.up)
                assert not a.send(1, model(1))
                await until(lambda: a.counters()["peers"][1]["unreachable"])
                proxy.heal()
                await until(lambda: a.up and b.up)
                assert a.counters()["reconnects"] == b.counters()["reconnects"] == cut
            last = replace(model(size), step=next(steps))
            assert a.send(1, last)
            await until(lambda: same(diaries[1].messages[-1][1], last))
            got = [message for _, message in diaries[1].messages]
            assert [m.step for m in got] == sorted({m.step for m in got})
            assert all(m.payload.tobytes() == last.payload.tobytes() for m in got)
            # Handed back, or begun; of what was begun, received or lost in the cut.
            back = {m.step for m in diaries[0].dropped}
            assert not back & {m.step for m in got}
            mine, theirs = a.counters(), b.counters()
            assert theirs["received"] == len(got)
            assert theirs["received_bytes"] == sum(m.nbytes for m in got)
            begun = len(queued) + 1 - len(back)
            assert len(got) <= mine["sent"] <= begun <= mine["sent"] + 5
            # By Python's TLS a reset often looks like an end.
            for breaks in (mine["peers"][1]["breaks"], theirs["peers"][0]["breaks"]):
                assert breaks.keys() <= {"broken", "closed-there"}
                assert sum(breaks.values()) == 5
            assert mine["backlog"] == 0
            await until(lambda: not a.counters()["peers"][1]["in_flight_bytes"])

    run(work())
    assert caplog.text.count("node 1 cannot be reached at 127.0.0.1") == 5


@pytest.mark.slow
def test_a_link_that_is_stalled_is_given_up_at_both_ends_and_comes_back(keys, caplog):
    async def work():
        async with Neighborhood(nx.star_graph(2), keys, timing=QUICK) as world:
            networks, diaries = await opened(world)
            loop = asyncio.get_running_loop()
            world.proxy(0, 1).stall()
            began = loop.time()
            for step in range(10):
                networks[0].send(1, replace(model(200_000), step=step))
            numbers = itertools.count()
            while not (diaries[0].downs and diaries[1].downs):
                number = next(numbers)
                networks[0].send(2, replace(model(1000), step=number))
                networks[2].send(0, replace(model(1000), step=number))
                await asyncio.sleep(0.02)
            assert loop.time() - began >= QUICK.patience - QUICK.keepalive
            assert diaries[0].downs == [1]
            assert diaries[2].downs == []
            assert networks[0].counters()["peers"][1]["breaks"] == {"silent": 1}
            assert networks[1].counters()["peers"][0]["breaks"] == {"silent": 1}
            count = next(numbers)
            for node in (0, 2):
                await until(lambda node=node: len(diaries[node].messages) == count)
                assert [m.step for _, m in diaries[node].messages] == list(range(count))
            # While it lasts, whoever dials is heard by nobody, and says so.
            await until(lambda: networks[0].counters()["refused"].get("handshake-timeout"))
            assert diaries[1].messages == []
            world.proxy(0, 1).heal()
            await until(lambda: networks[1].up and 1 in networks[0].up)
            again = replace(model(10), step=99)
            networks[0].send(1, again)
            await until(lambda: diaries[1].messages)
            assert same(diaries[1].messages[0][1], again)
            assert diaries[2].downs == []

    run(work())
    assert "node 1 refused (handshake-timeout): no TLS at 127.0.0.1" in caplog.text


@pytest.mark.slow
def test_a_way_that_takes_nothing_while_the_other_goes_on_is_given_up(keys):
    """Node 1 is heard all the while, so it is not silent; but nothing gets to it."""
    timing = replace(QUICK, patience=60.0, stall=0.8)

    async def work():
        async with Neighborhood(nx.star_graph(2), keys, timing=timing) as world:
            networks, diaries = await opened(world)
            world.way(0, 1).stall()
            for step in range(3):
                networks[0].send(1, replace(model(4_000_000), step=step))
            await until(lambda: diaries[0].downs == [1])
            assert networks[0].counters()["peers"][1]["breaks"] == {"stalled": 1}
            # The first had been begun; the third, at least, had not.
            assert [m.step for m in diaries[0].dropped][-1:] == [2]
            assert diaries[1].messages == []
            world.proxy(0, 1).heal()
            await until(lambda: networks[1].up and networks[0].up == (1, 2))
            networks[0].send(1, model(5))
            await until(lambda: diaries[1].messages)
            assert len(diaries[1].messages[-1][1].payload) == 5
            assert diaries[2].downs == []

    run(work())


def test_a_link_that_is_delayed(keys):
    async def work():
        async with Neighborhood(nx.path_graph(2), keys, timing=QUICK) as world:
            for way in (world.way(0, 1), world.way(1, 0)):
                way.delay = 0.1
            networks, diaries = await opened(world)
            diaries[1].on_message = lambda source, message: networks[1].send(source, message)
            began = asyncio.get_running_loop().time()
            for step in range(10):
                networks[0].send(1, replace(model(5_000), step=step))
            await until(lambda: diaries[0].messages)
            assert asyncio.get_running_loop().time() - began >= 0.2
            await until(lambda: len(diaries[0].messages) == 10)
            assert [m.step for _, m in diaries[0].messages] == list(range(10))
            assert diaries[0].downs == diaries[1].downs == []
            assert networks[0].counters()["refused"] == {}

    run(work())


# --- two halves -----------------------------------------------------------------------------------

SIZE = 8


class Group:
    """Pumps on all networks of a neighborhood; node i adds i-th unit vectors to its model."""

    def __init__(self, world: Neighborhood, algorithm, seconds: float) -> None:
        self.lines: list[str] = []
        self.networks = [world.network(node) for node in world.graph]
        clock = LoopClock(asyncio.get_running_loop())
        self.pumps = [
            Pump(
                algorithm,
                make_site(topology=world.graph, initial=np.zeros(SIZE, np.float32), node=node),
                self.networks[node],
                Steady(node, seconds, self._train),
                clock,
                self.lines.append,
            )
            for node in world.graph
        ]
        self.running = asyncio.ensure_future(asyncio.sleep(0))

    @staticmethod
    def _train(node, round, vector):
        vector[node] += 1
        return vector

    async def open(self) -> None:
        for pump, network in reversed(list(zip(self.pumps, self.networks, strict=True))):
            pump.start(patience=20 * SECOND)
            await network.open(pump)  # whoever is dialed is there by then
        await self.running
        segment = Segment(last_round=10**6)
        self.running = asyncio.gather(*(pump.run(segment) for pump in self.pumps))
        await until(lambda: min(self.trained) > 3)

    async def close(self) -> None:
        for pump in self.pumps:
            pump.stop("the run has ended")
            pump.check()
        await self.running

    @property
    def trained(self) -> list[int]:
        return [pump.accounts.trained for pump in self.pumps]

    def count(self, name: str) -> int:
        return sum(pump.accounts.tallies[name].count for pump in self.pumps)

    def check_order(self) -> None:
        """Each message came no more often than it was sent, and none after a later one.

        After a break D-PSGD sends once more what may have been lost; if it was not, it has no use.
        """
        last: defaultdict[tuple[str, str, str], int] = defaultdict(lambda: -1)
        sent: Counter[tuple[str, str, str]] = Counter()
        came: Counter[tuple[str, str, str]] = Counter()
        for line in self.lines:
            _, node, rest = line.split(" ", 2)
            event, _, commands = rest.partition(" -> ")
            for to, text in re.findall(r"Send\(to=(\d+) ([^()]*)\)", commands):
                sent[node, f"n{to}", text] += 1
            if match := re.fullmatch(r"Received source=(\d+) (kind=(\S+) step=(\d+).*)", event):
                source, text, kind, step = match.groups()
                letter = (f"n{source}", node, text)
                came[letter] += 1
                assert came[letter] <= sent[letter], line
                assert came[letter] == 1 or "-message" in commands, line
                assert int(step) >= last[node, source, kind], line
                last[node, source, kind] = int(step)
        assert came


def check_dpsgd(group: Group) -> None:
    """Each model is an average of sums of updates: of none is more there than was made."""
    for pump in group.pumps:
        for node, trained in enumerate(group.trained):
            assert pump.machine.model[node] <= trained * (1 + 1e-4)
        assert not pump.machine.model[len(group.pumps) :].any()


def check_adpsgd(group: Group) -> None:
    """All models together hold every update once, but for exchanges that are under way."""
    machines = [pump.machine for pump in group.pumps]
    total = np.sum([machine.model for machine in machines], axis=0, dtype=np.float64)
    for host, machine in enumerate(machines):
        offers = dict(machine.pairing.doubts)
        if machine.pairing.offer is not None:
            offers[machine.pairing.peer] = machine.pairing.offer
        for inviter, offer in offers.items():
            answer = machines[inviter].pairing.answers.get(host)
            if answer is not None and answer.exchange == offer.exchange:
                total += (answer.vector.astype(np.float64) - offer.vector) / 2
    made = np.zeros(SIZE)
    made[: len(machines)] = group.trained
    np.testing.assert_allclose(total, made, rtol=1e-3, atol=1e-3)


async def split(group: Group, world: Neighborhood, lasts: float, heals: float) -> None:
    """Part nodes 0 and 1 from 2 and 3: one link is cut, the other stalls. Then heal both."""
    cut, stalled = world.proxy(1, 2), world.proxy(0, 3)
    stalled.stall()
    await cut.cut()
    await until(lambda: [n.up for n in group.networks] == [(1,), (0,), (3,), (2,)], lasts)
    before = group.trained
    halves = [{"n0", "n1"}, {"n2", "n3"}]
    mark = len(group.lines)
    await until(lambda: all(now > was + 3 for now, was in zip(group.trained, before, strict=True)))
    for line in group.lines[mark:]:
        if match := re.match(r"\d+ (n\d) Received source=(\d)", line):
            assert {match[1], f"n{match[2]}"} in halves
    for network, peer in zip(group.networks, (3, 2, 1, 0), strict=True):
        assert sum(network.counters()["peers"][peer]["breaks"].values()) == 1
    cut.heal()
    stalled.heal()
    everybody = [(1, 3), (0, 2), (1, 3), (0, 2)]
    await until(lambda: [n.up for n in group.networks] == everybody, heals)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "check"),
    [(DPSGD(patience=2.0), check_dpsgd), (ADPSGD(), check_adpsgd)],
    ids=["dpsgd", "adpsgd"],
)
def test_two_halves_go_on_and_come_together_again(keys, algorithm, check):
    async def work():
        async with Neighborhood(RING, keys, timing=QUICK) as world:
            group = Group(world, algorithm, 0.02)
            await group.open()
            await split(group, world, 10.0, 10.0)
            healed, missing = group.trained, group.count("missing-neighbor")
            exchanges = group.count("staleness")
            await until(lambda: all(t > h + 20 for t, h in zip(group.trained, healed, strict=True)))
            # What one half has learned is in the models of the other.
            models = [pump.machine.model for pump in group.pumps]
            for here, there in itertools.product(range(4), range(4)):
                assert models[here][there] > 0.1 * group.trained[there] / 4
            if isinstance(algorithm, DPSGD):
                spread = max(group.trained) - min(group.trained)
                assert missing
                later = group.count("missing-neighbor")
                ahead = group.trained
                await until(lambda: min(group.trained) > max(ahead) + 20)
                assert group.count("missing-neighbor") == later
                assert max(group.trained) - min(group.trained) <= spread + 2
            else:
                assert group.count("staleness") > exchanges
            await group.close()
            check(group)
            group.check_order()

    run(work())


@pytest.mark.slow
def test_two_halves_apart_for_thirty_seconds_with_the_usual_timing(keys):
    """One link is silent for 20 s before it is given up; the other is reset, and dialed in vain."""

    async def apart(algorithm, check):
        async with Neighborhood(RING, keys) as world:
            group = Group(world, algorithm, 0.1)
            await group.open()
            loop = asyncio.get_running_loop()
            heals = loop.time() + 30
            world.proxy(0, 3).stall()
            await world.proxy(1, 2).cut()
            ups = [(1, 3), (0,), (3,), (0, 2)]
            await until(lambda: [n.up for n in group.networks] == ups, 5)  # as far as they know
            ups = [(1,), (0,), (3,), (2,)]
            await until(lambda: [n.up for n in group.networks] == ups, 27)
            assert group.networks[0].counters()["peers"][3]["breaks"] == {"silent": 1}
            before = group.trained
            await asyncio.sleep(heals - loop.time())
            assert all(now > was for now, was in zip(group.trained, before, strict=True))
            for proxy in world.between({0, 1}):
                proxy.heal()
            await until(lambda: all(len(network.up) == 2 for network in group.networks), 25)
            healed = group.trained
            await until(lambda: min(group.trained) > max(healed) + 20)
            await group.close()
            check(group)
            group.check_order()

    async def work():
        await asyncio.gather(apart(DPSGD(), check_dpsgd), apart(ADPSGD(), check_adpsgd))

    run(work(), seconds=120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_a_storm_of_troubles_passes(keys, seed):
    """Anything happens to any link at any time; in the end it is as if nothing had."""

    async def storm(algorithm, check, dice):
        async with Neighborhood(nx.complete_graph(4), keys, timing=QUICK) as world:
            group = Group(world, algorithm, 0.02)
            await group.open()
            loop = asyncio.get_running_loop()
            end = loop.time() + 10
            while loop.time() < end:
                await trouble(world, dice)
                await asyncio.sleep(0.3 * dice.random())
            for proxy in world.proxies.values():
                proxy.heal()
                proxy.there.delay = proxy.back.delay = 0.0
            for line in world.lines:
                line.bps = math.inf
            await until(lambda: all(len(network.up) == 3 for network in group.networks), 30)
            healed = group.trained
            await until(lambda: min(group.trained) > max(healed) + 20, 30)
            counters = [network.counters() for network in group.networks]
            assert min(each["reconnects"] for each in counters) > 0
            await group.close()
            check(group)
            group.check_order()

    async def work():
        await asyncio.gather(
            storm(DPSGD(patience=2.0), check_dpsgd, random.Random(seed)),
            storm(ADPSGD(), check_adpsgd, random.Random(seed + 100)),
        )

    run(work(), seconds=120)


async def trouble(world: Neighborhood, dice: random.Random) -> None:
    proxy = dice.choice(list(world.proxies.values()))
    match dice.choice(["cut", "stall", "half", "heal", "heal", "delay", "rate", "flap"]):
        case "cut":
            await proxy.cut()
        case "stall":
            proxy.stall()
        case "half":
            dice.choice([proxy.there, proxy.back]).stall()
        case "heal":
            proxy.heal()
        case "delay":
            proxy.there.delay, proxy.back.delay = (dice.choice([0, 0.01, 0.2]) for _ in range(2))
        case "rate":
            dice.choice(world.lines).bps = dice.choice([1e5, 1e6, 1e9])
        case "flap":
            for _ in range(5):
                await proxy.cut()
                proxy.heal()
                await asyncio.sleep(dice.choice([0, 0.001, 0.01]))


# --- nodes that move or are there twice -----------------------------------------------------------


def free_place() -> Address:
    return Address("127.0.0.1", *free_ports(1))


def test_a_node_that_returns_on_another_port_reaches_whom_it_dials_and_nobody_else(keys, caplog):
    """The roster holds for a run's epoch: whoever has to dial node 1 tries on where it was."""

    async def work():
        async with Neighborhood(nx.path_graph(3), keys, timing=QUICK) as world:
            networks, diaries = await opened(world)
            await networks[1].close()
            await until(lambda: not networks[0].up and not networks[2].up)
            moved, diary = world.network(1, incarnation=2, listen=free_place()), Diary()
            await moved.open(diary)
            await until(lambda: moved.up == (2,) and networks[2].up == (1,))
            await until(lambda: networks[0].counters()["refused"].get("peer:closed-in-handshake"))
            assert networks[0].up == ()
            assert diary.ups == [2]
            moved.send(2, model(10))
            await until(lambda: diaries[2].messages)

    run(work())
    assert "node 1 refused (peer:closed-in-handshake)" in caplog.text


def test_who_answers_at_another_ones_port_is_refused(keys, caplog):
    """Node 2 has taken the port that node 1 had; its certificate says who it is."""

    async def work():
        async with Neighborhood(nx.path_graph(3), keys, timing=QUICK) as world:
            networks = [world.network(0), world.network(2, listen=world.place(1))]
            for network in networks:
                await network.open(Diary())
            await until(
                lambda: networks[0].counters()["refused"].get("certificate-of-another-index")
            )
            assert networks[0].up == networks[1].up == ()

    run(work())
    assert re.search(r"node 2 answers at 127.0.0.1:\d+, where node 1 should", caplog.text)


def test_a_new_epoch_tells_all_nodes_the_new_port(keys):
    """What is supported: a roster for the next segment. Who has another epoch is refused until."""

    async def work():
        async with Neighborhood(nx.path_graph(2), keys, timing=QUICK) as world:
            networks, _ = await opened(world)
            place = free_place()
            await networks[1].close()
            members = [
                replace(world.roster(0).members[0]),
                replace(world.roster(0).members[1], address=place),
            ]
            roster = Roster.of(members, [(0, 1)])
            said = networks[0].hello

            async def at(node, epoch):
                network = Network(
                    roster,
                    replace(said, index=node, epoch=epoch, incarnation=node + 1),
                    world.security(node),
                    Settings(limit=LIMIT, timing=QUICK),
                    Seeds(0).generator(node, "jitter"),
                )
                world.networks.append(network)
                await network.open(Diary())
                return network

            moved = await at(1, 1)
            late = await at(0, 0)
            await until(
                lambda: (
                    late.counters()["refused"].get("peer:other-epoch")
                    or late.counters()["refused"].get("other-epoch")
                )
            )
            assert late.up == moved.up == ()
            await late.close()
            now = await at(0, 1)
            await until(lambda: now.up == (1,) and moved.up == (0,))

    run(work())


# --- whole nodes ----------------------------------------------------------------------------------


class Whole:
    """A sidecar, and a thread that does as a client's process does: it orders, and trains."""

    def __init__(self, world: Neighborhood, index: int, listen: Address | None = None) -> None:
        self.index = index
        self._site = make_site(topology=world.graph, initial=np.zeros(SIZE, np.float32))
        self._order = Order(
            run="shaped",
            epoch=0,
            index=index,
            roster=world.roster(index),
            algorithm="adpsgd",
            version=installed()["adpsgd"].version,
            parameters={},
            layout=self._site.layout.hash,
            seed=1,
            until=10**6,
            lease=60.0,
        )
        self._socket = f"@flwr-decentral-shaped-{secrets.token_hex(4)}"
        self._sidecar = Sidecar(
            Options(
                socket=self._socket,
                address=world.place(index),
                listen=listen or world.place(index),
                security=world.security(index),
            )
        )

    async def open(self) -> None:
        self._serving = asyncio.ensure_future(self._sidecar.serve())
        blobs = [self._site.layout.pack(), self._site.initial.tobytes(), b""]
        do = {"order": self._order.to_json(), "allowed": 60.0}
        answer = await asyncio.to_thread(ask, self._socket, "order", blobs, **do)
        self._training = asyncio.ensure_future(asyncio.to_thread(self._train, answer["handoff"]))

    async def close(self) -> None:
        self._sidecar.stop()
        await self._serving
        if hasattr(self, "_training"):
            await self._training

    @property
    def network(self):
        return self._sidecar._status()["network"]

    @property
    def ups(self) -> list[int]:
        return [peer for peer, account in self.network["peers"].items() if account["up"]]

    @property
    def rounds(self) -> int:
        return self._sidecar._status()["counted"]["rounds"]

    def _train(self, handoff: str) -> None:
        with contextlib.suppress(RuntimeFault), Attachment(handoff, {}) as attachment:
            while (task := attachment.next()) is not None:
                time.sleep(0.02)
                task.output[:] = task.model
                task.output[self.index] += 1
                attachment.commit(task)


@LINUX
@pytest.mark.slow
def test_of_two_live_sidecars_with_one_certificate_the_newer_one_is_believed(keys, caplog):
    """Node 1 dials node 2, and is there twice. Node 0 dials where node 1 is in the roster."""

    async def work():
        async with Neighborhood(nx.complete_graph(3), keys) as world:
            oldest = Whole(world, 1, free_place())  # it is opened last
            nodes = [Whole(world, index) for index in range(3)]
            for node in nodes:
                await node.open()
            await until(lambda: all(len(node.ups) == 2 for node in nodes))
            twin = Whole(world, 1, free_place())
            await twin.open()
            zero, old, two = nodes
            await until(lambda: two.network["peers"][1]["breaks"].get("replaced"))
            await until(lambda: twin.ups == [2])
            # The old one calls again, is refused, and both say so.
            await until(lambda: two.network["refused"].get("older-incarnation"))
            await until(lambda: old.network["refused"].get("peer:older-incarnation"))
            before = [zero.rounds, two.rounds]
            await until(lambda: zero.rounds > before[0] + 10 and two.rounds > before[1] + 10)
            assert zero.network["peers"][2]["breaks"] == two.network["peers"][0]["breaks"] == {}
            assert two.network["peers"][1]["connected"] == 2
            assert two.network["peers"][1]["breaks"] == {"replaced": 1}
            # An older one that comes later changes nothing.
            await oldest.open()
            await until(lambda: oldest.network["refused"].get("peer:older-incarnation"))
            assert oldest.ups == []
            assert two.network["peers"][1]["connected"] == 2
            # Once the newest one has gone, an older one is welcome again.
            await twin.close()
            await until(lambda: two.network["peers"][1]["connected"] >= 3)
            for each in (oldest, *nodes):
                await each.close()

    run(work(), seconds=90)
    told = r"node 1 refused \(older-incarnation\): incarnation \d+ of node 1 comes after \d+"
    assert re.search(told, caplog.text)
    assert "node 2 refused (peer:older-incarnation): it says:" in caplog.text


@LINUX
@pytest.mark.slow
def test_two_live_sidecars_cannot_share_a_port(keys):
    async def work():
        async with Neighborhood(nx.path_graph(2), keys) as world:
            first, second = Whole(world, 1), Whole(world, 1)
            await first.open()
            with pytest.raises(ConfigurationError, match="cannot listen at 127.0.0.1:.*in use"):
                await second.open()
            for each in (first, second):
                await each.close()

    run(work())
