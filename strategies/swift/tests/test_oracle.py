"""The academic version: SWIFT with plain arrays, in the order in which rounds end."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import MILLISECOND, SECOND
from flwr_decentral.testing import Cluster, Faults
from flwr_decentral_swift import SWIFT

PACES = (1.0, 2.0, 1.5, 5.0, 1.0, 3.25)


def academic(graph, initial, train, rounds, every):
    """Let a model be on its way for the time that its place in the sender's queue takes."""
    n = len(graph)
    x = [initial.copy() for _ in range(n)]
    stored = [dict.fromkeys(graph[i], initial) for i in range(n)]
    step = [round(SECOND * PACES[i]) for i in range(n)]
    mail = []  # (when it arrives, from, to, model)
    ends = sorted((step[i] * t, i, t) for i in range(n) for t in range(1, rounds + 1))
    for now, i, t in ends:
        # Rounds come before arrivals of the same moment.
        for letter in sorted(m for m in mail if m[0] < now):
            _, j, k, model = letter
            stored[k][j] = model
        mail = [m for m in mail if m[0] >= now]
        y = train(i, t, x[i])
        mixed = x[i]
        if t % every == 0:
            weight = {j: 1 / (1 + max(graph.degree[i], graph.degree[j])) for j in sorted(graph[i])}
            weight[i] = 1 - sum(weight.values())
            terms = [
                np.float32(weight[j]) * (x[i] if j == i else stored[i][j]) for j in sorted(weight)
            ]
            mixed = terms[0]
            for term in terms[1:]:
                mixed = mixed + term
        # Where averaging moved nothing, training decides alone.
        x[i] = np.where(mixed == x[i], y, mixed + (y - x[i]))
        for place, j in enumerate(sorted(graph[i]), start=1):
            mail.append(Letter((now + place * MILLISECOND, i, j, x[i])))
    return np.stack(x)


class Letter(tuple):
    """A tuple that is ordered by all but its model."""

    __slots__ = ()

    def __lt__(self, other):
        return self[:3] < other[:3]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    "graph",
    [nx.cycle_graph(6), nx.star_graph(5), nx.gnp_random_graph(6, 0.6, seed=2), nx.path_graph(2)],
    ids=["ring", "star", "random", "pair"],
)
def test_run_of_unequal_nodes_equals_the_academic_version_to_the_bit(graph, every):
    initial = np.random.default_rng(5).normal(size=19).astype(np.float32)
    targets = np.random.default_rng(6).normal(size=(len(graph), 19)).astype(np.float32)

    def train(node, number, model):
        return model - np.float32(0.3 / number) * (model - targets[node])

    cluster = Cluster(
        SWIFT(every=every),
        topology=graph,
        initial=initial,
        train=train,
        rounds=12,
        faults=Faults(slow=dict(enumerate(PACES)), uplink=MILLISECOND),
    ).run()
    expected = academic(graph, initial, train, 12, every)
    np.testing.assert_array_equal(cluster.models, expected)
    assert set(cluster.counters) <= {"staleness", "superseded", "unused"}
