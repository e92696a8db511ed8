"""Whether virtual time says what real links do: the same scenarios by both clocks.

Nodes train for a fixed time per round and gossip for some seconds: once in virtual time, and
once for real, with pumps, networks and TLS, in one process. Their links go through proxies, which
let all that leaves a node go one bit after the other, and delay it. Printed are the rounds that all
nodes have done, the bytes that have arrived, and how old fragments were when they were used, by the
virtual clock and by the real one.

    python tests/bench/bench_prediction.py --seconds 20.5

Where a node is *told* its uplink (``uplink`` in a deployment), it sends one message at a time, as
in virtual time, and what waits can be dropped. Where it is not, each link finds out what the line
carries, and some messages for each neighbor are on their way at once and share the uplink: the
first neighbor's model then comes no sooner than the last one's, which costs D-PSGD rounds where one
uplink is slow, and fragments are somewhat older when they arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import numpy as np
from rich.console import Console
from rich.table import Table

from flwr_decentral.channel.clock import LoopClock
from flwr_decentral.channel.keys import make_keys
from flwr_decentral.channel.pump import Pump
from flwr_decentral.channel.rounds import Segment
from flwr_decentral.core import SECOND, Algorithm, Seeds, from_seconds
from flwr_decentral.core.conduct import Tally
from flwr_decentral.sim.engine import Engine
from flwr_decentral.sim.plan import Plan
from flwr_decentral.sim.scenario import Scenario
from flwr_decentral.sim.trainer import FunctionTrainer
from flwr_decentral.testing.shaped import Neighborhood, Steady
from flwr_decentral.testing.sites import make_site
from flwr_decentral_divshare import DivShare
from flwr_decentral_dpsgd import DPSGD

NODES = 5
SIZE = 12_500
"""Values of the model: 50 kB."""
FAST, SLOW = 2e6, 1e6
TRAINING = 0.6
"""Seconds of a round: DivShare fills a fast uplink, and D-PSGD waits 0.4 s for two models on it."""
HELD_UP = 0.003
"""Seconds that a timer has to be late, to be counted as held up."""
SCENARIOS = {
    "equal links": ([FAST] * NODES, 0.0),
    "one slow uplink": ([SLOW] + [FAST] * (NODES - 1), 0.0),
    "20 ms latency": ([FAST] * NODES, 0.02),
}
ALGORITHMS: dict[str, tuple[Algorithm, nx.Graph]] = {
    "dpsgd": (DPSGD(), nx.cycle_graph(NODES)),
    "divshare": (DivShare(), nx.complete_graph(NODES)),
}


@dataclass(frozen=True)
class Course:
    """What has come of a run on all nodes together: rounds, bytes, and the mean staleness.

    ``held`` is the share of the time for which the event loop was held up: by other work, mostly.
    """

    rounds: int
    nbytes: int
    staleness: float
    held: float = 0.0


def staleness(tallies: list[Tally]) -> float:
    count = sum(tally.count for tally in tallies)
    return sum(tally.total for tally in tallies) / count if count else math.nan


def learn(node: int, round: int, vector: np.ndarray) -> np.ndarray:
    """Take a step toward a point of the node's own."""
    return vector - np.float32(0.1) * (vector - np.float32(node))


def predict(algorithm: Algorithm, graph: nx.Graph, scenario: str, seconds: float) -> Course:
    """Run in virtual time."""
    uplinks, latency = SCENARIOS[scenario]
    world = {
        "network": {"uplink": uplinks, "latency": latency},
        "compute": {"seconds": TRAINING},
    }
    site = make_site(topology=graph, initial=np.zeros(SIZE, np.float32))
    plan = Plan(
        algorithm=algorithm,
        topology=site.topology,
        layout=site.layout,
        initial=site.initial,
        conditions=Scenario.from_mapping(world).resolve(len(graph), Seeds(0)),
        seeds=Seeds(0),
        ops=site.ops,
        duration=from_seconds(seconds),
    )
    engine = Engine(plan, FunctionTrainer(lambda task, x: learn(task.node, task.round, x)))
    engine.run()
    return Course(
        engine.trainings, engine.traffic.arrived, staleness([engine.tallies["staleness"]])
    )


async def observe(
    algorithm: Algorithm,
    graph: nx.Graph,
    scenario: str,
    seconds: float,
    keys: Path,
    *,
    told: bool = True,
) -> Course:
    """Run in real time."""
    uplinks, latency = SCENARIOS[scenario]
    async with Neighborhood(graph, keys) as world:
        clock = LoopClock(asyncio.get_running_loop())
        pumps = []
        for node in graph:
            network = world.network(node, uplink_bps=uplinks[node] if told else math.inf)
            site = make_site(topology=graph, initial=np.zeros(SIZE, np.float32), node=node)
            pump = Pump(algorithm, site, network, Steady(node, TRAINING, learn), clock)
            pumps.append(pump)
        for pump, network in reversed(list(zip(pumps, world.networks, strict=True))):
            await network.open(pump)  # whoever is dialed is there by then
        async with asyncio.timeout(30):
            while any(len(pump.up) < len(graph[node]) for node, pump in enumerate(pumps)):
                await asyncio.sleep(0.01)
        for node, bps in enumerate(uplinks):
            world.lines[node].bps = bps
        for a, b in graph.edges:
            world.way(a, b).delay = world.way(b, a).delay = latency
        end = clock.now() + from_seconds(seconds)
        for pump in pumps:
            pump.start()
        running = [asyncio.ensure_future(p.run(Segment(last_round=10**6))) for p in pumps]
        held = await hold_ups((end - clock.now()) / SECOND)
        course = Course(
            sum(pump.accounts.trained + pump.accounts.failed for pump in pumps),
            sum(pump.accounts.received for pump in pumps),
            staleness([pump.accounts.tallies["staleness"] for pump in pumps]),
            held,
        )
        for line in world.lines:
            line.bps = math.inf  # the end need not take long
        for pump in pumps:
            pump.stop("the run has ended")
        await asyncio.gather(*running)
        return course


async def hold_ups(seconds: float) -> float:
    """Sleep for some time; tell for what share of it this machine did not run the event loop."""
    loop = asyncio.get_running_loop()
    begin, held = loop.time(), 0.0
    while (left := begin + seconds - loop.time()) > 0:
        nap, now = min(left, 0.02), loop.time()
        await asyncio.sleep(nap)
        late = loop.time() - now - nap
        held += late if late > HELD_UP else 0.0
    return held / seconds


def compare(name: str, scenario: str, seconds: float, keys: Path, *, told: bool = True):
    """Run by both clocks; return what was predicted, and what was."""
    algorithm, graph = ALGORITHMS[name]
    predicted = predict(algorithm, graph, scenario, seconds)
    real = asyncio.run(observe(algorithm, graph, scenario, seconds, keys, told=told))
    return predicted, real


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.5)
    options = parser.parse_args()
    table = Table(
        title=f"{NODES} nodes, {options.seconds:g} s; load before: {os.getloadavg()[0]:.1f}"
    )
    for what in ("uplink", "scenario", "algorithm"):
        table.add_column(what)
    for what in ("rounds", "MB", "staleness"):
        table.add_column(f"{what}, virtual", justify="right")
        table.add_column("real", justify="right")
        if what != "staleness":
            table.add_column("of it", justify="right")
    table.add_column("held up", justify="right")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        make_keys(keys, NODES, 1)
        for told, scenario, name in itertools.product((True, False), SCENARIOS, ALGORITHMS):
            virtual, real = compare(name, scenario, options.seconds, keys, told=told)
            table.add_row(
                "told" if told else "not told",
                scenario,
                name,
                f"{virtual.rounds}",
                f"{real.rounds}",
                f"{real.rounds / virtual.rounds:.3f}",
                f"{virtual.nbytes / 1e6:.2f}",
                f"{real.nbytes / 1e6:.2f}",
                f"{real.nbytes / virtual.nbytes:.3f}",
                f"{virtual.staleness:.2f}",
                f"{real.staleness:.2f}",
                f"{real.held:.1%}",
            )
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main()
