"""S1 and E9: the expected matrix is symmetric and doubly stochastic, on irregular graphs too."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import Received, Started, TrainDone, metropolis_hastings
from flwr_decentral.core.message import Message
from flwr_decentral.core.topology import build
from flwr_decentral.testing import make_site
from flwr_decentral_swift import SWIFT
from flwr_decentral_swift.weights import client_weight, complete

SMALLEST = nx.Graph([(0, 1), (0, 3), (0, 5), (1, 2), (2, 3), (2, 4), (2, 5), (3, 4), (4, 5)])


def connected():
    """Draw 300 random graphs of 12 nodes with 0.35 of all links, and keep the connected ones."""
    graphs = [nx.gnp_random_graph(12, 0.35, seed=seed) for seed in range(300)]
    return [graph for graph in graphs if nx.is_connected(graph)]


def ours(graph, influence=None):
    n = len(graph)
    p = np.full(n, 1 / n) if influence is None else influence
    w = np.zeros((n, n))
    for i, j in [*graph.edges, *((b, a) for a, b in graph.edges)]:
        w[i, j] = client_weight(graph.degree[i], graph.degree[j], p[j] / p[i])
    w[np.diag_indices(n)] = 1 - w.sum(axis=1)
    return w


def released(graph):
    """Communication coefficient selection, as the released code does it, seen from above.

    A node that has no neighbor of a higher degree gives 1 / (degree + 1) to all. The others take
    what those of a higher degree give them, offer an equal share of the rest to all others, and
    lower it to the least offer of a neighbor of the same degree; but that one does not learn of it.
    """
    w = np.zeros((len(graph), len(graph)))
    given = {}
    for degree in sorted({d for _, d in graph.degree}, reverse=True):
        level = [node for node in graph if graph.degree[node] == degree]
        offer, rest = {}, {}
        for node in level:
            higher = [j for j in graph[node] if graph.degree[j] > degree]
            for j in higher:
                w[node, j] = given[j]
            rest[node] = [j for j in graph[node] if graph.degree[j] <= degree]
            offer[node] = (1 - sum(w[node])) / (len(rest[node]) + 1)
        for node in level:
            tied = [j for j in rest[node] if graph.degree[j] == degree]
            listens = len(rest[node]) < degree
            least = min([offer[node], *(offer[j] for j in tied if listens)])
            given[node] = least
            for j in rest[node]:
                w[node, j] = least
    w[np.diag_indices(len(graph))] = 1 - w.sum(axis=1)
    return w


def is_symmetric(q):
    return np.allclose(q, q.T, rtol=0, atol=1e-12)


def test_e9_the_released_protocol_leaves_many_graphs_asymmetric():
    graphs = connected()
    lopsided = [graph for graph in graphs if not is_symmetric(released(graph))]
    assert (len(lopsided), len(graphs)) == (77, 269)
    w = released(SMALLEST)
    assert w[3, 4] == pytest.approx(0.25)
    assert w[4, 3] == pytest.approx(0.8 / 3)


def test_e9_ours_are_symmetric_on_all_of_them():
    for graph in connected():
        w = ours(graph)
        assert is_symmetric(w)
        assert (w >= 0).all()
        np.testing.assert_allclose(w, metropolis_hastings(graph), rtol=0, atol=1e-15)


@pytest.mark.parametrize("spec", ["ring", "complete", "torus", "hypercube", "random-regular"])
def test_on_regular_graphs_they_are_those_of_the_paper(spec):
    graph = build(spec, 16)
    np.testing.assert_allclose(ours(graph), released(graph), rtol=0, atol=1e-15)


def test_on_a_ring_of_cliques_the_released_protocol_is_symmetric_too():
    assert is_symmetric(released(nx.ring_of_cliques(4, 4)))


@pytest.mark.parametrize("graph", [SMALLEST, nx.star_graph(6), nx.path_graph(5)])
def test_s1_any_influence_gives_a_symmetric_doubly_stochastic_expectation(graph):
    n = len(graph)
    for seed in range(20):
        p = np.random.default_rng(seed).dirichlet(np.full(n, 0.5)) + 1e-3
        p /= p.sum()
        w = ours(graph, p)
        assert (w >= 0).all()
        np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-15 * n)
        # What happens to the models in one event: node i replaces its own with probability p_i.
        expected = np.eye(n) + p[:, None] * (w - np.eye(n))
        assert is_symmetric(expected)
        np.testing.assert_allclose(expected.sum(axis=0), 1, atol=1e-14)
        assert (
            w.diagonal() >= 1 / (np.array([graph.degree[i] for i in range(n)]) + 1) - 1e-15
        ).all()


def row(graph, node, algorithm, paces=None):
    """Ask a machine for its weights: let the models be unit vectors."""
    n = len(graph)
    unit = np.eye(n, dtype=np.float32)
    site = make_site(topology=graph, initial=unit[node], node=node)
    machine = algorithm.machine(site)
    machine.step(Started(at=0, up=site.neighbors))
    for peer in site.neighbors:
        header = {} if paces is None else {"pace": paces[peer]}
        message = Message(kind="model", step=1, payload=unit[peer], header=header)
        machine.step(Received(at=0, source=peer, message=message))
    at = 1 if paces is None else round(1e9 / paces[node])
    machine.step(TrainDone(at=at, round=1, before=machine.model, after=unit[node].copy()))
    return machine.model


@pytest.mark.parametrize("graph", [SMALLEST, nx.star_graph(4), nx.cycle_graph(5)])
def test_s1_machines_use_these_weights(graph):
    w = np.stack([row(graph, node, SWIFT()) for node in sorted(graph)])
    np.testing.assert_allclose(w, ours(graph), atol=1e-7)


def test_s1_machines_that_measure_use_those_of_their_paces():
    paces = np.array([1.0, 2.0, 0.5, 4.0, 1.0, 0.25])
    algorithm = SWIFT(influence="measured", window=1)
    w = np.stack([row(SMALLEST, node, algorithm, paces) for node in range(6)])
    np.testing.assert_allclose(w, ours(SMALLEST, paces / paces.sum()), atol=1e-6)
    assert is_symmetric(np.round(paces[:, None] * (w - np.eye(6)), 6))


def test_boost_raises_all_weights_by_one_factor():
    weights = {1: 0.25, 2: 0.25, 3: 0.1}
    left = complete(weights, {1}, boost=True)
    own = 1 - sum(left.values())
    # The released rule would give 0.25 and 0.40 times (1 + 1) / (3 + 1), and 1.3 in all if all
    # weights are raised to fill the place; here the shares of the two stay as 0.25 to 0.40.
    assert own / left[1] == pytest.approx(0.40 / 0.25)
    assert complete(weights, {1, 2, 3}, boost=True) == weights
    assert complete(weights, set(), boost=True) == {}
    assert complete(weights, {2}, boost=False) == {2: 0.25}
