"""Whole runs of real algorithms: what holds for all of them, and what their course depends on."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import (
    PeerDown,
    PeerUp,
    Received,
    Send,
    Started,
    Stopped,
    Train,
    TrainDone,
    TrainFailed,
)
from flwr_decentral.sim.journal import Journal
from flwr_decentral.sim.trainer import FunctionTrainer
from flwr_decentral.testing.toys import Gossip
from flwr_decentral_divshare import DivShare
from flwr_decentral_dpsgd import DPSGD
from flwr_decentral_local import LocalOnly

from .scripted import add_one, make

ALGORITHMS = {
    "dpsgd": DPSGD(patience=2.5),
    "dpsgd-overlapped": DPSGD(order="combine-then-adapt", patience=0.75),
    "divshare": DivShare(fragments=3, degree=2),
    "divshare-unflushed": DivShare(fragments=2, degree=9, flush=False),
    "local": LocalOnly(),
}
DIVSHARE = ALGORITHMS["divshare"]
VARIED = {
    "graph": nx.cycle_graph(5),
    "rounds": 6,
    "factors": [1, 1, 2.5, 1, 0.7],
    "uplink": [3e3, None, 2e3, 9e3, 5e3],
    "downlink": [None, 4e3, 4e3, None, 8e3],
    "latency": 0.02,
    "loss": 0.1,
    "outages": [(1, 1.5, 3.25), (3, 0, 2)],
    "partitions": [([[0, 1]], 3, 5)],
    "size": 7,
}
"""A bit of everything: a whole model of 92 bytes is on the slowest uplink for 0.37 s."""


every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())


def learn(task, vector):
    """Train on noise that follows from the task's seed alone."""
    noise = np.random.default_rng(task.seed).normal(size=len(vector)).astype(np.float32)
    return vector - np.float32(0.3) * (vector - task.node) + np.float32(0.01) * noise


def varied(algorithm, **changes):
    return make(algorithm, **(VARIED | {"function": learn} | changes))


# --- what always holds ----------------------------------------------------------------------------


class Ledger(Journal):
    """Check the course of events as it happens, and add up what is asked for."""

    def __init__(self, nodes):
        super().__init__()
        self.asked = self.received = 0
        self.at = [-1] * nodes
        self.up = [None] * nodes
        self.training = [None] * nodes
        self.stopped = [False] * nodes
        self.trained = 0

    def event(self, node, event, commands):
        assert not self.stopped[node], "Stopped is the last event"
        assert (self.up[node] is None) == isinstance(event, Started), "Started is the first"
        assert event.at >= self.at[node], "time does not run backwards"
        self.at[node] = event.at
        match event:
            case Started():
                self.up[node] = set(event.up)
            case PeerUp():
                assert event.peer not in self.up[node]
                self.up[node].add(event.peer)
            case PeerDown():
                self.up[node].remove(event.peer)
            case Received():
                self.received += event.message.nbytes
            case TrainDone() | TrainFailed():
                assert event.round == self.training[node]
                self.training[node] = None
                self.trained += 1
            case Stopped():
                self.stopped[node] = True
                return
        for command in commands:
            if isinstance(command, Send):
                self.asked += command.message.nbytes
            if isinstance(command, Train):
                self.training[node] = command.round


def spans(what):
    end = st.none() | st.integers(1, 12)
    return st.tuples(what, st.integers(0, 12), end).map(
        lambda span: (span[0], span[1] / 4, None if span[2] is None else (span[1] + span[2]) / 4)
    )


@st.composite
def worlds(draw):
    nodes = draw(st.integers(1, 5))
    rates = st.lists(st.sampled_from([None, 2e3, 2e4]), min_size=nodes, max_size=nodes)
    latency = st.sampled_from([0, 0.25, 1.1])
    rows = st.lists(latency, min_size=nodes, max_size=nodes)
    graphs = [nx.complete_graph(nodes), nx.path_graph(nodes), nx.star_graph(nodes - 1)]
    group = st.lists(st.integers(0, nodes - 1), min_size=1, max_size=nodes - 1, unique=True)
    partitions = st.lists(spans(group.map(lambda members: [members])), max_size=2)
    return {
        "graph": draw(st.sampled_from(graphs)),
        "uplink": draw(rates),
        "downlink": draw(rates),
        "latency": draw(latency | st.lists(rows, min_size=nodes, max_size=nodes)),
        "loss": draw(st.sampled_from([0, 0.3])),
        "factors": draw(st.lists(st.sampled_from([0.5, 1, 3]), min_size=nodes, max_size=nodes)),
        "outages": draw(st.lists(spans(st.integers(0, nodes - 1)), max_size=3)),
        "partitions": draw(partitions) if nodes > 1 else [],
        "seed": draw(st.integers(0, 99)),
        **draw(st.sampled_from([{"rounds": 4}, {"duration": 3.5}, {"rounds": 6, "duration": 5}])),
    }


@every_algorithm
@settings(max_examples=60, deadline=None)
@given(world=worlds())
@pytest.mark.slow
def test_no_byte_is_unaccounted_for(algorithm, world):
    ledger = Ledger(len(world["graph"]))
    engine = make(algorithm, journal=ledger, **world)
    engine.run()
    traffic = engine.traffic
    assert traffic.sent == traffic.arrived + traffic.lost
    assert ledger.asked == traffic.sent + traffic.dropped
    assert ledger.received == traffic.arrived
    assert min(vars(traffic).values()) >= 0
    assert ledger.trained == engine.trainings
    assert ledger.stopped == [up is not None for up in ledger.up]
    assert [m.up for m in engine.machines] == [up or set() for up in ledger.up]
    assert 0 <= engine.idle_share <= 1
    if "duration" in world:
        assert engine.now <= world["duration"] * 1e9


@pytest.mark.parametrize("nodes", [1, 2, 3])
@every_algorithm
def test_few_nodes_do(algorithm, nodes):
    engine = make(algorithm, nodes, rounds=5, latency=0.01)
    engine.run()
    assert engine.trainings == 5 * nodes
    expected = gossiped(5, nodes - 1) if isinstance(algorithm, DivShare) else 5
    assert np.stack(engine.models()) == pytest.approx(np.full((nodes, 3), expected))


def gossiped(rounds, peers):
    """Compute the model of nodes that add one each round and average it with last round's."""
    model, last = 0.0, None
    for _ in range(rounds):
        trained = model + 1
        model = trained if last is None else (trained + peers * last) / (1 + peers)
        last = trained
    return model


@every_algorithm
@pytest.mark.parametrize("uplink", [None, 1e3])
def test_rounds_that_take_no_time_come_to_an_end(algorithm, uplink):
    engine = make(algorithm, nodes=3, rounds=5, seconds=0, uplink=uplink)
    engine.run()
    assert engine.trainings == 15
    if uplink is None or isinstance(algorithm, LocalOnly):
        assert engine.now == 0


def test_lockstep_does_not_depend_on_how_long_anything_takes():
    def models(**scenario):
        engine = make(
            DPSGD(), graph=nx.cycle_graph(5), rounds=4, size=5, function=learn, **scenario
        )
        engine.run()
        return np.stack(engine.models())

    expected = models()
    for scenario in (
        {"seconds": 0},
        {"factors": [1, 7, 0.1, 3, 2]},
        {"latency": 0.7, "uplink": 1e3},
        {"uplink": 2e3, "downlink": 1e3},
    ):
        np.testing.assert_array_equal(models(**scenario), expected)


@pytest.mark.slow
def test_thousands_of_nodes():
    nodes = 4096
    engine = make(Gossip(), graph=nx.cycle_graph(nodes), rounds=3, size=8, latency=0.1)
    engine.run()
    assert engine.trainings == 3 * nodes
    assert engine.traffic.arrived == 2 * nodes * 2 * (64 + 32), "the last ones are under way"
    assert np.stack(engine.models()) == pytest.approx(np.full((nodes, 8), gossiped(3, 2)))


# --- what the course depends on -------------------------------------------------------------------


@dataclass
class Eager(FunctionTrainer):
    """Train as soon as a task is handed out."""

    done: dict = field(default_factory=dict)

    def dispatch(self, task, model):
        super().dispatch(task, model)
        self.done[task.node] = super().wait(task.node)

    def wait(self, node):
        return self.done.pop(node)


@dataclass
class Shuffled(Eager):
    """Train all that is in flight in an order of its own, when the first of it is due."""

    dice: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def dispatch(self, task, model):
        FunctionTrainer.dispatch(self, task, model)

    def wait(self, node):
        for other in self.dice.permutation(sorted(self.tasks)):
            self.done[other] = FunctionTrainer.wait(self, other)
        return self.done.pop(node)


def flaky(task, vector):
    if task.seed % 5 == 0:
        raise RuntimeError(f"seed {task.seed}")
    return learn(task, vector)


@every_algorithm
@pytest.mark.parametrize("function", [learn, flaky])
def test_the_order_in_which_the_trainer_works_changes_nothing(algorithm, function):
    engines = [
        varied(algorithm, trainer=kind(function)) for kind in (FunctionTrainer, Eager, Shuffled)
    ]
    digests = {engine.run() for engine in engines}
    assert len(digests) == 1
    assert engines[0].traffic == engines[1].traffic == engines[2].traffic
    failures = engines[0].tallies["training-failed"].count
    assert (failures > 0) == (function is flaky)


@every_algorithm
def test_the_seed_decides(algorithm):
    digests = [varied(algorithm, seed=seed).run() for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 5},
        {"latency": 0.021},
        {"loss": 0.2},
        {"factors": [1, 1, 2.5, 1, 0.71]},
        {"outages": [(1, 1.5, 3.5), (3, 0, 2)]},
        {"partitions": []},
        {"function": add_one},
    ],
    ids=lambda change: re.sub(r" at 0x\w+", "", str(change)),
)
def test_the_digest_tells_runs_apart(change):
    assert varied(DIVSHARE, **change).run() != varied(DIVSHARE).run()


def test_a_matrix_of_equal_latencies_is_one_latency():
    world = {"downlink": 8e3, "outages": [(1, 1.5, 3.25)]}
    matrix = [[0.02] * 5 for _ in range(5)]
    assert varied(DIVSHARE, **world).run() == varied(DIVSHARE, latency=matrix, **world).run()


def digests() -> list[str]:
    return [varied(algorithm).run() for algorithm in ALGORITHMS.values()]


@pytest.mark.parametrize("hash_seed", ["1", "2"])
@pytest.mark.slow
def test_the_digest_is_the_same_in_another_process(hash_seed):
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.sim.{Path(__file__).stem} import *; print(*digests())"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == digests()
