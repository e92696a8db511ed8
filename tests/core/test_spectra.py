import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import topology
from flwr_decentral.core.spectra import exchange_rates, spectrum


def of(graph, rate=1.0):
    return spectrum(exchange_rates(graph, rate))


@pytest.mark.parametrize(
    ("n", "chi_1", "chi_2", "eta", "alpha_tilde", "gain"),
    [
        (4, 1.0000, 0.7500, 0.5774, 0.5774, 1.15),
        (8, 3.4142, 0.8750, 0.2893, 0.9877, 1.98),
        (16, 13.1371, 0.9375, 0.1425, 1.8717, 3.74),
        (32, 52.0434, 0.9688, 0.0704, 3.6648, 7.33),
        (64, 207.6725, 0.9844, 0.0350, 7.2624, 14.52),
    ],
)
def test_a7_rings(n, chi_1, chi_2, eta, alpha_tilde, gain):
    chi = of(nx.cycle_graph(n))
    assert chi.chi_1 == pytest.approx(1 / (1 - math.cos(2 * math.pi / n)), rel=1e-9)
    assert chi.chi_2 == pytest.approx((n - 1) / n, rel=1e-12)
    found = [chi.chi_1, chi.chi_2, chi.eta, chi.alpha_tilde]
    assert found == pytest.approx([chi_1, chi_2, eta, alpha_tilde], abs=0.6e-4)
    assert chi.gain == pytest.approx(gain, abs=0.6e-2)


@pytest.mark.parametrize(
    ("spec", "n", "chi_1", "chi_2", "eta", "alpha_tilde"),
    [
        ("star", 16, 1.875, 0.9375, 0.377, 0.707),
        ("chain", 16, 51.88, 1.0, 0.0694, 3.60),
        ("chain", 64, 830.1, 1.0, 0.0174, 14.41),
        ("exponential", 16, 1.75, 0.9571, None, None),
    ],
)
def test_a7_other_graphs(spec, n, chi_1, chi_2, eta, alpha_tilde):
    chi = of(topology.build(spec, n))
    assert chi.chi_1 == pytest.approx(chi_1, rel=1e-4)
    assert chi.chi_2 == pytest.approx(chi_2, rel=4e-4)
    if eta is not None:
        assert chi.eta == pytest.approx(eta, abs=0.6e-3)
        assert chi.alpha_tilde == pytest.approx(alpha_tilde, abs=0.6e-2)


@pytest.mark.parametrize(
    ("n", "chi_1", "chi_2", "eta", "alpha_tilde"),
    [
        (8, 1.5, 0.9637, 0.4159, 0.6238),
        (16, 2.0, 1.0097, 0.3519, 0.7037),
        (32, 2.5, 1.0229, 0.3127, 0.7817),
        (64, 3.0, 1.0241, 0.2853, 0.8558),
    ],
)
def test_a7_exponential_graphs_whose_longest_edges_count_twice(n, chi_1, chi_2, eta, alpha_tilde):
    rates = np.zeros((n, n))
    steps = [1 << k for k in range(int(math.log2(n)))]
    for node in range(n):
        for step in steps:
            for sign in (1, -1):
                rates[node, (node + sign * step) % n] += 1 / (2 * len(steps))
    chi = spectrum(rates)
    found = [chi.chi_1, chi.chi_2, chi.eta, chi.alpha_tilde]
    assert found == pytest.approx([chi_1, chi_2, eta, alpha_tilde], abs=0.6e-4)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_a7_nothing_is_gained_on_a_complete_graph(n):
    chi = of(nx.complete_graph(n))
    assert chi.chi_1 == pytest.approx((n - 1) / n)
    assert chi.chi_2 == pytest.approx((n - 1) / n)
    assert chi.eta == pytest.approx(n / (2 * (n - 1)))
    assert chi.alpha_tilde == pytest.approx(0.5)
    assert chi.gain == pytest.approx(1.0)


def test_a8_twice_the_rate():
    chi = of(nx.cycle_graph(16), rate=2.0)
    found = [chi.chi_1, chi.chi_2, chi.eta, chi.alpha_tilde]
    assert found == pytest.approx([6.5685, 0.46875, 0.2849, 1.8717], abs=1e-4)


@pytest.mark.parametrize("n", [1, 4])
def test_without_edges_there_is_no_consensus(n):
    chi = of(topology.build("empty", n))
    assert not chi.connected
    assert (chi.eta, chi.gain, chi.alpha_tilde) == (0.0, 1.0, 0.5)


def test_in_two_parts_there_is_no_consensus():
    graph = nx.disjoint_union(nx.cycle_graph(40), nx.cycle_graph(3))
    chi = of(graph)
    assert chi.chi_1 == math.inf
    assert chi.chi_2 == pytest.approx(39 / 40)
    assert (chi.eta, chi.alpha_tilde) == (0.0, 0.5)


def test_a_long_chain_is_still_connected():
    assert of(nx.path_graph(800)).connected


def test_rates_add_up_to_half_a_turn_for_each_node():
    graph = topology.build("star", 9)
    rates = exchange_rates(graph, 3.0)
    assert rates.sum() / 2 == pytest.approx(9 * 3.0 / 2)
    np.testing.assert_allclose(exchange_rates(nx.cycle_graph(7)).sum(axis=1), 1.0)


@given(st.integers(2, 12), st.integers(0, 2**31), st.floats(0.01, 100))
@settings(max_examples=40, deadline=None)
def test_by_definition_on_random_graphs(n, seed, rate):
    graph = nx.gnp_random_graph(n, 0.5, seed=seed)
    graph.add_edges_from(nx.path_graph(n).edges)
    rates = exchange_rates(graph, rate)
    laplacian = np.zeros((n, n))
    for i, j in graph.edges:
        e = np.eye(n)[i] - np.eye(n)[j]
        laplacian += rates[i, j] * np.outer(e, e)
    inverse = np.linalg.pinv(laplacian)
    worst = max(
        (np.eye(n)[i] - np.eye(n)[j]) @ inverse @ (np.eye(n)[i] - np.eye(n)[j]) / 2
        for i, j in graph.edges
    )
    chi = spectrum(rates)
    assert chi.chi_1 == pytest.approx(1 / np.linalg.eigvalsh(laplacian)[1], rel=1e-8)
    assert chi.chi_2 == pytest.approx(worst, rel=1e-8)
    assert chi.chi_2 <= chi.chi_1 * (1 + 1e-9)


@pytest.mark.parametrize(
    "rates", [[[0, 1], [0.5, 0]], [[1, 1], [1, 0]], [[0, -1], [-1, 0]]], ids=str
)
def test_what_are_no_rates_is_refused(rates):
    with pytest.raises(ValueError, match="symmetric"):
        spectrum(np.array(rates))
