"""When machines of pairwise exchanges take their turns, next to training."""

from dataclasses import dataclass

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    SECOND,
    ConfigurationError,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    SetTimer,
    Started,
    Stopped,
    TimerFired,
    Train,
    TrainDone,
    TrainFailed,
)
from flwr_decentral.core.pairwise import PairwiseAlgorithm, PairwiseMachine
from flwr_decentral.testing import Cluster, Faults, make_site


@dataclass(frozen=True, kw_only=True)
class Middle(PairwiseAlgorithm):
    name = "middle"

    def machine(self, site):
        return MiddleMachine(site, self)


class MiddleMachine(PairwiseMachine):
    def average(self, exchange, at):
        _, _, mine, theirs = exchange
        self.model = self.site.ops.pairwise(self.model, mine, theirs, 0.5)


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def vector(*values):
    return np.array(values, np.float32)


def node(graph=None, **parameters):
    site = make_site(topology=graph or nx.cycle_graph(4), initial=vector(0, 0), node=1)
    machine = Middle(**parameters).machine(site)
    machine.step(Started(at=0, up=site.neighbors))
    return machine


def train(machine, at, number=1, after=(1, 1)):
    event = TrainDone(at=at, round=number, before=machine.model, after=vector(*after))
    return machine.step(event)


def test_training_goes_on_and_the_first_turn_comes_after_the_first_round():
    machine = node()
    commands = train(machine, 2 * SECOND)
    (again,), (timer,) = of(Train, commands), of(SetTimer, commands)
    assert (again.round, again.model.tolist()) == (2, [1, 1])
    assert timer.at > 2 * SECOND
    assert machine.interval == 2 * SECOND
    assert not of(SetTimer, train(machine, 4 * SECOND, 2))


def test_a_round_is_measured_with_what_it_has_waited():
    machine = node()
    train(machine, 2 * SECOND)
    train(machine, 6 * SECOND, 2)
    assert machine.interval == 3 * SECOND
    assert machine.pairing.patience == 12 * SECOND
    machine.step(TrainFailed(at=7 * SECOND, round=3, reason="out of memory"))
    assert machine.interval == 2 * SECOND
    assert machine.round == 4


@pytest.mark.parametrize(("pacing", "spread"), [("poisson", 1.0), ("paced", 12**-0.5)])
@pytest.mark.parametrize("rate", [0.5, 2.0])
def test_turns_come_at_half_the_rate(pacing, spread, rate):
    machine = node(pacing=pacing, rate=rate)
    (timer,) = of(SetTimer, train(machine, SECOND))
    gaps, at = [(timer.at - SECOND) / SECOND], timer.at
    for _ in range(2000):
        machine._due = False
        machine.up = set()
        (timer,) = of(SetTimer, machine.step(TimerFired(at=at, name=timer.name)))
        gaps.append((timer.at - at) / SECOND)
        at = timer.at
    # Five standard errors of the mean of 2,000.
    assert np.mean(gaps) == pytest.approx(2 / rate, rel=5 * spread / 2000**0.5)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(spread, rel=0.15)


def test_a_turn_that_comes_while_a_node_is_engaged_follows_when_it_is_free():
    machine = node()
    (timer,) = of(SetTimer, train(machine, SECOND))
    (invite,) = of(Send, machine.step(TimerFired(at=timer.at, name="turn")))
    for late in (1, 2, 3):  # it is never owed more than one
        commands = machine.step(TimerFired(at=timer.at + late, name="turn"))
        assert not of(Send, commands)
    commands = machine.step(PeerDown(at=timer.at + 4, peer=invite.to))
    (other,) = of(Send, commands)
    assert other.to != invite.to
    commands = machine.step(PeerDown(at=timer.at + 5, peer=other.to))
    assert not of(Send, commands)  # nobody is left
    assert not machine._due
    machine.step(PeerUp(at=timer.at + 6, peer=invite.to))
    (again,) = of(Send, machine.step(TimerFired(at=timer.at + 7, name="turn")))
    assert again.to == invite.to


def test_what_is_learned_during_an_exchange_is_kept():
    graph = nx.path_graph(2)
    machines = [
        Middle().machine(make_site(topology=graph, initial=vector(0, 0), node=n)) for n in (0, 1)
    ]
    for n, machine in enumerate(machines):
        machine.step(Started(at=0, up=(1 - n,)))
        train(machine, SECOND, after=(8 * n, 0))

    def pass_on(source, command):
        event = Received(at=SECOND, source=source, message=command.message)
        return machines[1 - source].step(event)

    (invite,) = of(Send, machines[0].step(TimerFired(at=SECOND, name="turn")))
    (offer,) = of(Send, pass_on(0, invite))
    training = machines[1].model
    commands = pass_on(1, offer)
    (answer,), (report,) = of(Send, commands), of(Report, commands)
    assert report == Report(name="staleness", total=0.0)
    assert machines[0].model.tolist() == [4, 0]
    machines[1].step(TrainDone(at=SECOND, round=2, before=training, after=vector(8, 2)))
    pass_on(0, answer)
    assert machines[1].model.tolist() == [4, 2]


def test_what_is_open_in_the_end_is_counted():
    machine = node()
    train(machine, SECOND)
    assert machine.step(Stopped(at=SECOND, reason="")) == []
    other = node(graph=nx.path_graph(2))
    train(other, SECOND)
    message = Middle().machine(make_site(topology=nx.path_graph(2), initial=vector(0, 0), node=0))
    message.step(Started(at=0, up=(1,)))
    train(message, SECOND)
    (invite,) = of(Send, message.step(TimerFired(at=SECOND, name="turn")))
    other.step(Received(at=SECOND, source=0, message=invite.message))
    assert other.step(Stopped(at=SECOND, reason="")) == [Report(name="unsettled-exchange")]


@pytest.mark.slow
@pytest.mark.parametrize("graph", [nx.cycle_graph(8), nx.complete_graph(7)], ids=["ring", "full"])
@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("pacing", ["poisson", "paced"])
def test_nodes_that_start_together_achieve_their_rate(graph, rate, pacing):
    cluster = Cluster(
        Middle(rate=rate, pacing=pacing),
        topology=graph,
        initial=vector(0, 0),
        train=lambda node, number, model: model + 1,
        rounds=60,
        faults=Faults(uplink=SECOND // 1000, delay=(0, SECOND // 100)),
    ).run()
    achieved = cluster.counters["staleness"].count / len(graph) / 60
    # A tenth for what is lost while nodes are engaged; the rest is four standard errors.
    assert 0.9 * rate - 4 * (rate / len(graph) / 60) ** 0.5 < achieved
    assert achieved < rate + 4 * (rate / len(graph) / 60) ** 0.5
    assert not cluster.counters["unanswered-invitation"].count


@pytest.mark.parametrize(
    ("parameters", "what"),
    [({"rate": -1.0}, "rate"), ({"patience": 0.0}, "patience"), ({"pacing": "pace"}, "paced")],
)
def test_impossible_parameters_are_refused(parameters, what):
    with pytest.raises(ConfigurationError, match=what):
        Middle(**parameters)
