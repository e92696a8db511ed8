"""The invariants of gossip averaging, on one exact runtime of a dozen lines.

Averages are float32; what is claimed to a few ulp of float64 is checked with float64 arithmetic,
which the machine does not notice.
"""

from collections import deque

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import Layout, Received, Seeds, Send, Site, Started, Train, TrainDone
from flwr_decentral.ops import Reference
from flwr_decentral_dpsgd import DPSGD

GRAPHS = {
    "ring": nx.cycle_graph(8),
    "star": nx.star_graph(5),
    "path": nx.path_graph(5),
    "complete": nx.complete_graph(5),
    "random": nx.gnp_random_graph(12, 0.4, seed=3),
    "pair": nx.path_graph(2),
}
graphs = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())


class Float64(Reference):
    """The reference arithmetic without its rounding to float32."""

    def combine(self, vectors, weights, out=None):
        total = weights[0] * vectors[0]
        for vector, weight in zip(vectors[1:], weights[1:], strict=True):
            total += weight * vector
        return total


def run(algorithm, graph, train, rounds, ops=None, size=None):
    """Let all nodes train at once, then deliver everything, so many times; return all models."""
    ops = ops or Float64()
    size = size or len(graph)
    initial = np.zeros(size, np.float64 if isinstance(ops, Float64) else np.float32)
    layout = Layout.of({"x": np.zeros(size, np.float32)})
    machines = [
        algorithm.machine(
            Site(
                node=node,
                topology=graph,
                layout=layout,
                initial=initial,
                seeds=Seeds(0).of(node),
                ops=ops,
            )
        )
        for node in range(len(graph))
    ]
    mail, due = deque(), {}

    def step(node, event):
        for command in machines[node].step(event):
            if isinstance(command, Train):
                due[node] = command
            elif isinstance(command, Send):
                mail.append((command.to, node, command.message))

    def deliver():
        while mail:
            to, source, message = mail.popleft()
            step(to, Received(at=0, source=source, message=message))

    for node in graph:
        step(node, Started(at=0, up=tuple(sorted(graph[node]))))
    for number in range(1, rounds + 1):
        deliver()
        for node, command in sorted(due.items()):
            assert command.round == number
            after = train(node, number, command.model)
            step(node, TrainDone(at=0, round=number, before=command.model, after=after))
    deliver()
    assert {command.round for command in due.values()} == {rounds + 1}
    return np.stack([due[node].model for node in graph])


def starting_from(vectors):
    """Train nothing but the first time, and then to given vectors."""
    return lambda node, number, model: vectors[node] if number == 1 else model.copy()


def mixing_matrix(algorithm, graph):
    return run(algorithm, graph, starting_from(np.eye(len(graph))), 1)


@graphs
def test_g1_weights_are_symmetric_and_doubly_stochastic(graph):
    W = mixing_matrix(DPSGD(), graph)
    np.testing.assert_array_equal(W, W.T)
    np.testing.assert_allclose(W.sum(axis=0), 1, rtol=0, atol=1e-15 * len(graph))
    np.testing.assert_allclose(W.sum(axis=1), 1, rtol=0, atol=1e-15 * len(graph))
    largest = max(degree for _, degree in graph.degree)
    # The last weight is a rest, so it has the rounding errors of the sum.
    assert W.diagonal().min() >= 1 / (1 + largest) - 1e-15 * len(graph)
    for i, j in graph.edges:
        assert W[i, j] == 1 / (1 + max(graph.degree[i], graph.degree[j]))
    assert np.count_nonzero(W) <= len(graph) + 2 * graph.number_of_edges()


@graphs
def test_g2_averaging_keeps_the_mean(graph):
    start = np.random.default_rng(1).normal(size=(len(graph), 7))
    for rounds in (1, 2, 5):
        end = run(DPSGD(), graph, starting_from(start), rounds, size=7)
        np.testing.assert_allclose(
            end.mean(axis=0), start.mean(axis=0), rtol=0, atol=1e-15 * len(graph) * rounds
        )


@graphs
@pytest.mark.parametrize("average", ["metropolis", "plain"])
def test_g3_consensus_is_a_fixed_point(graph, average):
    common = np.random.default_rng(2).normal(size=7).astype(np.float32)
    start = np.tile(common, (len(graph), 1))
    end = run(DPSGD(average=average), graph, starting_from(start), 1, ops=Reference(), size=7)
    # Each weight, product and sum of a term rounds once, by at most half an ulp of the result.
    terms = 1 + max(degree for _, degree in graph.degree)
    np.testing.assert_array_max_ulp(end, start, maxulp=2 * terms)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "rate", "rounds"), [(8, 0.80474, 32), (16, 0.94925, 133)])
def test_g4_distance_to_the_mean_shrinks_by_the_second_eigenvalue(n, rate, rounds):
    ring = nx.cycle_graph(n)
    assert np.sort(np.abs(np.linalg.eigvalsh(mixing_matrix(DPSGD(), ring))))[-2] == pytest.approx(
        rate, abs=5e-6
    )
    slowest = np.cos(2 * np.pi * np.arange(n) / n)[:, None]
    squared = [
        np.square(run(DPSGD(), ring, starting_from(slowest), r, size=1)).sum()
        for r in (rounds - 1, rounds)
    ]
    assert squared[0] > 1e-6 * np.square(slowest).sum() >= squared[1]


def descend(targets, rate):
    """Take one gradient step on f_i(x) = (x - b_i)^2 / 2."""
    return lambda node, _round, model: model - rate * (model - targets[node])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "largest", "smallest", "digits"),
    [(16, 0.197123546108164, 0.006468560709749, 15), (4, 0.2673992674, 0.2197802198, 10)],
)
def test_g5_biased_fixed_point_on_quadratics(n, largest, smallest, digits):
    ring, rate, b = nx.cycle_graph(n), 0.1, np.eye(n)[0]
    x = run(DPSGD(), ring, descend(b[:, None], rate), 340, size=1)[:, 0]
    W = mixing_matrix(DPSGD(), ring)
    np.testing.assert_allclose(
        x, np.linalg.solve(np.eye(n) - (1 - rate) * W, rate * W @ b), rtol=0, atol=1e-15
    )
    assert x.max() == pytest.approx(largest, abs=0.6 * 10**-digits)
    assert x.min() == pytest.approx(smallest, abs=0.6 * 10**-digits)
    assert x.mean() == pytest.approx(1 / n, abs=1e-15)


def test_g5_biased_fixed_point_in_float32():
    b = np.eye(16, dtype=np.float32)[:, :1]
    x = run(DPSGD(), nx.cycle_graph(16), descend(b, np.float32(0.1)), 200, Reference(), size=1)
    # About 10 roundings a round, each of at most half an ulp of 0.2, and a factor of 0.9 a round.
    tolerance = 10 * 10 * 2**-25 * 0.25
    assert x.max() == pytest.approx(0.197123546108164, abs=tolerance)
    assert x.min() == pytest.approx(0.006468560709749, abs=tolerance)


@graphs
def test_orders_differ_in_whether_updates_are_averaged(graph):
    n = len(graph)
    x, u = np.random.default_rng(3).normal(size=(2, n, 5))

    def train(node, number, model):
        return x[node] if number == 1 else model + u[node]

    W = mixing_matrix(DPSGD(), graph)
    adapt = run(DPSGD(order="adapt-then-combine"), graph, train, 2, size=5)
    np.testing.assert_allclose(adapt, W @ (W @ x + u), atol=1e-14)
    # Round 1 averages the initial zeros, so round 2 starts from x.
    combine = run(DPSGD(order="combine-then-adapt"), graph, train, 2, size=5)
    np.testing.assert_allclose(combine, W @ x + u, atol=1e-14)


@graphs
def test_plain_average_gives_all_messages_the_same_weight(graph):
    W = mixing_matrix(DPSGD(average="plain"), graph)
    adjacency = nx.to_numpy_array(graph) + np.eye(len(graph))
    np.testing.assert_allclose(W, adjacency / adjacency.sum(axis=1, keepdims=True), atol=1e-15)


@pytest.mark.parametrize("average", ["metropolis", "plain"])
def test_all_models_of_a_complete_graph_are_equal_to_the_bit(average):
    start = np.random.default_rng(4).normal(size=(7, 33)).astype(np.float32)
    graph = nx.complete_graph(7)
    end = run(DPSGD(average=average), graph, starting_from(start), 1, Reference(), size=33)
    np.testing.assert_array_equal(end, np.tile(end[0], (7, 1)))


@pytest.mark.parametrize("order", ["adapt-then-combine", "combine-then-adapt"])
def test_one_node_alone_only_trains(order):
    alone = nx.empty_graph(1)
    trained = []

    def train(_node, number, model):
        trained.append(model + np.float32(0.1) * np.float32(number))
        return trained[-1]

    end = run(DPSGD(order=order), alone, train, 3, Reference(), size=4)
    np.testing.assert_array_equal(end[0], trained[-1])
