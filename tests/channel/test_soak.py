"""Many nodes that send fragments for a long time: nothing grows, and nothing is lost silently.

``SOAK_SECONDS`` in the environment shortens the longest one.
"""

import asyncio
import gc
import os
import resource
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.channel.clock import LoopClock
from flwr_decentral.channel.keys import make_keys
from flwr_decentral.channel.pump import Pump
from flwr_decentral.channel.rounds import Segment
from flwr_decentral.testing.shaped import Neighborhood, Steady
from flwr_decentral.testing.sites import make_site
from flwr_decentral_divshare import DivShare

pytestmark = pytest.mark.net

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Measure the bytes that this process has in memory."""
    return PAGE * int(Path("/proc/self/statm").read_text().split()[1])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def learn(node: int, round: int, vector: np.ndarray) -> np.ndarray:
    return vector - np.float32(0.1) * (vector - np.float32(node))


class Soak:
    """Networks and pumps of some nodes, and samples of what this process uses."""

    def __init__(self, graph, keys, *, size: int, training: float) -> None:
        self.graph, self.keys, self.size, self.training = graph, keys, size, training
        self.memory: list[int] = []
        self.tasks: list[int] = []
        self.descriptors: list[int] = []

    async def run(self, seconds: float) -> None:
        async with Neighborhood(self.graph, self.keys) as world:
            clock = LoopClock(asyncio.get_running_loop())
            self.networks = [world.network(node) for node in self.graph]
            sites = [
                make_site(topology=self.graph, initial=np.zeros(self.size, np.float32), node=node)
                for node in self.graph
            ]
            self.pumps = [
                Pump(DivShare(), site, network, Steady(site.node, self.training, learn), clock)
                for site, network in zip(sites, self.networks, strict=True)
            ]
            for pump, network in reversed(list(zip(self.pumps, self.networks, strict=True))):
                await network.open(pump)  # whoever is dialed is there by then
            async with asyncio.timeout(60):
                while any(len(pump.up) < len(self.graph[n]) for n, pump in enumerate(self.pumps)):
                    await asyncio.sleep(0.05)
            for pump in self.pumps:
                pump.start()
            segment = Segment(last_round=10**9)
            running = asyncio.gather(*(pump.run(segment) for pump in self.pumps))
            await self._watch(seconds)
            assert not running.done()
            for pump in self.pumps:
                pump.pause()
            await running
            await self._settle()
            for pump in self.pumps:
                pump.check()
            self.counters = [network.counters() for network in self.networks]
            for pump in self.pumps:
                pump.stop("the run has ended")

    async def _watch(self, seconds: float) -> None:
        """Let it go on; look at the first third as a time in which things find their size."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(left, seconds / 30))
            gc.collect()
            self.memory.append(resident())
            self.tasks.append(len(asyncio.all_tasks()))
            self.descriptors.append(descriptors())

    async def _settle(self) -> None:
        """Wait until all that was sent has arrived."""
        async with asyncio.timeout(60):
            # Who was training sends once more.
            while any(pump._rounds.training for pump in self.pumps):
                await asyncio.sleep(0.05)
            while any(self._under_way(network.counters()) for network in self.networks):
                await asyncio.sleep(0.05)

    @staticmethod
    def _under_way(counters) -> int:
        flying = sum(peer["in_flight_bytes"] for peer in counters["peers"].values())
        return counters["backlog"] + flying

    def early_and_late(self) -> tuple[float, float]:
        """Tell the memory after a third of the time, and at the end: the medians of five samples.

        One alone depends on what happens to be under way.
        """
        third = len(self.memory) // 3
        return median(self.memory[third - 2 : third + 3]), median(self.memory[-5:])

    def check(self) -> None:
        """Compare both ends of every link, and an early sample with the last."""
        for node, mine in enumerate(self.counters):
            assert mine["refused"] == {}
            assert mine["reconnects"] == mine["not_finite"] == 0
            for peer, account in mine["peers"].items():
                theirs = self.counters[peer]["peers"][node]
                assert account["sent"] == theirs["received"] > 0
                assert account["sent_bytes"] == theirs["received_bytes"]
                assert account["breaks"] == {}
                assert account["abandoned_bytes"] == 0
        for pump, mine in zip(self.pumps, self.counters, strict=True):
            counted = pump.metrics()
            # What the machine has asked for was sent, or dropped and counted as such.
            assert counted["bytes-sent"] == mine["sent_bytes"]
            assert counted["bytes-received"] == mine["received_bytes"]
            assert counted["failed-rounds"] == 0
            tallies = pump.accounts.tallies
            used = tallies["staleness"].count
            # Each fragment was used, or counted as one of no use: replaced, or there at the end.
            assert tallies.keys() <= {"staleness", "superseded", "unused"}
            assert used + tallies["superseded"].count + tallies["unused"].count == mine["received"]
        early, late = self.early_and_late()
        assert late <= 1.05 * early, [m >> 20 for m in self.memory]
        assert len(set(self.descriptors)) == 1
        assert max(self.tasks) == min(self.tasks)


def soak(folder, nodes: int, seconds: float, *, degree: int, size: int, training: float) -> None:
    make_keys(folder / "keys", nodes, 1)
    graph = nx.complete_graph(nodes)
    if degree < nodes - 1:
        graph = nx.random_regular_graph(degree, nodes, seed=0)
        graph = nx.convert_node_labels_to_integers(graph, ordering="sorted")
    trial = Soak(graph, folder / "keys", size=size, training=training)

    async def work() -> Counter[str]:
        await trial.run(seconds)
        for _ in range(100):  # transports of sockets that are closed end a turn later
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if not others:
                break
            await asyncio.sleep(0.01)
        return Counter(map(repr, others))

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each link has four sockets here
    gc.collect()
    before = descriptors()
    assert asyncio.run(work()) == Counter()
    assert descriptors() == before
    trial.check()
    rounds = [pump.accounts.trained for pump in trial.pumps]
    moved = sum(mine["received_bytes"] for mine in trial.counters)
    early, late = trial.early_and_late()
    sys.stdout.write(
        f"{nodes} nodes, {seconds:.0f} s: {min(rounds)} to {max(rounds)} rounds, "
        f"{moved / 1e6:.0f} MB in {sum(mine['received'] for mine in trial.counters):,} messages; "
        f"{early / 2**20:.1f} MiB after a third, {late / 2**20:.1f} MiB at the end\n"
    )


@pytest.mark.parametrize(
    "training",
    [pytest.param(0.5, marks=pytest.mark.slow), pytest.param(0.25, marks=pytest.mark.bench)],
)
def test_eight_nodes_for_a_minute(training, tmp_path):
    soak(tmp_path, 8, 60, degree=7, size=20_000, training=training)


@pytest.mark.bench
def test_sixty_four_nodes_for_ten_minutes(tmp_path):
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    soak(tmp_path, 64, seconds, degree=6, size=20_000, training=5.0)
