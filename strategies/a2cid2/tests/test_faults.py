"""The sum rule on a network that does its worst, with all that machines do to cope."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import SECOND
from flwr_decentral.testing import Cluster, Faults, Outage, Split
from flwr_decentral_a2cid2 import A2CiD2

ROUNDS, SIZE = 25, 6
HEALED = {
    "calm": Faults(),
    "delay": Faults(delay=(SECOND // 4, SECOND)),
    "duplicates": Faults(duplicate=0.5, echo=2 * SECOND, reorder=True),
    "partition": Faults(partitions=(Split(3 * SECOND, 9 * SECOND, frozenset({0, 1, 2})),)),
    "outages": Faults(
        outages=(Outage(1, 3 * SECOND, 7 * SECOND), Outage(4, 5 * SECOND, 6 * SECOND)),
        delay=(0, SECOND // 2),
    ),
    "slow": Faults(slow={2: 4.0}, uplink=SECOND // 8),
}
LOSSY = {
    "loss": Faults(drop=0.1),
    "loss-and-delay": Faults(drop=0.3, delay=(0, SECOND)),
    "corruption": Faults(corrupt=0.2),
}


def update(node, number):
    return np.random.default_rng([node, number]).normal(size=SIZE).astype(np.float32)


def still_to_come(cluster):
    """Add up what hosts will have to add when they hear the answers that are kept for them."""
    missing = np.zeros(SIZE)
    for host, machine in enumerate(cluster.machines):
        offers = dict(machine.pairing.doubts)
        if machine.pairing.offer is not None:
            offers[machine.pairing.peer] = machine.pairing.offer
        for inviter, offer in offers.items():
            answer = cluster.machines[inviter].pairing.answers.get(host)
            if answer is not None and answer.exchange == offer.exchange:
                apart = answer.vector.astype(np.float64) - offer.vector
                missing += (0.5 + machine.alpha) * apart
    return missing


@pytest.mark.parametrize("name", [*HEALED, *LOSSY])
@pytest.mark.parametrize("graph", [nx.cycle_graph(8), nx.star_graph(5)], ids=["ring", "star"])
def test_a1_the_sum_of_models_and_momenta_is_that_of_all_updates_twice(graph, name):
    cluster = Cluster(
        A2CiD2(),
        topology=graph,
        initial=np.zeros(SIZE, np.float32),
        train=lambda node, number, model: model + update(node, number),
        rounds=ROUNDS,
        faults=(HEALED | LOSSY)[name],
    ).run()
    n = len(graph)
    assert cluster.trained == [ROUNDS] * n
    momenta = np.stack([machine.momentum for machine in cluster.machines])
    found = (cluster.models.astype(np.float64) + momenta).sum(axis=0) + still_to_come(cluster)
    total = 2 * np.sum(
        [update(i, r) for i in range(n) for r in range(1, ROUNDS + 1)], axis=0, dtype=np.float64
    )
    # About a dozen roundings per node and round, of numbers below 32, at half an ulp of 2^-19.
    np.testing.assert_allclose(found, total, rtol=0, atol=12 * n * ROUNDS * 2.0**-20 / 8)
    assert cluster.counters["staleness"].count > 10
    if name in HEALED:
        assert not still_to_come(cluster).any()
        assert "doubtful-exchange" not in cluster.counters or name in ("partition", "outages")
