"""The academic version: D-PSGD on one machine, as one would write it on a whiteboard."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.testing import Cluster
from flwr_decentral_dpsgd import DPSGD


def metropolis(graph):
    n = len(graph)
    W = np.zeros((n, n))
    for i, j in graph.edges:
        W[i, j] = W[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    for i in range(n):
        W[i, i] = 1 - sum(W[i, j] for j in sorted(graph[i]))
    return W


def academic(graph, x, train, rounds, overlap):
    W = metropolis(graph)
    n = len(graph)
    for t in range(1, rounds + 1):
        y = [train(i, t, x[i]) for i in range(n)]
        sent = x if overlap else y
        mixed = []
        for i in range(n):
            terms = [np.float32(W[i, j]) * sent[j] for j in sorted([i, *graph[i]])]
            total = terms[0]
            for term in terms[1:]:
                total = total + term
            mixed.append(total)
        x = [mixed[i] + (y[i] - x[i]) for i in range(n)] if overlap else mixed
    return np.stack(x)


@pytest.mark.parametrize("order", ["adapt-then-combine", "combine-then-adapt"])
@pytest.mark.parametrize(
    "graph",
    [nx.cycle_graph(6), nx.star_graph(4), nx.gnp_random_graph(10, 0.5, seed=1), nx.path_graph(2)],
    ids=["ring", "star", "random", "pair"],
)
def test_lockstep_run_equals_the_academic_version_to_the_bit(graph, order):
    initial = np.random.default_rng(5).normal(size=19).astype(np.float32)
    targets = np.random.default_rng(6).normal(size=(len(graph), 19)).astype(np.float32)

    def train(node, number, model):
        return model - np.float32(0.3 / number) * (model - targets[node])

    cluster = Cluster(
        DPSGD(order=order), topology=graph, initial=initial, train=train, rounds=12
    ).run()
    expected = academic(
        graph, [initial] * len(graph), train, 12, overlap=order == "combine-then-adapt"
    )
    np.testing.assert_array_equal(cluster.models, expected)
    assert not cluster.counters
