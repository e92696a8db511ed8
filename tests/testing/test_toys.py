"""The toys are algorithms like any other."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import ConfigurationError
from flwr_decentral.testing import Cluster, Faults
from flwr_decentral.testing.conformance import AlgorithmConformance
from flwr_decentral.testing.problems import Targets
from flwr_decentral.testing.toys import Gossip, Lockstep


@pytest.mark.slow
class TestGossip(AlgorithmConformance):
    algorithm = Gossip()
    registered = False


@pytest.mark.slow
class TestLockstep(AlgorithmConformance):
    algorithm = Lockstep()
    registered = False


def run(algorithm, graph, **settings):
    problem = Targets(nodes=len(graph))
    settings = {"initial": problem.initial, "train": problem.train, "rounds": 8} | settings
    return Cluster(algorithm, topology=graph, **settings).run()


def test_lockstep_is_multiplication_with_a_matrix():
    graph = nx.cycle_graph(5)
    problem = Targets(nodes=5)
    average = (nx.to_numpy_array(graph) + np.eye(5)) / 3
    models = np.tile(problem.initial.astype(np.float64), (5, 1))
    for _ in range(8):
        models = average @ (0.9 * models + 0.1 * problem.points)
    for faults in (Faults(), Faults(delay=(0, 3 * 10**9)), Faults(slow={2: 4.0})):
        assert np.allclose(run(Lockstep(), graph, faults=faults).models, models, atol=1e-5)


def test_impatient_lockstep_goes_on_without_a_slow_neighbor():
    graph, faults = nx.path_graph(2), Faults(slow={1: 10.0})
    patient = run(Lockstep(), graph, faults=faults)
    impatient = run(Lockstep(patience=2.0), graph, faults=faults)
    assert patient.counters["lost-patience"].count == 0
    assert patient.trained == [8, 8]
    assert impatient.counters["lost-patience"].count > 0
    assert impatient.trained[0] == 8
    assert impatient.trained[1] < 8, "it skips the rounds that are over"


def test_gossip_waits_for_nobody():
    cluster = run(Gossip(), nx.path_graph(2), faults=Faults(slow={1: 100.0}))
    first = next(line for line in cluster.transcript if "n0 TrainDone round=8" in line)
    assert first.startswith("8000000000 ")


def test_lockstep_refuses_a_negative_patience():
    with pytest.raises(ConfigurationError, match="must be positive"):
        Lockstep(patience=-1)
