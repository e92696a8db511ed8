"""The paper's algorithm, line by line, and its invariants."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    MILLISECOND,
    SECOND,
    ConfigurationError,
    DropQueued,
    Message,
    Received,
    Report,
    Send,
    Started,
    Train,
    TrainDone,
    TrainFailed,
)
from flwr_decentral.testing import Cluster, Faults, make_site
from flwr_decentral_swift import SWIFT

STAR = nx.star_graph(2)  # node 0 has the neighbors 1 and 2; every weight is a third


def vector(*values):
    return np.array(values, np.float32)


def started(graph=STAR, node=0, up=None, initial=(0, 0), **parameters):
    site = make_site(topology=graph, initial=vector(*initial), node=node)
    machine = SWIFT(**parameters).machine(site)
    machine.step(Started(at=0, up=site.neighbors if up is None else up))
    return machine


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def train(machine, number, *after, at=0):
    event = TrainDone(at=at, round=number, before=machine.model, after=vector(*after))
    return machine.step(event)


def hear(machine, source, step, *values):
    message = Message(kind="model", step=step, payload=vector(*values))
    return machine.step(Received(at=0, source=source, message=message))


def test_a_round_trains_averages_adds_the_update_and_sends():
    machine = started(initial=(3, 0))
    hear(machine, 1, 1, 6, 9)
    hear(machine, 2, 1, 0, 3)
    commands = train(machine, 1, 4, 2)
    # (3 + 6 + 0) / 3 and (0 + 9 + 3) / 3, and an update of (1, 2).
    np.testing.assert_allclose(machine.model, [4, 6], rtol=2**-22)
    assert [type(each) for each in commands if not isinstance(each, Report)] == [
        DropQueued,
        Send,
        Send,
        Train,
    ]
    assert [send.to for send in of(Send, commands)] == [1, 2]
    for send in of(Send, commands):
        assert send.message.payload is of(Train, commands)[0].model
        assert send.message.step == 1
    assert of(Train, commands)[0].round == 2


def test_at_first_the_common_model_stands_for_every_neighbor():
    machine = started(initial=(3, 3))
    train(machine, 1, 6, 6)
    # The update is added in full, to an average of three equal models.
    np.testing.assert_allclose(machine.model, [6, 6], rtol=2**-22)
    train(machine, 2, 6, 6)
    np.testing.assert_allclose(machine.model, [4, 4], rtol=2**-22)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_averages_come_in_every_sth_round_and_models_in_each(every):
    machine = started(every=every)
    averages = []
    for number in range(1, 10):
        for peer in (1, 2):
            hear(machine, peer, number, number, number)
        commands = train(machine, number, *machine.model)
        assert len(of(Send, commands)) == 2
        if of(Report, commands):
            averages.append(number)
    assert averages == list(range(every, 10, every))


def test_without_an_average_the_trained_model_is_kept_to_the_bit():
    machine = started(every=2)
    train(machine, 1, 0.1, 0.3)
    np.testing.assert_array_equal(machine.model, vector(0.1, 0.3))
    alone = started(nx.empty_graph(1))
    train(alone, 1, 0.1, 0.3)
    np.testing.assert_array_equal(alone.model, vector(0.1, 0.3))


@pytest.mark.parametrize("memory", ["standard", "low"])
@pytest.mark.parametrize("missing", ["self", "boost"])
def test_s2_consensus_is_a_fixed_point(memory, missing):
    rng = np.random.default_rng(1)
    for _ in range(50):
        common = rng.normal(size=2).astype(np.float32)
        machine = started(initial=common, memory=memory, missing=missing)
        hear(machine, 2, 1, *common)
        train(machine, 1, *common)
        np.testing.assert_array_max_ulp(machine.model, common, maxulp=6)


def test_s3_all_silent_neighbors_stop_nobody():
    """With a memory the first model is averaged for ever; without, it is plain local training."""
    stored, fresh = started(initial=(9, 9)), started(initial=(9, 9), memory="low")
    for number in range(1, 30):
        for machine in (stored, fresh):
            commands = train(machine, number, *(machine.model - 1))
            assert of(Train, commands)[0].round == number + 1
            assert machine.waits_for == ()
    np.testing.assert_array_equal(fresh.model, [-20, -20])
    # x <- x / 3 + 2 * 9 / 3 - 1 settles at 7.5.
    np.testing.assert_allclose(stored.model, [7.5, 7.5], rtol=1e-6)


@pytest.mark.parametrize("arrival", [(3, 5), (5, 3)])
def test_s4_the_newest_wins_whenever_it_arrives(arrival):
    machine = started(nx.path_graph(2))
    first, second = (hear(machine, 1, step, step, step) for step in arrival)
    assert not first
    (report,) = second
    assert report == Report(name="superseded", nbytes=64 + 8)
    train(machine, 6, 0, 0)
    np.testing.assert_allclose(machine.model, [2.5, 2.5])
    # A model that has been used once is not wasted when a newer one comes.
    assert not hear(machine, 1, 7, 1, 1)


def cluster(graph, rounds, algorithm=None, **faults):
    n = len(graph)
    targets = np.random.default_rng(2).normal(size=(n, 3)).astype(np.float32)
    return Cluster(
        algorithm or SWIFT(),
        topology=graph,
        initial=np.zeros(3, np.float32),
        train=lambda node, _round, x: x + np.float32(0.1) * (targets[node] - x),
        rounds=rounds,
        faults=Faults(**faults),
    ).run()


@pytest.mark.parametrize("graph", [nx.cycle_graph(6), nx.star_graph(4), nx.path_graph(3)])
@pytest.mark.parametrize("every", [1, 2])
def test_s5_sends_are_degree_times_rounds(graph, every):
    done = cluster(graph, 10, SWIFT(every=every))
    for node in graph:
        mine = [sent for sent in done.sent if sent.src == node]
        assert len(mine) == 10 * graph.degree[node]


def test_s3_a_slow_neighbor_costs_nobody_time():
    done = cluster(nx.cycle_graph(6), 40, slow={2: 8.0})
    ends = {
        node: max(sent.at for sent in done.sent if sent.src == node) // SECOND for node in range(6)
    }
    assert ends == {0: 40, 1: 40, 2: 320, 3: 40, 4: 40, 5: 40}


def expectation(graph, start, events, seed):
    """Let nodes end rounds one at a time, uniformly at random; return how far the mean moves."""
    n = len(graph)
    machines = [started(graph, node, initial=start[node]) for node in range(n)]
    for node, machine in enumerate(machines):
        for peer in graph[node]:
            hear(machine, peer, 1, *start[peer])
    rng = np.random.default_rng(seed)
    number = [2] * n
    for node in rng.integers(n, size=events):
        machine = machines[node]
        commands = train(machine, number[node], *machine.model)
        number[node] += 1
        for send in of(Send, commands):
            machines[send.to].step(Received(at=0, source=node, message=send.message))
    return np.mean([machine.model for machine in machines], axis=0) - np.mean(start, axis=0)


@pytest.mark.slow
def test_s6_the_mean_is_kept_in_expectation_and_not_by_an_event():
    graph = nx.Graph([(0, 1), (0, 3), (0, 5), (1, 2), (2, 3), (2, 4), (2, 5), (3, 4), (4, 5)])
    start = np.random.default_rng(4).normal(size=(6, 2)).astype(np.float32)
    shifts = np.array([expectation(graph, start, 30, seed) for seed in range(60)])
    assert np.abs(shifts).max() > 0.1
    # 4 standard errors are exceeded once in 8,000 times by each of the two.
    errors = shifts.std(axis=0) / np.sqrt(len(shifts))
    assert (np.abs(shifts.mean(axis=0)) < 4 * errors).all()


def settled(influence):
    """Pull four nodes of a complete graph to 6, 0, 0 and 0, the first one 4 times less often."""
    targets = vector(6, 0, 0, 0)
    done = Cluster(
        SWIFT(influence=influence, window=4),
        topology=nx.complete_graph(4),
        initial=vector(1),
        train=lambda node, _round, x: x + np.float32(0.04) * (targets[node] - x),
        rounds=1000,
        faults=Faults(slow={0: 4.0}, uplink=MILLISECOND),
    ).run(until=200 * SECOND)
    return done.models[:, 0]


@pytest.mark.slow
def test_influence_decides_whether_all_nodes_count_alike_or_all_rounds():
    # Equal weights give a slow node's model more room, by as much as it trains less often.
    np.testing.assert_allclose(settled("uniform").mean(), 6 / 4, rtol=0.1)
    # Weights that keep the mean of all models count all rounds alike, one of 13 of the slow node.
    np.testing.assert_allclose(settled("measured").mean(), 6 / 13, rtol=0.15)


def test_failed_training_is_no_update_but_an_average():
    machine = started(initial=(3, 3))
    for peer in (1, 2):
        hear(machine, peer, 1, 6, 6)
    commands = machine.step(TrainFailed(at=0, round=1, reason="out of memory"))
    np.testing.assert_allclose(machine.model, [5, 5], rtol=2**-22)
    assert len(of(Send, commands)) == 2


@pytest.mark.parametrize(
    "parameters",
    [
        {"every": 0},
        {"window": 0},
        {"max_age": -1},
        {"influence": "equal"},
        {"memory": "none"},
        {"missing": "renormalize"},
        {"memory": "low", "max_age": 3},
    ],
)
def test_impossible_parameters_are_refused(parameters):
    with pytest.raises(ConfigurationError):
        SWIFT(**parameters)
