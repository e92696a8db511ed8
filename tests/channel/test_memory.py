"""Links within a process: what arrives, in which order, and what a broken link takes with it."""

import asyncio
from collections import deque

import networkx as nx
import pytest

from flwr_decentral.channel.memory import Switchboard, carried_by
from flwr_decentral.core import Message, RuntimeFault

from .loopback import Diary


def note(step):
    return Message(kind="note", step=step)


def steps(diary):
    return [(source, message.step) for source, message in diary.messages]


class World:
    """Three nodes, all linked, whose parcels are held until the test moves them."""

    def __init__(self, carry=None):
        self.parcels = []
        self.board = Switchboard(nx.complete_graph(3), carry or self.parcels.append)
        self.diaries = [Diary() for _ in range(3)]
        self.links = [self.board.transport(node) for node in range(3)]

    def open(self, *nodes):
        for node in nodes or range(3):
            asyncio.run(self.links[node].open(self.diaries[node]))
        return self


def test_links_come_up_once_both_ends_are_open():
    world = World().open(0)
    assert world.diaries[0].ups == []
    assert not world.links[0].send(1, note(1))
    world.open(1)
    assert (world.diaries[0].ups, world.diaries[1].ups) == ([1], [0])
    world.open(2)
    assert (world.diaries[0].ups, world.diaries[2].ups) == ([1, 2], [0, 1])
    with pytest.raises(RuntimeFault, match="node 2 is open already"):
        world.open(2)


def test_parcels_arrive_in_the_order_in_which_they_are_delivered():
    world = World().open()
    for step in range(3):
        assert world.links[0].send(1, note(step))
    assert world.diaries[1].messages == []
    for number in (2, 0, 1):
        parcel = world.parcels[number]
        assert parcel.start()
        assert not parcel.start()
        assert parcel.deliver()
        assert not parcel.deliver(), "at most once"
    assert steps(world.diaries[1]) == [(0, 2), (0, 0), (0, 1)]


def test_what_has_not_started_can_be_dropped():
    world = World().open()
    for peer, step in ((1, 0), (2, 1), (1, 2), (1, 3)):
        world.links[0].send(peer, note(step))
    assert world.parcels[0].start()
    assert [message.step for message in world.links[0].drop(1)] == [2, 3]
    assert not world.parcels[2].start()
    assert [message.step for message in world.links[0].drop()] == [1]
    assert world.links[0].drop() == []
    assert world.parcels[0].deliver(), "it was on its way"


def test_the_uplink_is_idle_after_the_last_of_the_queue():
    world = World().open()
    for step in range(2):
        world.links[0].send(1, note(step))
    for parcel, idles in zip(world.parcels, (0, 1), strict=True):
        parcel.start()
        parcel.leave()
        assert world.diaries[0].idles == idles


def test_a_broken_link_takes_what_is_on_it_and_hands_back_what_is_queued():
    world = World().open()
    for peer, step in ((1, 0), (1, 1), (2, 2)):
        world.links[0].send(peer, note(step))
    world.parcels[0].start()
    world.board.disconnect(0, 1)
    world.board.disconnect(0, 1)
    assert (world.diaries[0].downs, world.diaries[1].downs) == ([1], [0])
    assert [message.step for message in world.diaries[0].dropped] == [1]
    assert not world.parcels[0].deliver()
    assert not world.links[0].send(1, note(5))
    world.board.connect(0, 1)
    world.board.connect(0, 1)
    assert world.diaries[0].ups == [1, 2, 1]
    assert not world.parcels[0].deliver(), "the new link is another one"
    world.links[0].send(1, note(6))
    world.parcels[-1].start()
    assert world.parcels[-1].deliver()
    assert steps(world.diaries[1]) == [(0, 6)]


def test_one_end_may_learn_of_a_break_before_the_other():
    world = World().open()
    world.links[0].lose(1)
    assert world.links[1].send(0, note(1))
    world.parcels[0].start()
    assert not world.parcels[0].deliver(), "nobody listens for it"
    assert world.diaries[1].downs == []


def test_a_transport_that_closes_delivers_what_is_queued_and_is_not_called_again():
    world = World().open()
    world.links[0].send(1, note(1))
    world.links[2].send(0, note(2))
    asyncio.run(world.links[0].close())
    assert steps(world.diaries[1]) == [(0, 1)]
    assert (world.diaries[0].downs, world.diaries[1].downs, world.diaries[2].downs) == (
        [],
        [0],
        [0],
    )
    world.parcels[-1].start()
    assert not world.parcels[-1].deliver()
    assert not world.links[1].send(0, note(3))
    world.open(0)
    assert world.diaries[1].ups == [0, 2, 0]


def test_a_loop_moves_parcels_soon_and_in_order():
    calls = deque()
    world = World(carried_by(calls.append)).open()
    for step in range(3):
        world.links[0].send(1, note(step))
    world.links[0].drop(2)
    assert steps(world.diaries[1]) == []
    while calls:
        calls.popleft()()
    assert steps(world.diaries[1]) == [(0, 0), (0, 1), (0, 2)]
    assert world.diaries[0].idles == 1
    world.links[0].send(1, note(3))
    world.links[0].drop()
    calls.popleft()()
    assert len(world.diaries[1].messages) == 3
