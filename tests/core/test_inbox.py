"""Machines that wait for nobody: what is used, what is of no use, and what is forgotten."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    DropQueued,
    InboxMachine,
    Letter,
    PeerDown,
    PeerUp,
    Report,
    Stopped,
    TrainDone,
)
from flwr_decentral.testing.sites import make_site


class Machine(InboxMachine):
    def on_train_done(self, event):
        return self.average_models(event)


def vector(*values):
    return np.array(values, np.float32)


@pytest.fixture
def machine():
    return Machine(make_site(topology=nx.star_graph(3), initial=vector(0, 0)))


def letter(sender, step, *values):
    return Letter(sender, 0, step, vector(*values))


def done(round, *values):
    return TrainDone(at=0, round=round, before=vector(0, 0), after=vector(*values))


def test_the_newest_of_each_sender_is_used_once(machine):
    assert list(machine.keep(letter(1, 1, 1, 1))) == []
    (older,) = machine.keep(letter(1, 2, 4, 4))
    assert older == Report(name="superseded", nbytes=letter(1, 1, 1, 1).nbytes)
    (again,) = machine.keep(letter(1, 2, 5, 5))
    assert again.name == "superseded"
    assert list(machine.keep(letter(2, 3, 7, 1))) == []
    (told,) = machine.step(done(5, 1, 1))
    assert machine.model.tolist() == [4, 2]
    assert told == Report(name="staleness", count=2, total=5.0)
    assert machine.step(done(6, 9, 9)) == []
    assert machine.model.tolist() == [9, 9]


def test_a_returning_peer_may_have_started_over(machine):
    list(machine.keep(letter(1, 9, 1, 1)))
    machine.step(done(9, 0, 0))
    assert [each.name for each in machine.keep(letter(1, 2, 1, 1))] == ["superseded"]
    machine.step(PeerUp(at=0, peer=1))
    assert list(machine.keep(letter(1, 2, 3, 3))) == []


def test_a_peer_that_is_gone_is_sent_nothing_and_its_letter_stays(machine):
    list(machine.keep(letter(1, 1, 2, 2)))
    assert machine.step(PeerDown(at=0, peer=1)) == [DropQueued(to=1)]
    machine.step(done(1, 0, 0))
    assert machine.model.tolist() == [1, 1]


def test_what_came_too_late_is_counted(machine):
    assert machine.step(Stopped(at=0, reason="over")) == []
    letters = [letter(1, 1, 2, 2), letter(2, 1, 2, 2)]
    for each in letters:
        list(machine.keep(each))
    (told,) = machine.step(Stopped(at=0, reason="over"))
    assert told == Report(name="unused", count=2, nbytes=sum(each.nbytes for each in letters))
