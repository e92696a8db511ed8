"""Two colors, or none: who starts exchanges, who waits, and what is refused."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import SECOND, ConfigurationError, Layout, Send, Train
from flwr_decentral.core.topology import build
from flwr_decentral.testing import Cluster, Faults, Outage
from flwr_decentral_adpsgd import ADPSGD

LAYOUT = Layout.of({"x": np.zeros(3, np.float32)})
DELAY = Faults(delay=(SECOND // 5, SECOND // 5), uplink=SECOND // 1000)


def run(graph, faults=DELAY, rounds=20, kind=Cluster, **parameters):
    cluster = kind(
        ADPSGD(**parameters),
        topology=graph,
        initial=np.zeros(3, np.float32),
        train=lambda node, number, model: model + np.float32(node),
        rounds=rounds,
        faults=faults,
    ).run()
    assert not cluster.stalled
    return cluster


@pytest.mark.parametrize("spec", ["ring", "complete", "small-world"])
def test_a_graph_with_an_odd_cycle_is_refused_where_nodes_wait(spec):
    graph = build(spec, 5)
    with pytest.raises(ConfigurationError, match=r"odd cycles.*scheme='free'") as error:
        ADPSGD(scheme="bipartite").check(graph, LAYOUT)
    assert "edge (" in str(error.value)
    assert not ADPSGD().check(graph, LAYOUT)


@pytest.mark.parametrize(
    ("spec", "n"), [("ring", 6), ("chain", 5), ("star", 7), ("grid", 12), ("hypercube", 8)]
)
def test_a_graph_of_two_colors_is_accepted(spec, n):
    assert not ADPSGD(scheme="bipartite").check(build(spec, n), LAYOUT)


def test_only_active_nodes_start_exchanges_one_after_each_round():
    cluster = run(nx.cycle_graph(6), scheme="bipartite")
    turns = {}
    for sent in cluster.sent:
        if sent.message.kind == "invite":
            turns.setdefault(sent.src, set()).add(sent.message.step)
    assert set(turns) == {1, 3, 5}
    assert all(steps == set(range(2, 22)) for steps in turns.values())


class Watch(Cluster):
    """Note when a node is asked to train, and when it has averaged."""

    def step(self, node, event):
        self.seen = getattr(self, "seen", [])
        commands = super().step(node, event)
        for command in commands:
            if isinstance(command, Train):
                self.seen.append((self.now, node, "train"))
            elif isinstance(command, Send) and command.message.kind == "answer":
                self.seen.append((self.now, node, "averaged"))
        return commands


def test_active_nodes_wait_for_their_exchange_and_passive_ones_never_do():
    # The answer to an invitation takes two delays, of 0.2 s each, and two ms on the uplinks.
    seen = run(nx.path_graph(2), kind=Watch, rounds=10, scheme="bipartite").seen
    passive = [at for at, node, what in seen if (node, what) == (0, "train")]
    assert passive == [number * SECOND for number in range(11)]
    active = [(at, what) for at, node, what in seen if node == 1]
    trained = [at for at, what in active if what == "train"]
    averaged = [at for at, what in active if what == "averaged"]
    assert averaged == trained[1:]
    gaps = np.diff(trained)
    # Once it found the other one still untrained, which is busy, at the same price.
    assert set(gaps.tolist()) == {SECOND + 2 * (SECOND // 5 + SECOND // 1000)}


def test_in_the_free_scheme_nobody_waits():
    seen = run(nx.cycle_graph(5), kind=Watch, rounds=10).seen
    for node in range(5):
        trained = [at for at, i, what in seen if (i, what) == (node, "train")]
        assert trained == [number * SECOND for number in range(11)]


@pytest.mark.parametrize(
    "faults",
    [Faults(drop=1.0), Faults(outages=(Outage(0, 3 * SECOND + SECOND // 10),)), Faults(drop=0.4)],
    ids=["silence", "gone", "loss"],
)
@pytest.mark.parametrize("graph", [nx.path_graph(2), nx.star_graph(4)], ids=["pair", "star"])
def test_an_active_node_waits_no_longer_than_its_patience(graph, faults):
    cluster = run(graph, faults, scheme="bipartite", patience=0.5)
    assert all(cluster.trained[node] == 20 for node in cluster.live)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("scheme", ["free", "bipartite"])
def test_few_nodes(n, scheme):
    cluster = run(nx.path_graph(n), scheme=scheme)
    assert cluster.trained == [20] * n
    assert bool(cluster.sent) == (n > 1)
    total = sum(20 * node for node in range(n))
    np.testing.assert_allclose(cluster.models.sum(axis=0), total, rtol=1e-5)


def test_the_center_of_a_star_serves_one_leaf_at_a_time():
    cluster = run(nx.star_graph(6), rate=2.0)
    kinds = [sent.message.kind for sent in cluster.sent]
    assert kinds.count("busy") > 0
    assert cluster.counters["staleness"].count > 40
    spread = cluster.models.max() - cluster.models.min()
    assert spread < 6 * 20 / 3  # they would be 120 apart without any exchange


def test_impossible_scheme_is_refused():
    with pytest.raises(ConfigurationError, match="did you mean 'bipartite'"):
        ADPSGD(scheme="bipartit")
