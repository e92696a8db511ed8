"""What a node keeps of what it gets, and whom it sends to: the edge cases."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    HEADER_BYTES,
    DropQueued,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    Started,
    Train,
    TrainDone,
    TrainFailed,
)
from flwr_decentral.testing import make_site
from flwr_decentral_divshare import DivShare

SIZE = 40


class Node:
    """Node 0 of a complete graph, and shorthands for what happens to it."""

    def __init__(self, n=4, up=None, **parameters):
        parameters = {"fragments": 4, "degree": 2, **parameters}
        site = make_site(topology=nx.complete_graph(n), initial=np.zeros(SIZE, np.float32))
        self.machine = DivShare(**parameters).machine(site)
        self.machine.step(Started(at=0, up=site.neighbors if up is None else up))

    def give(self, source, fragment, value, step, *, length=None, kind="fragment", **header):
        if length is None:
            length = self.machine.partition.length(fragment)
        message = Message(
            kind=kind,
            step=step,
            payload=np.full(length, value, np.float32),
            header={"fragment": fragment, "fragments": 4, **header},
        )
        return self.machine.step(Received(at=0, source=source, message=message))

    def train(self, number, value=0.0):
        after = np.full(SIZE, value, np.float32)
        event = TrainDone(at=0, round=number, before=self.machine.model, after=after)
        return self.machine.step(event)

    def coordinates(self, fragment):
        return set(self.machine.model[self.machine.partition.indices(fragment)].tolist())


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def nbytes(node, fragment):
    return HEADER_BYTES + 4 * node.machine.partition.length(fragment)


@pytest.mark.parametrize("arrival", [(3, 5), (5, 3)])
def test_newest_fragment_wins_whenever_it_arrives(arrival):
    node = Node()
    first, second = (node.give(1, 2, value=step, step=step) for step in arrival)
    assert not first
    assert second == [Report(name="superseded", nbytes=nbytes(node, 2))]
    node.train(6)
    assert node.coordinates(2) == {2.5}


def test_duplicate_changes_nothing():
    node = Node()
    node.give(1, 2, 8, step=3)
    assert node.give(1, 2, 8, step=3) == [Report(name="superseded", nbytes=nbytes(node, 2))]
    node.train(4)
    assert node.coordinates(2) == {4}


def test_fragments_of_different_rounds_of_one_sender_coexist():
    node = Node()
    node.give(1, 0, 2, step=7)
    node.give(1, 3, 4, step=2)
    (staleness,) = of(Report, node.train(7))
    assert node.coordinates(0) == {1}
    assert node.coordinates(3) == {2}
    assert node.coordinates(1) == {0}
    assert staleness.total == 5


def test_inbox_is_empty_after_the_aggregation():
    node = Node()
    node.give(1, 0, 2, step=1)
    node.train(1)
    assert not len(node.machine.inbox)
    node.train(2, value=3)
    assert node.coordinates(0) == {3}


def test_fragments_above_the_age_limit_are_dropped_and_counted():
    node = Node(max_age=2)
    node.give(1, 0, 2, step=7)
    node.give(2, 0, 2, step=8)
    node.give(3, 0, 2, step=12)
    expired, staleness = of(Report, node.train(10))
    assert expired == Report(name="expired", nbytes=nbytes(node, 0))
    assert (staleness.count, staleness.total) == (2, 0.0)
    node.give(1, 0, 9, step=8)
    (expired,) = of(Report, node.train(11, value=5))
    assert expired.name == "expired"
    assert node.coordinates(0) == {5}


@pytest.mark.parametrize(
    "bad",
    [
        {"fragment": 4, "length": 10},
        {"fragment": -1, "length": 10},
        {"fragment": 1.0, "length": 10},
        {"fragment": 1, "length": 9},
        {"fragment": 1, "length": 0},
        {"fragment": 1, "fragments": 5},
        {"fragment": 1, "kind": "model"},
    ],
    ids=["above", "below", "fraction", "short", "empty", "cut", "kind"],
)
def test_fragment_that_does_not_fit_is_refused_and_counted(bad):
    node = Node()
    length = bad.get("length", 10)
    (report,) = node.give(1, value=1, step=1, **{"length": 10, **bad})
    assert report == Report(name="bad-fragment", nbytes=HEADER_BYTES + 4 * length)
    assert not len(node.machine.inbox)


def test_message_without_payload_is_refused():
    node = Node()
    message = Message(kind="fragment", step=1, header={"fragment": 1, "fragments": 4})
    (report,) = node.machine.step(Received(at=0, source=1, message=message))
    assert report.name == "bad-fragment"


def test_fragment_that_is_not_finite_is_refused():
    node = Node()
    (report,) = node.give(1, 2, np.nan, step=1)
    assert report.name == "payload-not-finite"
    node.train(1, value=1)
    assert node.coordinates(2) == {1}


def test_peer_that_is_down_gets_nothing_more_but_what_it_sent_counts():
    node = Node()
    node.give(2, 1, 4, step=1)
    assert node.machine.step(PeerDown(at=0, peer=2)) == [DropQueued(to=2)]
    sends = of(Send, node.train(1))
    assert {send.to for send in sends} == {1, 3}
    assert node.coordinates(1) == {2}
    assert not node.machine.step(PeerUp(at=0, peer=2))
    assert 2 in {send.to for number in range(2, 9) for send in of(Send, node.train(number))}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_degree_is_capped_at_those_in_reach(n):
    node = Node(n=n, degree=6)
    sends = of(Send, node.train(1))
    assert len(sends) == 4 * (n - 1)
    assert {send.to for send in sends} == set(range(1, n))


def test_node_that_reaches_nobody_only_trains():
    node = Node(up=())
    commands = node.train(1, value=3)
    assert [type(command) for command in commands] == [DropQueued, Train]
    np.testing.assert_array_equal(node.machine.model, np.full(SIZE, 3, np.float32))


def test_sparse_topology_limits_the_candidates():
    site = make_site(topology=nx.cycle_graph(6), initial=np.zeros(SIZE, np.float32))
    machine = DivShare(fragments=4, degree=1).machine(site)
    machine.step(Started(at=0, up=(1, 5)))
    after = np.ones(SIZE, np.float32)
    sends = of(Send, machine.step(TrainDone(at=0, round=1, before=machine.model, after=after)))
    assert {send.to for send in sends} <= {1, 5}


def test_without_flush_nothing_is_dropped():
    assert not of(DropQueued, Node(flush=False).train(1))


def test_failed_training_still_sends_and_averages():
    node = Node()
    node.give(1, 0, 2, step=1)
    commands = node.machine.step(TrainFailed(at=0, round=1, reason="out of memory"))
    assert len(of(Send, commands)) == 8
    assert node.coordinates(0) == {1}
    assert of(Train, commands)[0].round == 2
    assert not node.machine.site.initial.any()


def test_fragments_may_be_more_than_a_tensor_has_values():
    tensors = {"bias": np.zeros(3, np.float32), "weight": np.zeros((5, 8), np.float32)}
    site = make_site(topology=nx.complete_graph(3), initial=tensors)
    for partition in ("rotation", "layerwise"):
        machine = DivShare(fragments=20, degree=2, partition=partition).machine(site)
        lengths = [machine.partition.length(fragment) for fragment in range(20)]
        assert sum(lengths) == 43
        assert max(lengths) - min(lengths) <= 1


def test_nodes_of_a_process_share_one_partition():
    site = make_site(topology=nx.complete_graph(3), initial=np.zeros(SIZE, np.float32))
    machines = [DivShare(partition="layerwise").machine(site) for _ in range(2)]
    assert machines[0].partition is machines[1].partition
