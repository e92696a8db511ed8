"""The academic version: one process that adds up all models, and what follows from it."""

from functools import cache

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import HEADER_BYTES
from flwr_decentral.testing import Cluster
from flwr_decentral_allreduce import AllReduce
from flwr_decentral_allreduce.routes import OWNER, forests

SIZE = 83
GRAPHS = {
    "ring": nx.cycle_graph(7),
    "chain": nx.path_graph(5),
    "star": nx.star_graph(4),
    "complete": nx.complete_graph(6),
    "grid": nx.convert_node_labels_to_integers(nx.grid_2d_graph(3, 3)),
    "random": nx.gnp_random_graph(10, 0.4, seed=1),
    "pair": nx.path_graph(2),
    "alone": nx.empty_graph(1),
}
graphs = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())


@cache
def targets(n):
    return np.random.default_rng(6).normal(size=(n, SIZE)).astype(np.float32)


def problem(n):
    initial = np.random.default_rng(5).normal(size=SIZE).astype(np.float32)

    def train(node, number, model):
        return model - np.float32(0.3 / number) * (model - targets(n)[node])

    return initial, train


def run(graph, rounds=6, train=None, **parameters):
    initial, pull = problem(len(graph))
    return Cluster(
        AllReduce(**parameters),
        topology=graph,
        initial=initial,
        train=train or pull,
        rounds=rounds,
    ).run()


def added_up(parents, models):
    """Add models up along a tree, each node's terms in ascending order."""

    def total(node):
        terms = {child: total(child) for child, parent in enumerate(parents) if parent == node}
        terms[node] = models[node]
        result = None
        for each in sorted(terms):
            result = terms[each] if result is None else result + terms[each]
        return result

    return total(parents.index(OWNER))


def academic(graph, rounds, chunks=None):
    n = len(graph)
    x, train = problem(n)
    chunks = chunks or n
    bounds = [k * SIZE // chunks for k in range(chunks + 1)]
    trees = forests(n, frozenset((min(e), max(e)) for e in graph.edges), chunks)
    for t in range(1, rounds + 1):
        y = [train(i, t, x) for i in range(n)]
        parts = [
            added_up(tree.parents, [each[start:stop] for each in y]) * np.float32(1 / n)
            for tree, start, stop in zip(trees, bounds, bounds[1:], strict=False)
        ]
        x = np.concatenate(parts)
    return x


@graphs
@pytest.mark.parametrize("chunks", [0, 1, 4])
def test_every_node_equals_the_academic_version_to_the_bit(graph, chunks):
    cluster = run(graph, rounds=4, chunks=chunks)
    expected = academic(graph, 4, chunks)
    np.testing.assert_array_equal(cluster.models, np.tile(expected, (len(graph), 1)))
    assert not cluster.counters


def test_on_a_complete_graph_it_is_a_plain_loop_over_all_models():
    n = 6
    x, train = problem(n)
    for t in range(1, 5):
        y = [train(i, t, x) for i in range(n)]
        total = y[0]
        for each in y[1:]:
            total = total + each
        x = total * np.float32(1 / n)
    cluster = run(GRAPHS["complete"], rounds=4)
    np.testing.assert_array_equal(cluster.models, np.tile(x, (n, 1)))


@graphs
def test_the_average_is_exact_up_to_the_rounding_of_a_sum(graph):
    n = len(graph)
    x, train = problem(n)
    models = np.array([train(i, 1, x) for i in range(n)], np.float64)
    got = run(graph, rounds=1).models[0]
    # n-1 sums and a product, each off by half an ulp of at most the sum of all magnitudes.
    tolerance = (n + 1) * 2.0**-24 * np.abs(models).sum(axis=0) / n
    assert (np.abs(got - models.mean(axis=0)) <= tolerance).all()


def test_one_node_alone_only_trains():
    x, train = problem(1)
    for t in range(1, 7):
        x = train(0, t, x)
    cluster = run(GRAPHS["alone"])
    np.testing.assert_array_equal(cluster.models[0], x)
    assert not cluster.sent


@graphs
def test_bytes_are_those_of_an_all_reduce(graph):
    n, rounds = len(graph), 2
    cluster = run(graph, rounds=rounds)
    assert len(cluster.sent) == 2 * (n - 1) * n * rounds
    total = sum(sent.message.nbytes - HEADER_BYTES for sent in cluster.sent)
    assert total == rounds * 2 * (n - 1) * 4 * SIZE
    assert all(sent.message.kind in ("sum", "mean") for sent in cluster.sent)


@pytest.mark.parametrize("name", ["ring", "complete"])
def test_each_node_sends_as_much_as_the_others(name):
    graph, n = GRAPHS[name], len(GRAPHS[name])
    cluster = run(graph, rounds=1)
    for node in graph:
        mine = [sent.message for sent in cluster.sent if sent.src == node]
        assert len(mine) == 2 * (n - 1)
        # A chunk may have one value more than another.
        sent = sum(each.nbytes - HEADER_BYTES for each in mine)
        assert abs(sent - 2 * 4 * SIZE * (n - 1) / n) <= 4 * 2 * (n - 1)


@pytest.mark.slow
def test_equal_shares_of_the_data_equal_centralized_training():
    n, size, rate = 5, 12, 0.05
    rng = np.random.default_rng(7)
    inputs, outputs = rng.normal(size=(n, 20, size)), rng.normal(size=(n, 20))

    def gradient(x, a, b):
        return a.T @ (a @ x.astype(np.float64) - b) / len(b)

    def train(node, _round, x):
        return (x - rate * gradient(x, inputs[node], outputs[node])).astype(np.float32)

    cluster = Cluster(
        AllReduce(), topology=nx.cycle_graph(n), initial=np.zeros(size, np.float32),
        train=train, rounds=40,
    ).run()  # fmt: skip
    x = np.zeros(size)
    for _ in range(40):
        x = x - rate * gradient(x, inputs.reshape(-1, size), outputs.reshape(-1))
    np.testing.assert_allclose(cluster.models[0], x, rtol=1e-5, atol=1e-6)
    assert len({model.tobytes() for model in cluster.models}) == 1


@pytest.mark.parametrize("n", [2, 4, 8])
def test_equal_models_of_few_bits_are_averaged_without_any_rounding(n):
    def train(_node, _round, x):
        return np.round(x * 64 + 1).astype(np.float32) / 64

    x = np.zeros(5, np.float32)
    cluster = Cluster(
        AllReduce(), topology=nx.cycle_graph(n), initial=x, train=train, rounds=9
    ).run()
    for _ in range(9):
        x = train(0, 0, x)
    np.testing.assert_array_equal(cluster.models, np.tile(x, (n, 1)))
