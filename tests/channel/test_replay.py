"""Whatever happens in virtual time, the real pumps make the same of it, to the byte."""

from collections import Counter, defaultdict

import networkx as nx
import pytest

from flwr_decentral.channel.rounds import Segment
from flwr_decentral.core import SECOND, AlgorithmError
from flwr_decentral.testing import Cluster, Faults, Outage
from flwr_decentral.testing.replay import Replay
from flwr_decentral.testing.toys import Gossip, Lockstep

from . import virtual

ROUNDS = 8
ALGORITHMS = virtual.installed() | {
    "alarmed": virtual.Alarmed(),
    "filling": virtual.Filling(),
    "gossip": Gossip(),
    "lockstep": Lockstep(patience=2.5),
}
CASES = virtual.cases(ALGORITHMS)
WORLDS = {
    "calm": {},
    "slow-links": {
        "network": {"uplink": 4e3, "downlink": 6e3, "latency": 0.03},
        "compute": {"stragglers": 0.4, "slowdown": 3.0},
    },
    "storm": {
        "network": {"uplink": 9e3, "latency": "20 ms", "loss": 0.15},
        "compute": {"factors": [1, 1.7, 1, 0.6, 1]},
        "outages": [
            {"node": 1, "start": 2.5, "end": 4.25},
            {"node": 3, "start": 0, "end": 1.5},
            {"node": 1, "start": 5, "end": 5.5},
        ],
        "partitions": [{"groups": [[0, 1]], "start": 3, "end": 4.5}],
    },
}
"""A model of 40 values takes half a second on the slowest uplink."""


def world(name, graph):
    scenario = dict(WORLDS[name])
    if name == "storm":
        factors = scenario["compute"]["factors"]
        scenario["compute"] = {"factors": (factors * len(graph))[: len(graph)]}
    return scenario


def replay(algorithm, graph, lines, train):
    again = Replay(algorithm, virtual.sites(graph), train, Segment(last_round=ROUNDS))
    assert again.run(lines) == len(lines)
    return again


def matrix():
    """List (case, world): defaults on all topologies, each other choice on one. Most are slow."""
    shapes = Counter()
    for case, (algorithm, _) in CASES.items():
        default = algorithm == type(algorithm)() or case.startswith("lockstep")
        shapes[algorithm] += 1
        if not default and shapes[algorithm] > 1:
            continue
        for name in WORLDS:
            quick = shapes[algorithm] <= 2 if default else name == "storm"
            yield pytest.param(case, name, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("case", "name"), list(matrix()))
def test_both_runtimes_agree_to_the_byte(case, name):
    algorithm, graph = CASES[case]
    train = virtual.flaky if name == "storm" else virtual.learn
    engine, lines = virtual.run(
        algorithm, graph, rounds=ROUNDS, train=train, scenario=world(name, graph)
    )
    again = replay(algorithm, graph, lines, train)
    for pump, machine in zip(again.pumps, engine.machines, strict=True):
        assert pump.machine.model.tobytes() == machine.model.tobytes()
    assert summed(pump.accounts.tallies for pump in again.pumps) == pytest.approx(
        summed([engine.tallies])
    )
    assert sum(pump.accounts.received for pump in again.pumps) == engine.traffic.arrived
    ended = sum(pump.accounts.trained + pump.accounts.failed for pump in again.pumps)
    assert ended == engine.trainings


@pytest.mark.parametrize("runtime", ["engine", "cluster"])
def test_timers_of_a_node_that_returns_ring_in_the_order_in_which_they_were_due(runtime):
    algorithm, graph, back = virtual.Alarmed(), nx.path_graph(3), 8 * SECOND

    def train(node, round, seed, x):
        return virtual.learn(node, round, 0, x)

    if runtime == "engine":
        away = {"outages": [{"node": 1, "start": 4, "end": 8}]}
        lines = virtual.run(algorithm, graph, rounds=ROUNDS, train=train, scenario=away)[1]
    else:
        cluster = Cluster(
            algorithm,
            topology=graph,
            initial=virtual.sites(graph)[0].initial,
            train=lambda node, round, x: train(node, round, 0, x),
            rounds=ROUNDS,
            faults=Faults(outages=(Outage(1, 4 * SECOND, back),)),
        )
        lines = cluster.run().transcript
    rung = [line.partition("name=")[2] for line in lines if f"{back} n1 TimerFired" in line]
    assert rung == ["due-5", "due-6", "due-7", "due-8", "met-0", "met-2"]
    replay(algorithm, graph, lines, train)


def summed(tallies):
    """Add up tallies of several nodes; they are the same up to rounding."""
    totals = defaultdict(float)
    for each in tallies:
        for name, tally in each.items():
            for key, value in vars(tally).items():
                totals[name, key] += value
    return dict(totals)


# --- a difference is found ------------------------------------------------------------------------


def changed(lines, old, new):
    """Change the first line with ``old`` in it; return its number, and all lines."""
    number = next(number for number, line in enumerate(lines) if old in line)
    return number + 1, [*lines[:number], lines[number].replace(old, new), *lines[number + 1 :]]


@pytest.fixture(scope="module")
def recorded():
    algorithm, graph = CASES["lockstep-ring"]
    return algorithm, graph, virtual.run(algorithm, graph, rounds=ROUNDS)[1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Train(round=2 model=40:", "Train(round=2 model=41:"),
        ("TimerFired", "LinkIdle"),
        ("after=40:", "after=40:0"),
        ("Received source=5", "Received source=1"),
        ("SetTimer(name=patience at=None)", "SetTimer(name=patience at=1)"),
        ("n0 TrainDone", "n1 TrainDone"),
        ("reason='the run has ended'", "reason='no'"),
    ],
)
def test_any_change_to_a_transcript_is_told(recorded, old, new):
    algorithm, graph, lines = recorded
    if old == "TimerFired":
        lines = ["0 n0 Started up=1,5", "0 n0 TimerFired name=patience"]
        number = 1
    else:
        number, lines = changed(lines, old, new)
    with pytest.raises(AssertionError, match=rf"^line {number} "):
        replay(algorithm, graph, lines, virtual.learn)


def test_another_order_of_arrivals_is_told(recorded):
    algorithm, graph, lines = recorded
    last = next(n for n, line in enumerate(lines) if "Received" in line and "Train(" in line)
    node = lines[last].split()[1]
    first = next(n for n, line in enumerate(lines) if f" {node} Received" in line)
    swapped = [*lines[:first], lines[last], *lines[first + 1 : last], lines[first]]
    with pytest.raises(AssertionError, match=r"^line \d+ (differs|cannot be replayed)"):
        replay(algorithm, graph, swapped, virtual.learn)


@pytest.mark.parametrize("kind", ["seed", "train", "algorithm"])
def test_another_run_is_told(recorded, kind):
    algorithm, graph, lines = recorded
    sites = virtual.sites(graph, seed=int(kind == "seed"))
    train = virtual.flaky if kind == "train" else virtual.learn
    algorithm = Lockstep(patience=3) if kind == "algorithm" else algorithm
    with pytest.raises(AssertionError, match=r"^line \d+ differs"):
        Replay(algorithm, sites, train, Segment(last_round=ROUNDS)).run(lines)


def test_a_machine_that_raises_ends_the_replay(recorded):
    graph = recorded[1]

    class Broken(Gossip):
        def machine(self, site):
            raise_ = {"on_train_done": lambda self, event: 1 / 0}
            machine = super().machine(site)
            machine.__class__ = type("Broken", (type(machine),), raise_)
            return machine

    with pytest.raises(AlgorithmError, match="gossip failed on node 0 at .*ZeroDivisionError"):
        replay(Broken(), graph, virtual.run(Gossip(), graph, rounds=2)[1], virtual.learn)
