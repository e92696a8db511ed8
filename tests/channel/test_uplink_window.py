"""How much a link keeps under way: on simulated lines that are slow, long, shared or changing."""

import heapq

import numpy as np
import pytest

from flwr_decentral.channel.uplink import FIRST_WINDOW, LEAST_WINDOW, TARGET, WINDOW, Uplink
from flwr_decentral.core import MILLISECOND, SECOND, Message

FRAGMENT = 5_000


class Sender:
    """An uplink whose links always have something to send, on one line that they share.

    Parameters
    ----------
    links : int
        How many there are.
    nbytes : int
        Bytes of each payload.
    rate : float
        Bytes per second of the line; may change.
    trip : int
        Nanoseconds there and back; may change.
    busy : function
        When an acknowledgement that would come at a time comes indeed.
    """

    def __init__(self, links, nbytes, rate, trip, *, busy=lambda at: at, **other) -> None:
        self.uplink = Uplink(1 << 30, **other)
        self.message = Message(kind="m", step=0, payload=np.zeros(nbytes // 4, np.float32))
        self.links = range(links)
        self.rate, self.trip, self.busy = rate, trip, busy
        self.now = self.carried = 0
        self._line_free = 0
        self._count = dict.fromkeys(self.links, 0)
        self._due: list[tuple[int, int, int]] = []
        for to in self.links:
            self.uplink.open(to)
        for _ in range(3 + 2 * WINDOW // nbytes):
            for to in self.links:
                self.uplink.put(to, self.message)

    def run(self, seconds: float) -> float:
        """Let time pass; return the bytes per second that were acknowledged."""
        end, before = self.now + round(seconds * SECOND), self.carried
        while True:
            self._send()
            alarm = self.uplink.free_at if self.uplink.free_at > self.now else end
            until = min(alarm, self._due[0][0] if self._due else end)
            if until >= end:
                self.now = end
                return (self.carried - before) / seconds
            self.now = until
            while self._due and self._due[0][0] <= self.now:
                self._acknowledge(*heapq.heappop(self._due)[1:])

    def _send(self) -> None:
        while (piece := self.uplink.next(self.now)) is not None:
            self._line_free = max(self._line_free, self.now) + round(
                piece.size * SECOND / self.rate
            )
            if piece.start == 0:
                self._count[piece.to] += 1
            if piece.is_last:
                at = self.busy(self._line_free + self.trip)
                heapq.heappush(self._due, (at, piece.to, self._count[piece.to]))

    def _acknowledge(self, to: int, count: int) -> None:
        assert self.uplink.acknowledge(to, count, self.now)
        self.carried += self.message.nbytes
        self.uplink.put(to, self.message)

    @property
    def under_way(self) -> int:
        """Bytes that all links have under way."""
        return sum(self.uplink.in_flight(to) for to in self.links)


def test_a_link_begins_with_little():
    sender = Sender(1, FRAGMENT, 1e9, 50 * MILLISECOND)
    sender.run(0.01)
    assert FIRST_WINDOW - FRAGMENT - 100 < sender.under_way <= FIRST_WINDOW


@pytest.mark.slow
@pytest.mark.parametrize("trip", [1, 40])
@pytest.mark.parametrize(("links", "rate"), [(1, 125e3), (4, 125e3), (4, 250e3), (12, 250e3)])
def test_links_that_share_a_slow_line_keep_little_under_way_and_it_busy(links, rate, trip):
    """Little is what the line holds, two fragments for each link, and what the target adds."""
    sender = Sender(links, FRAGMENT, rate, trip * MILLISECOND)
    sender.run(10)
    under_way = []
    for _ in range(40):
        assert sender.run(1) == pytest.approx(rate, rel=0.05)
        under_way.append(sender.under_way)
    least = links * max(LEAST_WINDOW, 2 * FRAGMENT)
    assert np.mean(under_way) <= least + rate * (trip / 1000 + links * TARGET / SECOND)
    assert max(under_way) <= 4 * least


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [1_000, 36_000, 150_000])
def test_a_fast_line_with_a_long_way_is_filled(nbytes):
    sender = Sender(1, nbytes, 10e6, 50 * MILLISECOND)
    sender.run(1)
    assert sender.under_way >= 500_000
    assert sender.run(5) >= 0.95 * 10e6
    assert sender.under_way <= 10e6 * (0.05 + TARGET / SECOND) * 1.1 + 2 * nbytes


def test_no_link_has_more_than_a_mebibyte_under_way():
    sender = Sender(1, FRAGMENT, 1e9, 200 * MILLISECOND)
    sender.run(5)
    assert WINDOW - FRAGMENT - 100 < sender.under_way <= WINDOW


@pytest.mark.parametrize("nbytes", [600_000, 1_000_000, 3_000_000])
@pytest.mark.parametrize("rate", [1e6, 100e6])
def test_of_messages_that_are_longer_there_are_two(nbytes, rate):
    sender = Sender(1, nbytes, rate, 5 * MILLISECOND)
    sender.run(20)
    assert nbytes < sender.under_way <= 2 * (nbytes + 100)
    assert sender.run(20) == pytest.approx(rate, rel=0.1)


@pytest.mark.slow
def test_a_line_that_becomes_slow_and_fast_again_is_followed():
    sender = Sender(1, FRAGMENT, 10e6, 50 * MILLISECOND)
    sender.run(3)
    assert sender.under_way >= 500_000
    sender.rate = 100e3
    sender.run(20)
    assert sender.under_way <= 2 * LEAST_WINDOW
    assert sender.run(5) == pytest.approx(100e3, rel=0.05)
    sender.rate = 10e6
    sender.run(2)
    assert sender.under_way >= 500_000
    assert sender.run(3) >= 0.95 * 10e6


@pytest.mark.slow
def test_a_way_that_becomes_longer_is_not_taken_for_queueing_for_ever():
    sender = Sender(1, FRAGMENT, 10e6, 5 * MILLISECOND)
    sender.run(2)
    sender.trip = 60 * MILLISECOND
    sender.run(20)
    assert sender.under_way >= 500_000
    assert sender.run(3) >= 0.95 * 10e6


def test_a_consumer_that_is_busy_for_a_moment_costs_little():
    """Every second it does nothing for 100 ms, and then acknowledges all that has come."""

    def busy(at: int) -> int:
        into = at % SECOND
        return at if into > 100 * MILLISECOND else at - into + 100 * MILLISECOND

    sender = Sender(1, FRAGMENT, 10e6, 50 * MILLISECOND, busy=busy)
    sender.run(2)
    assert sender.run(10) >= 0.75 * 10e6


def test_short_messages_do_not_make_long_ones_look_late():
    """A long message takes 40 ms on this line by itself; the short ones between do not."""
    sender = Sender(1, 40_000, 1e6, 100 * MILLISECOND)
    short = Message(kind="s", step=0, payload=np.zeros(10, np.float32))
    long = sender.message
    sender.message = short
    for _ in range(100):
        sender.uplink.put(0, short)
    sender.run(1)
    sender.message = long
    for _ in range(20):
        sender.uplink.put(0, long)
    sender.run(10)
    assert sender.run(10) >= 0.9 * 1e6


def test_a_link_that_has_nothing_to_wait_for_does_not_grow():
    """Two messages each 100 ms: the window is not what holds them back."""
    uplink = Uplink(1 << 30)
    uplink.open(0)
    message = Message(kind="m", step=0, payload=np.zeros(FRAGMENT // 4, np.float32))
    for count in range(2, 400, 2):
        now = count * 50 * MILLISECOND
        for _ in range(2):
            uplink.put(0, message)
            assert uplink.next(now) is not None
        assert uplink.acknowledge(0, count, now + MILLISECOND)
    for _ in range(300):
        uplink.put(0, message)
    while uplink.next(21 * SECOND):
        pass
    assert uplink.in_flight(0) <= FIRST_WINDOW


def test_a_capped_link_with_a_long_way_reaches_its_cap():
    sender = Sender(1, FRAGMENT, 1e9, 50 * MILLISECOND, bps=40e6)
    sender.run(2)
    assert sender.run(5) >= 0.9 * 40e6 / 8
