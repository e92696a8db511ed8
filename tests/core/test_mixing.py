import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import (
    ConfigurationError,
    metropolis_hastings,
    metropolis_weight,
    second_eigenvalue,
    spectral_gap,
    topology,
)


@st.composite
def graphs(draw):
    nodes = draw(st.integers(1, 24))
    p = draw(st.sampled_from([0.05, 0.2, 0.5, 1.0]))
    return nx.gnp_random_graph(nodes, p, seed=draw(st.integers(0, 2**31)))


def test_weights_of_a_chain_by_hand():
    third = 1 / 3
    expected = [[2 * third, third, 0], [third, third, third], [0, third, 2 * third]]
    np.testing.assert_allclose(metropolis_hastings(nx.path_graph(3)), expected, rtol=1e-15)


def test_weights_of_a_star_by_hand():
    expected = np.diag([0.25, 0.75, 0.75, 0.75])
    expected[0, 1:] = expected[1:, 0] = 0.25
    np.testing.assert_array_equal(metropolis_hastings(nx.star_graph(3)), expected)


def test_the_weight_of_an_edge_is_the_same_from_either_end():
    for a in range(1, 12):
        for b in range(1, 12):
            assert metropolis_weight(a, b) == metropolis_weight(b, a) == 1 / (1 + max(a, b))


@given(graphs())
@settings(max_examples=50, deadline=None)
def test_g1_symmetric_doubly_stochastic_with_a_positive_diagonal(graph):
    W = metropolis_hastings(graph)
    assert W.dtype == np.float64
    np.testing.assert_array_equal(W, W.T)
    np.testing.assert_allclose(W.sum(axis=0), 1.0, rtol=0, atol=1e-14)
    np.testing.assert_allclose(W.sum(axis=1), 1.0, rtol=0, atol=1e-14)
    most = max(degree for _, degree in graph.degree)
    assert W.diagonal().min() >= 1 / (1 + most) - 1e-15
    assert W.min() >= 0
    off = W - np.diag(W.diagonal())
    np.testing.assert_array_equal(off > 0, nx.to_numpy_array(graph) > 0)


@given(graphs(), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_g2_a_round_keeps_the_mean(graph, seed):
    x = np.random.default_rng(seed).normal(size=(len(graph), 5))
    after = metropolis_hastings(graph) @ x
    np.testing.assert_allclose(after.mean(axis=0), x.mean(axis=0), rtol=0, atol=1e-15 * len(x) * 4)


@given(graphs(), st.floats(1e-300, 1e300))
@settings(max_examples=50, deadline=None)
def test_g3_a_consensus_is_a_fixed_point(graph, value):
    x = np.full(len(graph), value)
    np.testing.assert_allclose(metropolis_hastings(graph) @ x, x, rtol=1e-14)


@given(graphs(), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_g4_a_round_contracts_by_the_second_eigenvalue(graph, seed):
    W = metropolis_hastings(graph)
    x = np.random.default_rng(seed).normal(size=len(graph))
    before, after = np.linalg.norm(x - x.mean()), np.linalg.norm(W @ x - x.mean())
    assert after <= second_eigenvalue(W) * before + 1e-12


@pytest.mark.parametrize(
    ("nodes", "eigenvalue", "rounds"),
    [(8, 0.80474, 32), (16, 0.94925, 133), (32, 0.98719, 536), (64, 0.99679, 2149)],
)
def test_g4_rings(nodes, eigenvalue, rounds):
    W = metropolis_hastings(topology.build("ring", nodes))
    found = second_eigenvalue(W)
    assert found == pytest.approx((1 + 2 * math.cos(2 * math.pi / nodes)) / 3, abs=1e-14)
    assert round(found, 5) == eigenvalue
    assert spectral_gap(W) == 1 - found
    assert math.ceil(math.log(1e-6) / (2 * math.log(found))) == rounds

    x = np.cos(2 * np.pi * np.arange(nodes) / nodes)  # the slowest mode of a ring
    start, distance, taken = x @ x, x @ x, 0
    while distance > 1e-6 * start:
        x = W @ x
        distance, taken = x @ x, taken + 1
    assert taken == rounds


def test_the_second_eigenvalue_may_be_the_most_negative_one():
    W = np.array([[0.1, 0.9], [0.9, 0.1]])
    assert second_eigenvalue(W) == pytest.approx(0.8)


@pytest.mark.parametrize("nodes", [1, 2, 3, 10])
def test_a_complete_graph_reaches_consensus_at_once(nodes):
    W = metropolis_hastings(nx.complete_graph(nodes))
    np.testing.assert_allclose(W, 1 / nodes, rtol=1e-14)
    assert second_eigenvalue(W) == pytest.approx(0.0, abs=1e-14)


def test_a_disconnected_graph_never_does():
    W = metropolis_hastings(topology.build("empty", 4))
    np.testing.assert_array_equal(W, np.eye(4))
    assert second_eigenvalue(W) == pytest.approx(1.0)


def test_node_order_in_the_graph_does_not_matter():
    graph = nx.Graph()
    graph.add_nodes_from([2, 0, 1])
    graph.add_edges_from([(2, 1), (1, 0)])
    np.testing.assert_array_equal(metropolis_hastings(graph), metropolis_hastings(nx.path_graph(3)))


def test_what_is_no_mixing_matrix_is_refused():
    with pytest.raises(ConfigurationError, match="node 1 has an edge to itself"):
        metropolis_hastings(nx.Graph([(0, 1), (1, 1)]))
    with pytest.raises(ValueError, match="not symmetric"):
        second_eigenvalue(np.array([[0.5, 0.5], [0.4, 0.6]]))
    with pytest.raises(ValueError, match="does not sum to 1"):
        second_eigenvalue(np.array([[0.5, 0.4], [0.4, 0.6]]))
