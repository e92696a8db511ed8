import networkx as nx
import numpy as np

from flwr_decentral.core import Send, Started, Train, TrainDone, TrainFailed
from flwr_decentral.testing import Cluster, Faults, make_site
from flwr_decentral_local import LocalOnly


def train(node, number, model):
    return model + np.float32(node + 0.1 * number)


def test_every_model_is_what_its_own_training_makes_of_the_initial_one():
    initial = np.array([0.5, -1.5], np.float32)
    cluster = Cluster(
        LocalOnly(), topology=nx.empty_graph(3), initial=initial, train=train, rounds=5
    ).run()
    for node in range(3):
        model = initial
        for number in range(1, 6):
            model = train(node, number, model)
        np.testing.assert_array_equal(cluster.models[node], model)


def test_nothing_is_sent_on_any_graph():
    cluster = Cluster(
        LocalOnly(),
        topology=nx.complete_graph(4),
        initial=np.zeros(3, np.float32),
        train=train,
        rounds=3,
        faults=Faults(slow={1: 5.0}),
    ).run()
    assert cluster.finished == [True] * 4
    assert not cluster.sent
    assert not cluster.counters


def test_failed_training_is_a_round_without_steps():
    site = make_site(topology=nx.empty_graph(1), initial=np.ones(2, np.float32))
    machine = LocalOnly().machine(site)
    machine.step(Started(at=0, up=()))
    after = np.full(2, 3, np.float32)
    machine.step(TrainDone(at=1, round=1, before=machine.model, after=after))
    commands = machine.step(TrainFailed(at=2, round=2, reason="out of memory"))
    assert [command.round for command in commands if isinstance(command, Train)] == [3]
    assert not any(isinstance(command, Send) for command in commands)
    np.testing.assert_array_equal(machine.model, after)


def test_declares_that_it_does_not_communicate():
    algorithm = LocalOnly()
    assert not algorithm.capabilities.communicates
    assert algorithm.default_topology == "empty"
    assert algorithm.parameters == {}
