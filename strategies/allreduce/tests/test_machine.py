"""What a node answers: one machine, stepped by hand, in the middle of a chain of three."""

from collections import Counter

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    HEADER_BYTES,
    SECOND,
    ConfigurationError,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Train,
    TrainDone,
    TrainFailed,
)
from flwr_decentral.core.linkstate import Claim
from flwr_decentral.testing import make_site
from flwr_decentral_allreduce import AllReduce


def vector(*values):
    return np.array(values, np.float32)


class Node:
    """Node 1 of the chain 0 - 1 - 2, and shorthands for what happens to it.

    With one chunk its owner is node 0: node 2 is a child of node 1, and node 0 its parent.
    """

    def __init__(self, up=(0, 2), node=1, **parameters):
        site = make_site(topology=nx.path_graph(3), initial=vector(0, 0, 0), node=node)
        self.machine = AllReduce(**({"chunks": 1} | parameters)).machine(site)
        self.now, self.reports = 0, Counter()
        self.commands = self.step(Started(at=0, up=up))

    def step(self, event):
        commands = self.machine.step(event)
        for command in commands:
            if isinstance(command, Report):
                self.reports[command.name] += command.count
        return commands

    def train(self, number, *after):
        before = self.machine.model
        event = TrainDone(at=self.now, round=number, before=before, after=vector(*after))
        return self.step(event)

    def hear(self, source, kind, step, *values, view=None, **header):
        view = self.machine.links.view if view is None else view
        payload = vector(*values) if values else None
        header = {"chunk": 0, "view": view, **header}
        message = Message(kind=kind, step=step, payload=payload, header=header)
        return self.step(Received(at=self.now, source=source, message=message))

    def fire(self, name):
        return self.step(TimerFired(at=self.now, name=name))

    def settle(self):
        return self.fire("settle")


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def sent(commands):
    return [(c.to, c.message.kind, c.message.step) for c in of(Send, commands)]


def content(commands):
    (send,) = of(Send, commands)
    return send.message.header["count"], send.message.payload.tolist()


def rounds(commands):
    return [command.round for command in of(Train, commands)]


def test_adds_up_tells_its_parent_and_passes_the_mean_on():
    node = Node()
    assert rounds(node.commands) == [1]
    assert not of(Send, node.train(1, 1, 2, 3))
    assert node.machine.waits_for == (2,)
    commands = node.hear(2, "sum", 1, 4, 4, 4, count=1)
    assert sent(commands) == [(0, "sum", 1)]
    assert content(commands) == (2, [5, 6, 7])
    assert node.machine.waits_for == (0,)
    commands = node.hear(0, "mean", 1, 2, 2, 2, count=3)
    assert sent(commands) == [(2, "mean", 1)]
    assert content(commands) == (3, [2, 2, 2])
    assert rounds(commands) == [2]
    assert node.machine.model.tolist() == [2, 2, 2]
    assert not node.reports


def test_sums_that_come_early_wait_for_the_own_training_and_for_their_round():
    node = Node()
    assert not node.hear(2, "sum", 1, 4, 4, 4, count=1)
    assert not node.hear(2, "sum", 2, 6, 6, 6, count=1)
    assert node.machine.waits_for == ()
    assert content(node.train(1, 1, 2, 3)) == (2, [5, 6, 7])
    node.hear(0, "mean", 1, 2, 2, 2, count=3)
    assert content(node.train(2, 1, 1, 1)) == (2, [7, 7, 7])


def test_an_owner_divides_by_the_models_that_are_in_the_sum():
    node = Node(chunks=3)
    node.train(1, 3, 30, 300)
    node.hear(0, "sum", 1, 60, count=1, chunk=1)
    commands = node.hear(2, "sum", 1, 90, count=1, chunk=1)
    assert sent(commands) == [(2, "mean", 1), (0, "mean", 1)]
    (mean,) = {send.message.payload[0] for send in of(Send, commands)}
    # Added from node 0 to node 2, and multiplied by the float32 that is nearest to a third.
    assert mean == (np.float32(60) + np.float32(30) + np.float32(90)) * np.float32(1 / 3)


def test_the_timer_asks_for_what_is_missing_and_doubles_while_nothing_comes():
    node = Node(retry=2.0)
    node.now = 10 * SECOND
    armed = {timer.name: timer.at for timer in of(SetTimer, node.train(1, 1, 2, 3))}
    assert armed == {"retry": 12 * SECOND, "patience": 610 * SECOND}
    due = []
    for _ in range(6):
        node.now = node.now + node.machine.interval
        commands = node.fire("retry")
        assert sent(commands) == [(2, "view", 1)]
        (timer,) = of(SetTimer, commands)
        due.append((timer.at - node.now) // SECOND)
    assert due == [4, 8, 16, 32, 32, 32]
    node.now += SECOND
    node.hear(2, "sum", 1, 4, 4, 4, count=1)
    node.now += 31 * SECOND
    commands = node.fire("retry")
    assert sent(commands) == [(0, "ask", 1)]
    assert of(SetTimer, commands)[0].at == node.now + 2 * SECOND


def test_timers_are_cancelled_at_the_end_of_a_round_and_not_set_without_a_wait():
    node = Node()
    node.train(1, 1, 2, 3)
    node.hear(2, "sum", 1, 4, 4, 4, count=1)
    commands = node.hear(0, "mean", 1, 2, 2, 2, count=3)
    assert [(timer.name, timer.at) for timer in of(SetTimer, commands)] == [
        ("retry", None),
        ("patience", None),
    ]
    alone = Node(up=())
    alone.settle()
    commands = alone.train(1, 1, 2, 3)
    assert rounds(commands) == [2]
    assert not of(SetTimer, commands)


def test_a_lost_sum_is_wanted_and_sent_again():
    node = Node()
    node.train(1, 1, 2, 3)
    assert sent(node.hear(2, "ask", 1)) == [(2, "want", 1)]
    node.hear(2, "sum", 1, 4, 4, 4, count=1)
    assert not of(Send, node.hear(2, "ask", 1))
    commands = node.hear(0, "want", 1)
    assert sent(commands) == [(0, "sum", 1)]
    assert content(commands) == (2, [5, 6, 7])
    assert not of(Send, node.hear(2, "want", 1))


def test_a_lost_mean_is_asked_for_and_sent_again_also_after_the_round():
    node = Node()
    node.train(1, 1, 2, 3)
    node.hear(2, "sum", 1, 4, 4, 4, count=1)
    assert sent(node.hear(0, "have", 1)) == [(0, "want", 1)]
    node.hear(0, "mean", 1, 2, 2, 2, count=3)
    assert not of(Send, node.hear(0, "have", 1))
    assert sent(node.hear(2, "ask", 1)) == [(2, "have", 1)]
    for kind in ("want", "sum"):
        values = (4, 4, 4) if kind == "sum" else ()
        commands = node.hear(2, kind, 1, *values, count=1)
        assert sent(commands) == [(2, "mean", 1)]
        assert content(commands) == (3, [2, 2, 2])


def test_a_duplicate_is_counted_and_changes_nothing():
    node = Node()
    node.hear(2, "sum", 1, 4, 4, 4, count=1)
    (report,) = node.hear(2, "sum", 1, 9, 9, 9, count=1)
    assert report == Report(name="duplicate-message", nbytes=HEADER_BYTES + 12)
    assert content(node.train(1, 1, 2, 3)) == (2, [5, 6, 7])
    node.hear(0, "mean", 1, 2, 2, 2, count=3)
    (report,) = node.hear(0, "mean", 1, 2, 2, 2, count=3)
    assert report.name == "stale-message"


def test_a_neighbor_that_goes_down_ends_the_wait_and_takes_its_model_along():
    node = Node()
    node.train(1, 1, 2, 3)
    commands = node.step(PeerDown(at=0, peer=2))
    assert sent(commands) == [(0, "link", 1)]
    assert of(Send, commands)[0].message == Claim(1, 2, 1, False).message(1)
    assert [timer.name for timer in of(SetTimer, commands)] == ["settle"]
    commands = node.settle()
    assert content(commands) == (1, [1, 2, 3])
    node.hear(0, "mean", 1, 2, 2, 2, count=2)
    assert node.reports == {"absent-contribution": 1}


def test_what_was_sent_in_another_view_is_of_no_use():
    node = Node()
    view = node.machine.links.view
    node.train(1, 1, 2, 3)
    node.hear(2, "sum", 1, 4, 4, 4, count=1)
    node.step(PeerDown(at=0, peer=2))
    node.settle()
    (report,) = node.hear(0, "mean", 1, 9, 9, 9, count=3, view=view)
    assert report.name == "stale-message"
    node.step(PeerUp(at=0, peer=2))
    assert not of(Send, node.settle())
    (report,) = node.hear(2, "sum", 1, 4, 4, 4, count=1, view=view)
    assert report.name == "stale-message"
    assert content(node.hear(2, "sum", 1, 4, 4, 4, count=1)) == (2, [5, 6, 7])


def test_a_mean_that_is_known_is_passed_on_in_place_of_a_sum():
    node = Node()
    node.train(1, 1, 2, 3)
    assert sent(node.hear(2, "mean", 1, 7, 7, 7, count=3)) == [(0, "mean", 1)]
    node = Node(chunks=3)
    node.train(1, 1, 2, 3)
    node.hear(0, "mean", 1, 7, count=3)
    node.step(PeerDown(at=0, peer=2))
    assert (0, "mean", 1) in sent(node.settle())


def test_news_of_links_settles_before_sums_are_sent_again():
    node = Node()
    node.train(1, 1, 2, 3)
    node.step(PeerDown(at=0, peer=0))
    assert not of(Send, node.hear(2, "sum", 1, 4, 4, 4, count=1))
    commands = node.settle()
    # Now node 1 or 2 owns the chunk; either way the two agree, and node 0 is left out.
    assert node.machine.links.edges == {(1, 2)}
    assert sent(commands) in ([(2, "mean", 1)], [(2, "sum", 1)])


def test_differing_views_are_compared_and_agree():
    one, other = Node(), Node(node=0, up=(1,))
    one.step(PeerDown(at=0, peer=2))
    commands = other.hear(1, "ask", 1, view=one.machine.links.view)
    assert sent(commands)[0] == (1, "view", 1)
    for send in of(Send, one.hear(0, "view", 1, view=0)):
        other.step(Received(at=0, source=1, message=send.message))
    assert other.machine.links.view == one.machine.links.view


def test_a_returning_neighbor_is_told_what_there_is_to_know():
    node = Node()
    node.step(PeerDown(at=0, peer=2))
    commands = node.step(PeerUp(at=0, peer=2))
    told = [send.message.header for send in of(Send, commands) if send.to == 2]
    assert told[-1] == {"view": node.machine.links.view}
    assert {"node": 1, "peer": 2, "version": 2, "up": 1} in told


def test_a_node_that_has_been_away_takes_over_the_last_means():
    node = Node()
    commands = node.hear(2, "view", 9)
    assert sent(commands) == [(2, "want", 8)]
    assert node.machine.round == 8
    assert not of(Train, node.train(1, 5, 5, 5))
    commands = node.hear(2, "mean", 8, 7, 7, 7, count=2, view=123)
    assert rounds(commands) == [9]
    assert node.machine.model.tolist() == [7, 7, 7]
    assert node.reports == {"skipped-round": 7, "unused-training": 1}


def test_a_node_that_has_been_away_asks_everybody_after_a_while():
    node = Node()
    node.train(1, 5, 5, 5)
    timers = [timer.name for timer in of(SetTimer, node.hear(2, "view", 9))]
    assert timers == ["retry", "patience"]
    assert sent(node.fire("retry")) == [(0, "ask", 8), (2, "ask", 8)]
    assert sent(node.hear(0, "have", 8)) == [(0, "want", 8)]


def test_a_neighbor_that_is_behind_is_told_so():
    node = Node()
    node.hear(2, "view", 9)
    node.train(1, 5, 5, 5)
    node.hear(2, "mean", 8, 7, 7, 7, count=2)
    assert sent(node.hear(0, "sum", 3, 1, 1, 1, count=1)) == [(0, "view", 9)]
    assert sent(node.hear(0, "ask", 3)) == [(0, "view", 9)]
    # One round behind: it waits for a sum that will not come any more, and gets the mean.
    assert sent(node.hear(0, "view", 8)) == [(0, "mean", 8)]
    assert not of(Send, node.hear(0, "view", 9))


def test_patience_ends_the_round_with_the_own_values_and_hides_them():
    node = Node(chunks=3, patience=5.0)
    node.train(1, 1, 2, 3)
    node.now = 2 * SECOND
    node.hear(0, "mean", 1, 8, count=3)
    node.now = 5 * SECOND
    (timer,) = node.fire("patience")
    assert timer == SetTimer(name="patience", at=7 * SECOND)
    node.now = 7 * SECOND
    assert rounds(node.fire("patience")) == [2]
    assert node.machine.model.tolist() == [8, 2, 3]
    assert node.reports["missing-mean"] == 2
    assert sent(node.hear(2, "ask", 1)) == [(2, "have", 1)]
    assert not of(Send, node.hear(2, "ask", 1, chunk=1))
    assert not of(Send, node.hear(2, "want", 1, chunk=1))


def test_failed_training_adds_the_model_it_began_with():
    node = Node()
    node.hear(2, "sum", 1, 4, 4, 4, count=1)
    commands = node.step(TrainFailed(at=0, round=1, reason="out of memory"))
    assert content(commands) == (2, [4, 4, 4])


def test_training_that_is_not_finite_adds_nothing():
    node = Node()
    node.hear(2, "sum", 1, 4, 4, 4, count=1)
    assert content(node.train(1, 1, np.nan, 3)) == (1, [4, 4, 4])
    assert node.reports == {"training-not-finite": 1}


def test_nodes_that_have_nothing_to_add_keep_the_model():
    node = Node(up=())
    node.settle()
    assert rounds(node.train(1, np.inf, 0, 0)) == [2]
    assert node.machine.model.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "values", "header"),
    [
        ("sum", (1, 1), {"count": 1}),
        ("sum", (1, 1, 1), {"count": -1}),
        ("sum", (1, 1, 1), {"count": 0.5}),
        ("sum", (1, 1, 1), {"count": 1, "chunk": 1}),
        ("sum", (), {"count": 2}),
        ("mean", (), {"count": 0}),
        ("ask", (), {"chunk": -1}),
        ("view", (), {"view": 0.5}),
        ("model", (1, 1, 1), {"count": 1}),
    ],
)
def test_what_makes_no_sense_is_counted(kind, values, header):
    node = Node()
    (report,) = node.hear(2, kind, 1, *values, **header)
    assert report == Report(name="bad-message", nbytes=HEADER_BYTES + 4 * len(values))


def test_only_children_send_sums_and_only_links_of_the_topology_are_claimed():
    node = Node()
    assert node.hear(0, "sum", 1, 1, 1, 1, count=1)[0].name == "bad-message"
    message = Claim(0, 2, 1, False).message(1)
    assert node.step(Received(at=0, source=0, message=message))[0].name == "bad-message"


@pytest.mark.parametrize(
    "parameters",
    [
        {"chunks": -1},
        {"retry": 0.0},
        {"retry": float("inf")},
        {"patience": -1.0},
        {"patience": float("nan")},
    ],
)
def test_impossible_parameters_are_refused(parameters):
    with pytest.raises(ConfigurationError):
        AllReduce(**parameters)


def test_check_says_what_cannot_work_and_what_costs():
    layout = make_site(topology=nx.path_graph(2), initial=vector(0, 0, 0)).layout
    with pytest.raises(ConfigurationError, match="4 fragments"):
        AllReduce(chunks=4).check(nx.cycle_graph(6), layout)
    (warning,) = AllReduce().check(nx.cycle_graph(6), layout)
    assert "3 of 6 nodes own none" in warning
    (warning,) = AllReduce(chunks=1).check(nx.star_graph(9), layout)
    assert "9 models a round" in warning
    assert not AllReduce(chunks=2).check(nx.complete_graph(12), layout)
