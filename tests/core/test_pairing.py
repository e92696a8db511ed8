"""Exchanges between two nodes: by hand, message by message, and on networks that do their worst."""

from collections import Counter

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import Message, Received, Report, Send, SetTimer
from flwr_decentral.core.pairing import IDLE, INVITING, OFFERING, Pairing

PATIENCE = 100


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


class World:
    """Nodes with vectors, and a network that delivers what the test says, when it says so.

    ``moved`` counts what has taken place by (node, peer, what it sent, what it got).
    """

    def __init__(self, graph, seed=0, started=True):
        self.graph, self.now = graph, 0
        self.nodes = [Pairing(node, np.random.default_rng([seed, node])) for node in graph]
        for node in self.nodes:
            node.patience = PATIENCE if started else 0
        self.vectors = [np.array([2.0**node, -node, 1.0]) for node in graph]
        self.total = np.sum(self.vectors, axis=0)
        self.up = {frozenset(edge) for edge in graph.edges}
        self.flying: list[tuple[int, int, Message]] = []
        self.timers: dict[int, int] = {}
        self.moved: Counter = Counter()
        self.reports: Counter = Counter()
        self.log: list[str] = []

    def near(self, node):
        return {peer for peer in self.graph[node] if frozenset((node, peer)) in self.up}

    def obey(self, node, commands):
        for command in commands:
            if isinstance(command, Send):
                assert command.to != node
                if command.to in self.near(node):
                    self.flying.append((node, command.to, command.message))
                    self.log.append(f"{node} {command.message.kind} {command.to}")
            elif isinstance(command, SetTimer):
                self.timers.pop(node, None)
                if command.at is not None:
                    assert command.at > self.now
                    self.timers[node] = command.at
            else:
                self.reports[command.name] += command.count
        # Whoever waits has a timer, and nobody else.
        assert (node in self.timers) == (not self.nodes[node].idle)
        return commands

    def begin(self, node):
        self.obey(node, self.nodes[node].begin(self.near(node), at=self.now, step=1))

    def learn(self, node, update):
        self.vectors[node] = self.vectors[node] + update
        self.total = self.total + update

    def deliver(self, place=0, *, keep=False):
        source, node, message = self.flying[place]
        if not keep:
            del self.flying[place]
        event = Received(at=self.now, source=source, message=message)
        commands, exchange = self.nodes[node].receive(event, self.vectors[node], step=1)
        if exchange is not None:
            peer, _, mine, theirs = exchange
            assert peer == source
            self.vectors[node] = self.vectors[node] + (theirs - mine) / 2
            self.moved[node, peer, tuple(mine), tuple(theirs)] += 1
        self.obey(node, commands)

    def deliver_all(self):
        for _ in range(10_000):
            if not self.flying:
                return
            self.deliver()
        raise AssertionError("the nodes never stop talking")

    def fire(self, node):
        self.now = max(self.now, self.timers.pop(node))
        self.obey(node, self.nodes[node].lose_patience(at=self.now, step=1))

    def cut(self, a, b):
        if frozenset((a, b)) in self.up:
            self.up.discard(frozenset((a, b)))
            self.flying = [each for each in self.flying if {each[0], each[1]} != {a, b}]
            for node, peer in ((a, b), (b, a)):
                self.obey(node, self.nodes[node].miss(peer, at=self.now, step=1))

    def heal(self, a, b):
        if frozenset((a, b)) not in self.up:
            self.up.add(frozenset((a, b)))
            for node, peer in ((a, b), (b, a)):
                self.obey(node, self.nodes[node].meet(peer))

    def restart(self, node):
        """Go on from a snapshot, on a new object."""
        old = self.nodes[node]
        self.nodes[node] = Pairing(node, np.random.default_rng(99))
        self.nodes[node].restore(old.snapshot())

    def settle(self):
        """Let every link work again, and nothing go wrong any more."""
        for _ in range(50):
            self.deliver_all()
            if not self.timers:
                break
            self.fire(min(self.timers, key=lambda node: (self.timers[node], node)))
        for a, b in self.graph.edges:
            self.cut(a, b)
            self.heal(a, b)
        self.deliver_all()

    def check(self):
        """Every exchange took place at both ends, once, or at neither."""
        mirrored = {(b, a, theirs, mine): n for (a, b, mine, theirs), n in self.moved.items()}
        assert mirrored == self.moved
        np.testing.assert_allclose(np.sum(self.vectors, axis=0), self.total, rtol=1e-12)
        for node in self.nodes:
            assert node.state == IDLE
            assert not node.doubts
            assert not node.end()


def pair(**options):
    return World(nx.path_graph(2), **options)


def kinds(world):
    return [message.kind for _, _, message in world.flying]


def test_an_exchange_in_four_messages():
    world = pair()
    world.begin(0)
    assert kinds(world) == ["invite"]
    assert world.nodes[0].state == INVITING
    world.deliver()
    assert kinds(world) == ["offer"]
    assert world.nodes[1].state == OFFERING
    assert world.flying[0][2].payload is world.vectors[1]
    world.deliver()
    assert kinds(world) == ["answer"]
    assert world.nodes[0].idle
    np.testing.assert_array_equal(world.vectors[0], [1.5, -0.5, 1.0])
    assert 1 in world.nodes[0].answers
    world.deliver()
    assert kinds(world) == ["done"]
    np.testing.assert_array_equal(world.vectors[1], world.vectors[0])
    world.deliver()
    assert not world.nodes[0].answers
    world.check()
    assert not world.reports


def test_the_host_keeps_what_it_learns_meanwhile():
    world = pair()
    world.begin(0)
    world.deliver()
    world.learn(1, np.array([10.0, 0, 0]))
    world.deliver()
    world.learn(0, np.array([0, 4.0, 0]))
    world.deliver_all()
    np.testing.assert_array_equal(world.vectors, [[1.5, 3.5, 1], [11.5, -0.5, 1]])
    world.check()


def test_an_engaged_node_is_busy_and_another_one_is_invited():
    world = World(nx.star_graph(2))  # 0 is between 1 and 2
    world.begin(1)
    world.deliver()
    assert world.nodes[0].state == OFFERING
    world.begin(2)
    world.deliver(1)  # the invitation of 2 reaches 0
    assert sorted(kinds(world)) == ["busy", "offer"]
    world.deliver_all()
    assert world.nodes[2].idle
    assert set(world.moved) == {
        (0, 1, (1, 0, 1), (2, -1, 1)),
        (1, 0, (2, -1, 1), (1, 0, 1)),
    }
    world.check()


def test_a_turn_tries_every_neighbor_once():
    world = World(nx.star_graph(5), started=False)
    world.nodes[0].patience = PATIENCE
    world.begin(0)
    world.deliver_all()
    invited = [line.split()[2] for line in world.log if "invite" in line]
    assert sorted(invited) == ["1", "2", "3", "4", "5"]
    assert world.log.count("0 invite 1") == 1
    assert world.nodes[0].idle


def test_the_order_of_a_turn_is_random():
    first = Counter()
    for seed in range(200):
        world = World(nx.star_graph(4), seed=seed)
        world.begin(0)
        first[world.flying[0][1]] += 1
    assert set(first) == {1, 2, 3, 4}
    assert min(first.values()) > 25


def test_of_two_that_invite_each_other_the_higher_one_is_the_host():
    world = pair()
    world.begin(0)
    world.begin(1)
    assert kinds(world) == ["invite", "invite"]
    world.deliver_all()
    assert world.log == [
        "0 invite 1",
        "1 invite 0",
        "1 offer 0",
        "0 answer 1",
        "1 done 0",
    ]
    world.check()


def test_crossed_invitations_do_not_wait_for_a_timer_in_either_order():
    world = pair()
    world.begin(0)
    world.begin(1)
    world.deliver(1)
    world.deliver_all()
    assert len(world.moved) == 2
    assert not world.timers
    world.check()


def test_a_node_that_has_not_begun_is_busy_and_invites_nobody():
    world = pair(started=False)
    world.begin(0)
    assert not world.flying
    world.nodes[0].patience = PATIENCE
    world.begin(0)
    world.deliver()
    assert kinds(world) == ["busy"]
    world.deliver()
    assert world.nodes[0].idle


@pytest.mark.parametrize("lost", ["invite", "offer", "answer", "done"])
def test_any_message_may_be_lost(lost):
    world = pair()
    world.begin(0)
    while kinds(world) != [lost]:
        world.deliver()
    world.flying.clear()
    world.settle()
    assert len(world.moved) == (0 if lost == "invite" else 2)
    world.check()


@pytest.mark.parametrize("twice", ["invite", "offer", "answer", "done", "busy"])
def test_any_message_may_come_twice_and_nothing_is_sent_for_it(twice):
    world, calm = pair(started=twice != "busy"), pair(started=twice != "busy")
    for each in (world, calm):
        each.nodes[0].patience = PATIENCE
        each.begin(0)
        while each.flying:
            if each is world and kinds(world)[0] == twice:
                copy = world.flying[0]
                world.deliver()
                world.flying.append(copy)
                before = [*world.flying]
                world.deliver(len(world.flying) - 1)
                assert world.flying == before[:-1]
            else:
                each.deliver()
    assert world.log == calm.log
    np.testing.assert_array_equal(world.vectors, calm.vectors)
    world.check()


def test_the_answer_is_repeated_and_not_applied_again():
    world = pair()
    world.begin(0)
    world.deliver()
    world.deliver()
    moved = world.vectors[0]
    for attempt in (2, 3):
        world.flying.clear()  # the answer
        world.learn(0, np.array([0, 0, 1.0]))
        world.fire(1)
        assert world.flying[0][2].header == {"exchange": 1, "attempt": attempt}
        world.deliver()
        assert kinds(world) == ["answer"]
    np.testing.assert_array_equal(world.vectors[0], moved + np.array([0, 0, 2]))
    world.deliver_all()
    assert world.reports == {"repeated-offer": 2}
    world.check()


def test_a_host_asks_with_growing_patience_and_puts_the_exchange_aside_in_the_end():
    world = pair()
    world.begin(0)
    world.deliver()
    waited = []
    while 1 in world.timers:
        world.flying.clear()
        before = world.now
        world.fire(1)
        waited.append(world.now - before)
    assert waited == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE]
    assert world.reports["doubtful-exchange"] == 1
    assert world.nodes[1].idle
    assert 0 in world.nodes[1].doubts
    assert world.nodes[1].end() == [Report(name="unsettled-exchange", count=1)]


@pytest.mark.parametrize("who", [0, 1], ids=["invited-by-the-peer", "inviting-the-peer"])
def test_what_was_put_aside_is_settled_at_the_next_contact(who):
    world = pair()
    world.begin(0)
    world.deliver()
    world.deliver()
    world.flying.clear()  # the answer; node 0 has averaged
    while 1 in world.timers:
        world.fire(1)
        world.flying.clear()
    assert len(world.moved) == 1
    world.learn(1, np.array([0, 0, 7.0]))
    world.begin(who)
    world.deliver_all()
    assert len(world.moved) == 2
    world.check()


def test_an_offer_that_comes_late_is_welcome():
    world = World(nx.star_graph(2))
    world.begin(0)
    (_, host, _), *_ = world.flying
    world.deliver()
    late = world.flying.pop()
    world.fire(0)  # invites the other one
    world.flying.append(late)
    world.deliver(1)
    assert world.nodes[0].state == INVITING
    assert world.moved[0, host, (1, 0, 1), tuple(late[2].payload)] == 1
    world.deliver_all()
    assert len(world.moved) == 4
    assert world.reports == {"unanswered-invitation": 1}
    world.check()


def test_an_offer_is_refused_while_an_own_one_is_out():
    world = World(nx.path_graph(3))
    world.begin(1)
    (_, host, _), *_ = world.flying
    other = 2 - host
    world.deliver()
    late = world.flying.pop()
    world.nodes[1]._untried.clear()
    world.fire(1)
    world.begin(other)
    world.deliver()  # node 1 becomes the host of the other one
    assert world.nodes[1].state == OFFERING
    world.flying.append(late)
    world.deliver(1)
    assert "void" in kinds(world)
    world.deliver_all()
    assert len(world.moved) == 2
    assert world.reports["refused-offer"] == 1
    world.check()


def test_nothing_is_waited_for_of_a_peer_that_is_gone():
    world = pair()
    world.begin(0)
    world.cut(0, 1)
    assert world.nodes[0].idle
    world.heal(0, 1)
    world.begin(0)
    world.deliver()
    world.cut(0, 1)
    assert world.nodes[1].idle
    assert world.reports == {"doubtful-exchange": 1}
    world.heal(0, 1)
    world.deliver_all()
    assert len(world.moved) == 2
    world.check()


def test_a_peer_may_start_over_after_it_has_been_away():
    world = pair()
    for _ in range(3):
        world.begin(0)
        world.deliver_all()
    world.cut(0, 1)
    world.nodes[0] = Pairing(0, np.random.default_rng(5))
    world.nodes[0].patience = PATIENCE
    world.heal(0, 1)
    world.learn(1, np.ones(3))
    world.begin(0)
    world.deliver_all()
    np.testing.assert_array_equal(world.vectors[0], world.vectors[1])
    world.check()


def test_a_node_that_has_started_over_knows_nothing_of_an_old_offer():
    world = pair()
    for _ in range(2):
        world.begin(0)
        world.deliver()
        world.flying.clear()
        world.cut(0, 1)
        world.nodes[0] = Pairing(0, np.random.default_rng(5))
        world.nodes[0].patience = PATIENCE
        world.heal(0, 1)
        world.deliver_all()
        assert not world.moved
    world.check()


def test_a_late_done_does_not_make_a_newer_answer_forgotten():
    world = pair()
    world.begin(0)
    for _ in range(3):
        world.deliver()
    late = world.flying.pop()
    world.learn(1, np.ones(3))
    world.begin(0)
    world.deliver()
    world.deliver()
    world.flying = [late]  # and the second answer is lost
    world.deliver()
    world.fire(1)
    world.deliver_all()
    assert len(world.moved) == 4
    world.check()


@pytest.mark.parametrize("kind", ["void", "answer"])
def test_what_was_put_aside_waits_for_its_own_answer(kind):
    world = pair()
    world.begin(0)
    world.deliver()
    world.deliver()
    world.cut(0, 1)
    message = Message(kind=kind, step=1, payload=np.ones(3), header={"exchange": 7})
    world.flying = [(0, 1, message)]
    world.deliver()
    assert 0 in world.nodes[1].doubts
    world.heal(0, 1)
    world.deliver_all()
    world.check()


@pytest.mark.parametrize(
    "message",
    [
        Message(kind="model", step=1, header={"exchange": 1}),
        Message(kind="invite", step=1),
        Message(kind="invite", step=1, header={"exchange": 0}),
        Message(kind="invite", step=1, header={"exchange": 1.5}),
        Message(kind="offer", step=1, header={"exchange": 1, "attempt": 1}),
        Message(kind="offer", step=1, payload=np.ones(3), header={"exchange": 1}),
        Message(kind="offer", step=1, payload=np.ones(2), header={"exchange": 1, "attempt": 1}),
    ],
)
def test_a_message_that_makes_no_sense_is_counted(message):
    world = pair()
    world.begin(0)
    world.flying = [(1, 0, message)]
    world.deliver()
    assert world.reports == {"bad-message": 1}
    assert not world.flying
    assert world.nodes[0].state == INVITING


def test_an_answer_of_a_wrong_length_ends_the_exchange():
    world = pair()
    world.begin(0)
    world.deliver()
    world.flying = [
        (0, 1, Message(kind="answer", step=1, payload=np.ones(2), header={"exchange": 1}))
    ]
    world.deliver()
    assert world.reports == {"bad-message": 1}
    assert world.nodes[1].idle
    assert not world.moved


@pytest.mark.parametrize("kind", ["busy", "void", "done", "answer"])
def test_what_belongs_to_no_exchange_changes_nothing(kind):
    world = pair()
    world.begin(0)
    message = Message(kind=kind, step=1, payload=np.ones(3), header={"exchange": 7})
    world.flying.append((1, 0, message))
    world.deliver(1)
    assert world.nodes[0].state == INVITING
    world.deliver_all()
    assert len(world.moved) == 2
    world.check()


@pytest.mark.parametrize("kind", ["void", "answer"])
def test_a_host_waits_for_its_own_answer(kind):
    world = pair()
    world.begin(0)
    world.deliver()
    message = Message(kind=kind, step=1, payload=np.ones(3), header={"exchange": 7})
    world.flying.append((0, 1, message))
    world.deliver(1)
    assert world.nodes[1].state == OFFERING
    world.deliver_all()
    assert len(world.moved) == 2
    world.check()


GRAPHS = {
    "pair": nx.path_graph(2),
    "triangle": nx.cycle_graph(3),
    "ring": nx.cycle_graph(7),
    "line": nx.path_graph(5),
    "star": nx.star_graph(5),
    "complete": nx.complete_graph(6),
    "wheel": nx.wheel_graph(6),
}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
@pytest.mark.parametrize("seed", range(10))
def test_all_nodes_at_once_get_through_without_a_single_timer(graph, seed):
    world = World(graph, seed=seed)
    dice = np.random.default_rng(seed)
    for _ in range(3):
        for node in dice.permutation(len(graph)).tolist():
            world.begin(node)
        while world.flying:
            # In order on each link, in any order of the links.
            links = {each[:2]: place for place, each in reversed([*enumerate(world.flying)])}
            world.deliver(dice.choice(sorted(links.values())))
        assert not world.timers
    assert world.moved
    world.check()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_nothing_is_lost_whatever_the_network_does(data):
    graph = GRAPHS[data.draw(st.sampled_from(sorted(GRAPHS)))]
    world = World(graph, seed=data.draw(st.integers(0, 9)))
    nodes, edges = st.sampled_from(sorted(graph)), st.sampled_from(sorted(graph.edges))
    weights = (
        "begin begin begin learn deliver deliver deliver deliver drop copy fire cut heal restart"
    )
    for number in range(data.draw(st.integers(0, 80))):
        action = data.draw(st.sampled_from(weights.split()))
        world.now += 1
        if action in ("deliver", "drop", "copy"):
            if not world.flying:
                continue
            place = data.draw(st.integers(0, len(world.flying) - 1))
            if action == "drop":
                del world.flying[place]
            else:
                world.deliver(place, keep=action == "copy")
        elif action == "fire":
            if world.timers:
                world.fire(data.draw(st.sampled_from(sorted(world.timers))))
        elif action in ("cut", "heal"):
            getattr(world, action)(*data.draw(edges))
        elif action == "learn":
            world.learn(data.draw(nodes), np.array([1.0, number, 0]))
        else:
            node = data.draw(nodes)
            world.learn(node, np.array([0, 0, 2.0**-number]))  # no two exchanges are alike
            getattr(world, action)(node)
    world.settle()
    world.check()
    assert max(world.moved.values(), default=1) == 1
