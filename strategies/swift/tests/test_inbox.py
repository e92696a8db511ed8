"""What a node keeps of what it gets: the edge cases."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    HEADER_BYTES,
    SECOND,
    DropQueued,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    Started,
    Stopped,
    TrainDone,
)
from flwr_decentral.testing import make_site
from flwr_decentral_swift import SWIFT

HUB = nx.star_graph(3)  # node 0 and its neighbors 1, 2 and 3: a quarter each


class Node:
    """Node 0 of a star, and shorthands for what happens to it."""

    def __init__(self, up=(1, 2, 3), value=0.0, **parameters):
        site = make_site(topology=HUB, initial=np.full(2, value, np.float32))
        self.machine = SWIFT(**parameters).machine(site)
        self.machine.step(Started(at=0, up=up))

    def hear(self, source, step, value, *, length=2, kind="model", **header):
        payload = np.full(length, value, np.float32)
        message = Message(kind=kind, step=step, payload=payload, header=header)
        return self.machine.step(Received(at=0, source=source, message=message))

    def train(self, number, update=0.0, at=0):
        after = self.machine.model + np.float32(update)
        event = TrainDone(at=at, round=number, before=self.machine.model, after=after)
        return self.machine.step(event)

    @property
    def value(self):
        return float(self.machine.model[0])


def reports(commands):
    return {c.name: (c.count, c.total, c.nbytes) for c in commands if isinstance(c, Report)}


def test_the_model_of_a_dead_neighbor_is_averaged_no_more():
    node = Node(value=8)
    node.hear(1, 1, 0)
    commands = node.machine.step(PeerDown(at=0, peer=1))
    assert commands[0] == DropQueued(to=1)
    assert reports(commands) == {"expired": (1, 0, HEADER_BYTES + 8)}
    node.train(1)
    assert node.value == 8
    for number in range(2, 9):
        assert {c.to for c in node.train(number) if isinstance(c, Send)} == {2, 3}
    assert node.value == 8


def test_a_returning_neighbor_is_taken_in_with_its_first_model_though_its_rounds_start_over():
    node = Node(value=8)
    node.hear(1, 40, 0)
    node.machine.step(PeerDown(at=0, peer=1))
    node.machine.step(PeerUp(at=0, peer=1))
    node.train(1)
    assert node.value == 8
    assert not node.hear(1, 2, 0)
    node.train(2)
    assert node.value == 6


def test_neighbors_that_are_not_there_at_first_have_no_model():
    node = Node(up=(1, 2), value=8)
    node.train(1, update=-8)
    assert node.value == 0
    node.train(2)
    # A half of the node's own 0 and two quarters of 8: the third neighbor's quarter is its own.
    assert node.value == 4


def test_weights_of_missing_models_are_the_nodes_own_or_all_are_raised():
    own, raised = Node(memory="low"), Node(memory="low", missing="boost")
    for node in (own, raised):
        node.hear(2, 1, 8)
        node.train(1)
    assert own.value == 2
    assert raised.value == 4


def test_low_memory_uses_a_model_once():
    node = Node(memory="low")
    node.hear(2, 1, 8)
    assert reports(node.train(1)) == {"staleness": (1, 0.0, 0)}
    assert not reports(node.train(2))
    assert node.value == 2


def test_models_that_are_not_renewed_expire_if_there_is_a_limit():
    node = Node(max_age=2, memory="standard", value=4)
    node.hear(1, 5, 0)
    for number in (1, 2, 3):
        node.hear(2, number, 4)
        node.hear(3, number, 4)
        assert "expired" not in reports(node.train(number))
    commands = node.train(4)
    assert reports(commands)["expired"] == (1, 0, 0)
    value = node.value
    node.train(5)
    assert node.value == pytest.approx(4 + (value - 4) / 2)


def test_reports_say_what_was_used_and_how_old_it_was():
    node = Node(up=())
    node.hear(1, 3, 0)
    node.hear(2, 9, 0)
    assert reports(node.train(8)) == {"staleness": (2, 4.0, 0)}


def test_what_came_too_late_is_counted():
    node = Node()
    node.hear(1, 1, 0)
    node.train(1)
    assert not node.machine.step(Stopped(at=0, reason=""))
    node.hear(1, 2, 0)
    node.hear(1, 3, 0)
    commands = node.machine.step(Stopped(at=0, reason=""))
    assert reports(commands) == {"unused": (1, 0, HEADER_BYTES + 8)}


@pytest.mark.parametrize(
    "bad",
    [{"length": 3}, {"kind": "fragment"}, {"pace": -1.0}, {"pace": float("nan")}],
    ids=["length", "kind", "pace", "no-pace"],
)
def test_what_does_not_fit_is_refused_and_counted(bad):
    node = Node()
    commands = node.hear(1, 1, 8, **bad)
    nbytes = HEADER_BYTES + 4 * bad.get("length", 2)
    assert reports(commands) == {"bad-model": (1, 0, nbytes)}
    node.train(1)
    assert node.value == 0


def test_a_model_without_values_or_with_bad_ones_is_refused():
    node = Node()
    message = Message(kind="model", step=1)
    assert "bad-model" in reports(node.machine.step(Received(at=0, source=1, message=message)))
    assert "payload-not-finite" in reports(node.hear(1, 1, np.nan))
    node.train(1)
    assert node.value == 0


def test_a_backlog_is_dropped_unless_it_is_to_be_kept():
    assert Node().train(1)[1] == DropQueued()
    assert DropQueued() not in Node(flush=False).train(1)


def test_pace_is_measured_over_a_window_and_told():
    node = Node(influence="measured", window=2)
    told = []
    for number, second in enumerate((2, 4, 5, 6, 7), start=1):
        (send, *_) = [c for c in node.train(number, at=second * SECOND) if isinstance(c, Send)]
        told.append(send.message.header["pace"])
    assert told == [0.0, 0.5, 0.5, 1.0, 1.0]
    (send, *_) = [c for c in Node().train(1) if isinstance(c, Send)]
    assert not send.message.header


def test_weights_follow_the_paces_of_both_ends():
    node = Node(influence="measured", window=1)
    node.hear(1, 1, 8, pace=0.25)
    node.hear(2, 1, 0, pace=4.0)
    node.train(1, at=SECOND)
    # min(1/4, 0.25/2) of the slow one; the hub's degree limits what the fast one gets.
    assert node.value == 1
