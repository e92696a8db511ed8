"""The academic version: DivShare's rounds with plain arrays, given who sent what to whom."""

from collections import defaultdict

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import MILLISECOND, SECOND
from flwr_decentral.testing import Cluster, Faults
from flwr_decentral_divshare import DivShare


def academic(n, initial, train, rounds, fragment_of, sent):
    """Let round t use what was sent in round t - 1: training takes longer than sending."""
    x, mail = [initial.copy() for _ in range(n)], {}
    for t in range(1, rounds + 1):
        y = [train(i, t, x[i]) for i in range(n)]
        for i in range(n):
            total, count = y[i].copy(), np.ones(len(initial), np.float32)
            for j, f in sorted(sent[t - 1, i]):
                held = fragment_of == f
                total[held] += mail[j][held]
                count[held] += 1
            x[i] = np.where(count > 1, total * (1 / count), y[i])
        mail = dict(enumerate(y))
    return np.stack(x)


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["rotation", "layerwise"])
@pytest.mark.parametrize(("n", "fragments", "degree"), [(6, 5, 2), (4, 1, 3), (5, 30, 6)])
def test_synchronous_run_equals_the_academic_version_to_the_bit(partition, n, fragments, degree):
    initial = np.random.default_rng(5).normal(size=83).astype(np.float32)
    targets = np.random.default_rng(6).normal(size=(n, 83)).astype(np.float32)

    def train(node, number, model):
        return model - np.float32(0.3 / number) * (model - targets[node])

    cluster = Cluster(
        DivShare(fragments=fragments, degree=degree, partition=partition),
        topology=nx.complete_graph(n),
        initial=initial,
        train=train,
        rounds=8,
        faults=Faults(uplink=MILLISECOND),
    ).run()

    fragment_of = cluster.machines[0].partition.fragment_of(np.arange(83))
    sent = defaultdict(list)
    for at, src, dst, message in cluster.sent:
        assert at // SECOND == message.step
        sent[message.step, dst].append((src, message.header["fragment"]))
    expected = academic(n, initial, train, 8, fragment_of, sent)
    np.testing.assert_array_equal(cluster.models, expected)
    assert set(cluster.counters) == {"staleness", "unused"}
    # What the last round sends is not averaged any more.
    assert cluster.counters["unused"].count == n * fragments * min(degree, n - 1)
    staleness = cluster.counters["staleness"]
    assert staleness.total == staleness.count
