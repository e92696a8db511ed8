"""The ceiling of the comparisons on label-sorted digits: where decentralized algorithms want to be.

What is asserted leaves some slack to what was measured; the card lists the figures.
"""

import numpy as np
import pytest

from flwr_decentral.core.topology import build
from flwr_decentral.testing import Cluster
from flwr_decentral.testing.problems import Digits
from flwr_decentral_allreduce import AllReduce

NODES, WARM_UP = 20, 50


def accuracies(spec, rate, rounds=400, chunks=4):
    """Train one minibatch a round at a constant rate after a warm-up; return those of all nodes."""
    digits = Digits(nodes=NODES, shards=1, dealt=False, rate=1.0, steps=1)

    def train(node, number, model):
        step = digits.train(node, number, model) - model
        return model + np.float32(rate * min(1, number / WARM_UP)) * step

    cluster = Cluster(
        AllReduce(chunks=chunks),
        topology=build(spec, NODES),
        initial=digits.initial,
        train=train,
        rounds=rounds,
    ).run()
    return [digits.accuracy(model) for model in cluster.models]


@pytest.mark.slow
def test_e1_label_sorted_digits():
    each = accuracies("ring", 0.2, chunks=1)
    assert len(set(each)) == 1
    assert each[0] >= 0.94


@pytest.mark.slow
def test_e1_no_topology_and_no_number_of_chunks_makes_a_difference_but_rounding():
    ring = accuracies("ring", 0.2, rounds=40)[0]
    for spec, chunks in (("complete", 1), ("torus", 20)):
        assert accuracies(spec, 0.2, rounds=40, chunks=chunks)[0] == pytest.approx(ring, abs=0.01)
