"""Links: when messages arrive, in closed form, and which never do."""

import heapq
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import HEADER_BYTES, MILLISECOND, SECOND, Message, Seeds
from flwr_decentral.sim.links import Links, Transfer, transfer_ns
from flwr_decentral.sim.scenario import Network, Outage, Partition, Scenario

KB_PER_MS = 8e6
"""Bits per second at which a message of 1,000 bytes takes a millisecond."""


def make(nodes=4, seed=1, outages=(), partitions=(), **network) -> Links:
    network = {"latency": 0} | network
    scenario = Scenario(network=Network(**network), outages=outages, partitions=partitions)
    return Links(scenario.resolve(nodes, Seeds(seed)), Seeds(seed))


def message(step=0, nbytes=1000) -> Message:
    payload = np.zeros((nbytes - HEADER_BYTES) // 4, np.float32)
    return Message(kind="model", step=step, payload=payload)


def deliver(links, sends) -> dict[int, int | None]:
    """Send what ``(at, src, dst, nbytes)`` says; return when each arrives, None if it never does.

    Messages bear the numbers of their sends.
    """
    transfers, arrivals = {}, {}
    heap = [(at, 1, number, "send") for number, (at, *_) in enumerate(sends)]
    heapq.heapify(heap)
    while heap:
        now, _, number, what = heapq.heappop(heap)
        if what == "first byte":
            arrivals[number] = links.arrival(transfers[number])
            continue
        _, src, dst, nbytes = sends[number]
        if what == "send":
            links.queue(src, dst, message(number, nbytes))
        while (transfer := links.start(src, now)) is not None:
            started = transfer.message.step
            transfers[started] = transfer
            heapq.heappush(heap, (transfer.sent, 1, started, "uplink free"))
            if transfer.lost:
                arrivals[started] = None
            elif links.in_order(transfer.dst):
                arrivals[started] = links.arrival(transfer)
            else:
                heapq.heappush(heap, (links.first_byte(transfer), 0, started, "first byte"))
    for number, at in arrivals.items():
        if at is not None and links.broken(transfers[number], at):
            arrivals[number] = None
    assert set(arrivals) == set(range(len(sends)))
    return arrivals


def milliseconds(arrivals) -> list[float]:
    return [arrivals[number] / MILLISECOND for number in sorted(arrivals)]


# --- uplink and latency ---------------------------------------------------------------------------


@pytest.mark.parametrize("latency", [0, 20 * MILLISECOND, 123_456_789])
@pytest.mark.parametrize(("nbytes", "bps"), [(1000, 8e6), (64, 512), (89_864, 60e6), (1000, 7e6)])
def test_an_uplink_carries_one_message_at_a_time(nbytes, bps, latency):
    one = math.ceil(Fraction(nbytes * 8 * SECOND) / Fraction(bps))
    links = make(uplink=bps, latency=latency / SECOND)
    arrivals = deliver(links, [(0, 0, k % 3 + 1, nbytes) for k in range(7)])
    assert arrivals == {k: (k + 1) * one + latency for k in range(7)}


def test_a_transfer_takes_whole_nanoseconds_rounded_up():
    assert transfer_ns(1, 8e9) == 1
    assert transfer_ns(1, 16e9) == 1
    assert transfer_ns(3, 16e9) == 2
    assert transfer_ns(10**9, 8e9) == SECOND
    assert transfer_ns(10**9, math.inf) == 0


def test_uplinks_do_not_share():
    links = make(uplink=[KB_PER_MS, KB_PER_MS / 2, None, None])
    sends = [(0, 0, 3, 1000), (0, 1, 3, 1000), (0, 2, 3, 1000), (0, 1, 3, 1000)]
    assert milliseconds(deliver(links, sends)) == [1, 2, 0, 4]


def test_an_idle_uplink_starts_at_once_and_a_busy_one_does_not():
    links = make(uplink=KB_PER_MS)
    assert links.start(0, 5) is None
    assert links.is_idle(0, 5)
    links.queue(0, 1, message())
    assert not links.is_idle(0, 5)
    transfer = links.start(0, 5)
    assert transfer == Transfer(0, 1, transfer.message, 1000, 5, 5 + MILLISECOND, False)
    assert not links.is_idle(0, 5 + MILLISECOND - 1)
    links.queue(0, 2, message())
    assert links.start(0, 5 + MILLISECOND - 1) is None
    assert not links.is_idle(0, 5 + MILLISECOND)
    assert links.start(0, 5 + MILLISECOND).dst == 2
    assert links.is_idle(1, 0)


def test_a_rested_uplink_has_saved_nothing_up():
    links = make(uplink=KB_PER_MS)
    sends = [(at * MILLISECOND, 0, 1, 1000) for at in (0, 10, 10)]
    assert milliseconds(deliver(links, sends)) == [1, 11, 12]


def test_latency_is_that_of_the_pair():
    matrix = [[0, 0.003, 0.007], [0.001, 0, 0.001], [0.001, 0.001, 0]]
    links = make(3, uplink=KB_PER_MS, latency=matrix)
    sends = [(0, 0, 1, 1000), (0, 0, 2, 1000), (0, 1, 0, 1000), (0, 2, 0, 1000)]
    assert milliseconds(deliver(links, sends)) == [1 + 3, 2 + 7, 1 + 1, 1 + 1]


def test_unlimited_links_need_the_latency_alone():
    arrivals = deliver(make(latency="20 ms"), [(7, 0, 1, 10**6)] * 5)
    assert set(arrivals.values()) == {7 + 20 * MILLISECOND}


# --- downlink -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("up", "down", "expected"),
    [
        (1, 10, [1, 1]),  # slow uplinks into a fast downlink pass side by side
        (1, 2, [1, 1]),  # together they just fill it
        (10, 1, [1, 2]),  # fast uplinks into a slow downlink have to queue
        (None, 1, [1, 2]),
        (1, 1, [1, 2]),
        (1, None, [1, 1]),
    ],
)
@pytest.mark.parametrize("latency", ["5 ms", [[0.005] * 3] * 3])
def test_two_senders_at_once(up, down, expected, latency):
    uplink, downlink = (rate and rate * KB_PER_MS for rate in (up, down))
    links = make(3, uplink=uplink, downlink=downlink, latency=latency)
    arrivals = deliver(links, [(0, 0, 2, 1000), (0, 1, 2, 1000)])
    assert milliseconds(arrivals) == [5 + at for at in expected]


@pytest.mark.parametrize(("up", "down"), [(1, 1), (1, 4), (4, 1), (2, 1)])
def test_one_message_takes_the_slower_of_both_links_and_not_their_sum(up, down):
    links = make(uplink=up * KB_PER_MS, downlink=down * KB_PER_MS, latency="3 ms")
    assert milliseconds(deliver(links, [(0, 0, 1, 1000)])) == [3 + 1 / min(up, down)]


def test_a_stream_runs_at_the_rate_of_the_slower_link():
    links = make(uplink=4 * KB_PER_MS, downlink=KB_PER_MS)
    assert milliseconds(deliver(links, [(0, 0, 1, 1000)] * 4)) == [1, 2, 3, 4]


def test_a_rested_downlink_has_saved_nothing_up():
    links = make(downlink=KB_PER_MS)
    sends = [(at * MILLISECOND, src, 3, 1000) for at, src in [(0, 0), (0, 1), (9, 0), (9, 2)]]
    assert milliseconds(deliver(links, sends)) == [1, 2, 10, 11]


def test_downlinks_do_not_share():
    links = make(downlink=[KB_PER_MS, KB_PER_MS / 3, None, KB_PER_MS])
    sends = [(0, 3, 0, 1000), (0, 3, 1, 1000), (0, 3, 2, 1000)]
    assert milliseconds(deliver(links, sends)) == [1, 3, 0]


def test_a_downlink_serves_first_bytes_in_their_order():
    far, near = 0.010, 0.001
    links = make(3, downlink=KB_PER_MS, latency=[[0, 0, far], [0, 0, near], [0, 0, 0]])
    assert not links.in_order(2)
    sends = [(0, 0, 2, 1000), (8_500_000, 1, 2, 1000), (9_500_000, 1, 2, 1000)]
    # The first byte from afar comes in the middle of the second message.
    assert milliseconds(deliver(links, sends)) == [11.5, 10.5, 12.5]


SENDS = st.lists(
    st.tuples(
        st.integers(0, 20).map(lambda at: at * 100_000),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(16, 800).map(lambda words: 4 * words),
    ),
    max_size=12,
)
RATES = st.lists(st.sampled_from([None, 1e6, 8e6, 33e6]), min_size=3, max_size=3)
LATENCIES = st.lists(
    st.lists(st.sampled_from([0.0, 0.0001, 0.00037, 0.002]), min_size=3, max_size=3),
    min_size=3,
    max_size=3,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(SENDS, RATES, RATES, LATENCIES)
def test_a_downlink_is_a_queue_served_at_its_bandwidth(sends, uplink, downlink, latency):
    """Against the closed form of a queue: the worst of all busy periods that end with a message."""
    arrivals = deliver(make(3, uplink=uplink, downlink=downlink, latency=latency), sends)
    on_uplink = uplink_times(sends, uplink)
    for dst in range(3):
        came = []
        for number, (_, src, to, nbytes) in enumerate(sends):
            if to == dst:
                first, last = (at + round(latency[src][dst] * SECOND) for at in on_uplink[number])
                came.append((first, last, ns(nbytes, downlink[dst]), number))
        came.sort()
        if any(one[0] == other[0] for one, other in pairwise(came)):
            continue  # which of two first bytes at once is served first is not said
        for k, (_, last, _, number) in enumerate(came, 1):
            work = [sum(entry[2] for entry in came[begin:k]) for begin in range(k)]
            queue = [came[begin][0] + work[begin] for begin in range(k)]
            assert arrivals[number] == (last if downlink[dst] is None else max(last, *queue))


def ns(nbytes: int, bps: float | None) -> int:
    return 0 if bps is None else math.ceil(Fraction(nbytes * 8 * SECOND) / Fraction(bps))


def uplink_times(sends, uplink) -> dict[int, tuple[int, int]]:
    """Work out when the uplink starts and ends with each message."""
    times, free = {}, [0] * len(uplink)
    for at, number in sorted((at, number) for number, (at, *_) in enumerate(sends)):
        _, src, _, nbytes = sends[number]
        start = max(at, free[src])
        free[src] = start + ns(nbytes, uplink[src])
        times[number] = (start, free[src])
    return times


@settings(max_examples=60, deadline=None)
@given(SENDS, RATES, RATES, LATENCIES)
def test_messages_of_a_pair_stay_in_order(sends, uplink, downlink, latency):
    arrivals = deliver(make(3, uplink=uplink, downlink=downlink, latency=latency), sends)
    for pair in {send[1:3] for send in sends}:
        numbers = [n for _, n in sorted((s[0], n) for n, s in enumerate(sends) if s[1:3] == pair)]
        times = [arrivals[number] for number in numbers]
        assert times == sorted(times)


@settings(max_examples=40, deadline=None)
@given(SENDS, RATES, RATES)
def test_a_matrix_of_equal_latencies_is_one_latency(sends, uplink, downlink):
    scalar = make(3, uplink=uplink, downlink=downlink, latency=0.001)
    matrix = make(3, uplink=uplink, downlink=downlink, latency=[[0.001] * 3] * 3)
    assert all(map(scalar.in_order, range(3)))
    assert [matrix.in_order(dst) for dst in range(3)] == [rate is None for rate in downlink]
    assert deliver(scalar, sends) == deliver(matrix, sends)


# --- dropping -------------------------------------------------------------------------------------


def queued(links) -> list[Message]:
    """Queue three messages to node 1 and two to node 2, and start the first."""
    messages = [message(step) for step in range(5)]
    for dst, item in zip([1, 2, 1, 2, 1], messages, strict=True):
        links.queue(0, dst, item)
    assert links.start(0, 0).message is messages[0]
    return messages


def rest(links, src=0) -> list[int]:
    """Work off an outbox; return the steps."""
    found, now = [], MILLISECOND
    while (transfer := links.start(src, now)) is not None:
        found.append(transfer.message.step)
        now = transfer.sent
    return found


def test_drop_takes_all_that_has_not_been_started():
    links = make(uplink=KB_PER_MS)
    messages = queued(links)
    assert links.drop(0) == messages[1:]
    assert links.drop(0) == []
    assert rest(links) == []


def test_drop_to_one_node_keeps_the_order_of_the_others():
    links = make(uplink=KB_PER_MS)
    messages = queued(links)
    links.queue(1, 0, message(9))
    assert links.drop(0, 1) == [messages[2], messages[4]]
    assert rest(links) == [1, 3]
    assert rest(links, src=1) == [9]


def test_what_was_started_is_not_dropped():
    links = make(uplink=KB_PER_MS)
    links.queue(0, 1, message())
    transfer = links.start(0, 0)
    assert links.drop(0) == []
    assert links.arrival(transfer) == MILLISECOND
    links.queue(0, 1, message())
    assert links.start(0, MILLISECOND - 1) is None, "it still holds the uplink"


# --- loss -----------------------------------------------------------------------------------------


def losses(links, src=0, count=1000) -> list[bool]:
    for _ in range(count):
        links.queue(src, (src + 1) % 4, message(nbytes=64))
    return [links.start(src, 0).lost for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.01, 0.3, 0.9])
def test_messages_are_lost_at_their_rate(loss):
    count = 20_000
    lost = sum(losses(make(loss=loss), count=count))
    assert abs(lost - count * loss) < 4 * math.sqrt(count * loss * (1 - loss))


def test_losses_follow_the_seed():
    first = losses(make(loss=0.5))
    assert losses(make(loss=0.5)) == first
    assert losses(make(loss=0.5, seed=2)) != first


def test_each_sender_has_dice_of_its_own():
    alone = losses(make(loss=0.5))
    links = make(loss=0.5)
    others = losses(links, src=1)
    assert losses(links) == alone, "what another node sends changes nothing"
    agreements = sum(mine == theirs for mine, theirs in zip(alone, others, strict=True))
    assert abs(agreements - 500) < 4 * math.sqrt(250)


def test_nothing_is_lost_without_loss():
    assert not any(losses(make()))


def test_what_is_lost_has_used_the_uplink_alone():
    links = make(uplink=KB_PER_MS, downlink=KB_PER_MS / 10, loss=0.5, seed=3)
    arrivals = deliver(links, [(0, 0, 1, 1000)] * 20)
    came = [number for number, at in sorted(arrivals.items()) if at is not None]
    assert came[0] > 0
    assert len(came) < 20
    times = [(came[0] + 10 * (k + 1)) * MILLISECOND for k in range(len(came))]
    assert [arrivals[number] for number in came] == times


# --- broken links ---------------------------------------------------------------------------------


def is_cut(start, until, src=0, dst=1, **scenario) -> bool:
    transfer = Transfer(src, dst, message(), 1000, start, until, False)
    return make(**scenario).broken(transfer, until)


TIMES = [
    (0, 9, False),
    (0, 10, True),  # a node is down from the first moment of its outage
    (9, 11, True),
    (9, 25, True),  # that it is back by then does not help
    (10, 10, True),  # sent in the moment it went down
    (20, 25, False),  # sent when it was back
]


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(("start", "until", "cut"), TIMES)
def test_an_outage_of_either_end_cuts_what_is_under_way(node, start, until, cut):
    outages = [Outage(node=node, start=10e-9, end=20e-9)]
    assert is_cut(start, until, outages=outages) == cut
    assert not is_cut(start, until, src=2, dst=3, outages=outages)


@pytest.mark.parametrize(("start", "until", "cut"), TIMES)
def test_a_partition_cuts_what_crosses_it(start, until, cut):
    partitions = [Partition(groups=[[0, 2]], start=10e-9, end=20e-9)]
    for src, dst in [(0, 1), (1, 0), (3, 2)]:
        assert is_cut(start, until, src, dst, partitions=partitions) == cut
    for src, dst in [(0, 2), (1, 3)]:
        assert not is_cut(start, until, src, dst, partitions=partitions)


def test_every_outage_counts():
    outages = [Outage(node=1, start=start, end=start + 1) for start in (1, 3, 5)]
    assert is_cut(int(2.5 * SECOND), 4 * SECOND, outages=outages)
    assert not is_cut(2 * SECOND, int(2.5 * SECOND), outages=outages)
    assert is_cut(0, SECOND, outages=[*outages, Outage(node=0, start=1)])


def test_what_is_cut_before_its_first_byte_leaves_the_downlink_alone():
    outages = [Outage(node=0, start="2 ms", end="3 ms")]
    links = make(downlink=KB_PER_MS, latency="5 ms", outages=outages)
    assert deliver(links, [(0, 0, 1, 1000), (0, 2, 1, 1000)]) == {0: None, 1: 6 * MILLISECOND}
    links = make(downlink=KB_PER_MS, latency="1 ms", outages=outages)
    assert deliver(links, [(0, 0, 1, 1000), (0, 2, 1, 1000)]) == {0: None, 1: 3 * MILLISECOND}


def test_a_node_that_went_down_starts_with_idle_links():
    links = make(uplink=KB_PER_MS, downlink=KB_PER_MS / 100)
    for src, dst in [(0, 1), (1, 0)]:
        links.queue(src, dst, message(nbytes=10_000))
        assert links.arrival(links.start(src, 0)) == 1000 * MILLISECOND
    links.reset(0, 2 * MILLISECOND)
    for src, dst in [(0, 1), (1, 0)]:
        links.queue(src, dst, message())
    assert links.start(0, 2 * MILLISECOND).sent == 3 * MILLISECOND
    assert links.start(1, 2 * MILLISECOND) is None, "only the links of node 0 are idle"
    to_node_0 = links.start(1, 10 * MILLISECOND)
    assert links.arrival(to_node_0) == 110 * MILLISECOND


def test_a_reset_never_makes_a_link_busy():
    links = make(uplink=KB_PER_MS)
    links.reset(0, 5 * MILLISECOND)
    links.queue(0, 1, message())
    assert links.start(0, 0).sent == MILLISECOND
