"""Loss costs time and changes no bit; a round takes place among the nodes that are there."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import SECOND
from flwr_decentral.testing import Cluster, Faults, Outage, Split
from flwr_decentral_allreduce import AllReduce

N = 5
TARGETS = np.random.default_rng(3).normal(size=(N, 11)).astype(np.float32)
RING, COMPLETE = nx.cycle_graph(N), nx.complete_graph(N)


def pull(node, _round, model):
    return model + np.float32(0.8) * (TARGETS[node] - model)


def run(graph=RING, rounds=12, **faults):
    cluster = Cluster(
        AllReduce(),
        topology=graph,
        initial=np.zeros(11, np.float32),
        train=pull,
        rounds=rounds,
        faults=Faults(**faults),
    ).run()
    assert not cluster.stalled
    return cluster


def seconds(number):
    return round(number * SECOND)


def distinct(cluster, nodes):
    return len({cluster.models[node].tobytes() for node in nodes})


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        {"drop": 0.05},
        {"drop": 0.3},
        {"corrupt": 0.2},
        {"duplicate": 0.5, "echo": 2 * SECOND},
        {"reorder": True},
        {"delay": (0, 3 * SECOND)},
        {"slow": {1: 5.0}},
        {"drop": 0.1, "corrupt": 0.1, "duplicate": 0.1, "reorder": True},
    ],
    ids=lambda faults: "-".join(faults),
)
def test_no_fault_of_a_link_changes_a_bit(faults):
    calm, harried = run(rounds=8), run(rounds=8, **faults)
    np.testing.assert_array_equal(harried.models, calm.models)
    assert harried.trained == [8] * N
    assert not {"missing-mean", "absent-contribution"} & set(harried.counters)


def test_a_calm_run_sends_nothing_but_sums_and_means_and_asks_for_nothing():
    cluster = run()
    assert {sent.message.kind for sent in cluster.sent} == {"sum", "mean"}
    assert not cluster.counters


def test_a_slow_node_is_asked_for_ever_less_often():
    cluster = run(slow={1: 100.0}, rounds=2)
    asked = [sent for sent in cluster.sent if sent.message.payload is None]
    # Four nodes wait for some 99 s twice, each for five chunks at most: after 1, 3, 7, 15, 31 s ...
    assert 0 < len(asked) <= 2 * 10 * 4 * 5
    assert cluster.counters["duplicate-message"].count == 0


@pytest.mark.parametrize(
    ("graph", "at"),
    [(RING, 5.3), (RING, 6.03), (COMPLETE, 6.05)],
    ids=["while-training", "in-the-midst", "complete"],
)
def test_who_remains_goes_on_with_the_exact_average_of_who_remains(graph, at):
    cluster = run(graph, rounds=24, outages=(Outage(1, seconds(at)),))
    live = [0, 2, 3, 4]
    assert [cluster.trained[node] for node in live] == [24] * 4
    assert distinct(cluster, live) == 1
    # Averages of pulls of four fifths end at the mean of the targets of those who remain.
    np.testing.assert_allclose(cluster.models[0], TARGETS[live].mean(axis=0), atol=1e-5)
    assert cluster.now <= 32 * SECOND


def test_the_parts_of_a_chain_go_on_by_themselves():
    cluster = run(nx.path_graph(N), rounds=24, outages=(Outage(2, seconds(5.3)),))
    for part in ([0, 1], [3, 4]):
        assert distinct(cluster, part) == 1
        np.testing.assert_allclose(cluster.models[part[0]], TARGETS[part].mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("graph", [RING, nx.path_graph(N)], ids=["ring", "chain"])
@pytest.mark.parametrize(
    "faults",
    [
        {"outages": (Outage(1, 0, seconds(10.3)),)},
        {"outages": (Outage(1, seconds(5.3), seconds(12.7)),)},
        {"partitions": (Split(seconds(3.5), seconds(13.5), frozenset({0, 1})),)},
        {
            "partitions": (Split(seconds(3.5), seconds(13.5), frozenset({0, 1})),),
            "slow": {0: 2.0},
        },
    ],
    ids=["join", "return", "split", "split-apart"],
)
def test_who_comes_back_takes_over_the_model_and_is_part_of_the_average_again(graph, faults):
    cluster = run(graph, rounds=24, **faults)
    assert distinct(cluster, range(N)) == 1
    np.testing.assert_allclose(cluster.models[0], TARGETS.mean(axis=0), atol=1e-5)
    assert cluster.now <= 60 * SECOND


def test_who_comes_late_does_not_bring_an_old_model():
    def count(node, _round, model):
        return model + 1

    cluster = Cluster(
        AllReduce(), topology=RING, initial=np.zeros(6, np.float32), train=count,
        rounds=20, faults=Faults(outages=(Outage(1, 0, seconds(10.3)),)),
    ).run()  # fmt: skip
    # Each of the 20 rounds has added 1 to the model of all: nothing was averaged with a zero.
    np.testing.assert_allclose(cluster.models, 20, rtol=1e-6)


def test_churn_and_loss_together():
    cluster = run(
        rounds=20,
        drop=0.1,
        outages=(Outage(1, seconds(5.3), seconds(40)), Outage(4, seconds(8), seconds(30))),
    )
    assert distinct(cluster, range(N)) == 1


def test_a_network_that_delivers_nothing_costs_patience_and_says_so():
    cluster = Cluster(
        AllReduce(patience=20.0), topology=RING, initial=np.zeros(11, np.float32), train=pull,
        rounds=4, faults=Faults(drop=1.0),
    ).run()  # fmt: skip
    assert all(cluster.finished)
    assert 4 * 21 <= cluster.now / SECOND <= 4 * 23
    assert cluster.counters["missing-mean"].count == 4 * N * N
    alone = np.zeros(11, np.float32)
    for _ in range(4):
        alone = pull(3, 0, alone)
    np.testing.assert_array_equal(cluster.models[3], alone)
