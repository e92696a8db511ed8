"""The uplink: order, credit, pieces and the cap, without a socket."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.channel.uplink import FIRST_WINDOW, WINDOW, Piece, Uplink
from flwr_decentral.core import MILLISECOND, SECOND, AlgorithmError, Message
from flwr_decentral.ops import codecs

from .loopback import model

LIMIT = 1 << 30


def uplink(*peers: int, **other) -> Uplink:
    link = Uplink(LIMIT, **other)
    for peer in peers:
        link.open(peer)
    return link


def take(link: Uplink, now: int = 0) -> list[Piece]:
    """Take pieces for as long as there is room."""
    pieces = []
    while (piece := link.next(now)) is not None:
        pieces.append(piece)
    return pieces


def steps(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [(piece.to, piece.parcel.message.step) for piece in pieces if piece.is_last]


def test_first_in_first_out_over_all_links():
    link = uplink(1, 2)
    for step, to in enumerate((2, 1, 1, 2)):
        assert link.put(to, model(10, step))
    assert steps(take(link)) == [(2, 0), (1, 1), (1, 2), (2, 3)]
    assert link.waiting == link.backlog == 0


def test_a_message_is_cut_and_goes_on_before_those_behind_it():
    link = uplink(1, 2)
    link.put(1, model(700_000, 0))
    link.put(2, model(1, 1))
    pieces = take(link)
    assert [(p.to, p.start, p.stop) for p in pieces] == [
        (1, 0, 1 << 20),
        (1, 1 << 20, 2 << 20),
        (1, 2 << 20, 2_800_000),
        (2, 0, 4),
    ]
    assert [p.is_last for p in pieces] == [False, False, True, True]


def test_a_link_that_does_not_take_is_passed_over_and_resumes_where_it_was():
    link = uplink(1, 2)
    for step, to in enumerate((1, 2, 1, 2)):
        link.put(to, model(400_000, step))
    first = link.next(0)
    assert (first.to, first.stop) == (1, 1 << 20)
    link.block(1)
    assert steps(take(link)) == [(2, 1), (2, 3)]
    link.unblock(1)
    rest = take(link)
    assert rest[0].start == 1 << 20
    assert steps(rest) == [(1, 0), (1, 2)]


@pytest.mark.parametrize(("size", "first"), [(1 << 20, 2), (1000, FIRST_WINDOW // (4 * 1000 + 20))])
def test_two_messages_or_the_window_may_be_unacknowledged(size, first):
    link = uplink(1)
    payload = np.zeros(size, np.float32)
    for step in range(400):
        link.put(1, Message(kind="model", step=step, payload=payload))
    sent = len(steps(take(link)))
    assert sent == first
    assert link.in_flight(1) <= max(2 * (4 * size + 64), FIRST_WINDOW)
    assert link.acknowledge(1, 1, 0)
    sent += len(steps(take(link)))
    assert sent == (3 if first == 2 else first + 2)  # without queueing the window grows
    assert link.acknowledge(1, sent, 0)
    assert link.in_flight(1) == 0


def test_a_large_message_may_follow_a_small_one_and_a_small_one_waits_behind_large_ones():
    link = uplink(1)
    link.put(1, model(1, 0))
    for step in (1, 2):
        link.put(1, model(1 << 20, step))
    link.put(1, model(1, 3))
    assert steps(take(link)) == [(1, 0), (1, 1)]
    assert link.acknowledge(1, 1, 0)
    assert steps(take(link)) == [(1, 2)]
    assert link.acknowledge(1, 3, 0)
    assert steps(take(link)) == [(1, 3)]


@pytest.mark.parametrize("count", [-1, 2, 2**63])
def test_what_was_not_sent_cannot_be_acknowledged(count):
    link = uplink(1)
    link.put(1, model(1))
    take(link)
    assert not link.acknowledge(1, count, 0)
    assert link.acknowledge(1, 1, 0)
    assert not link.acknowledge(1, 0, 0)


def test_drop_keeps_what_has_been_begun_and_hands_back_the_rest_in_order():
    link = uplink(1, 2)
    messages = [model(600_000, 0), *(model(5, step) for step in range(1, 6))]
    for step, message in enumerate(messages):
        link.put(1 + step % 2, message)
    link.next(0)
    assert link.drop(1) == [messages[2], messages[4]]
    assert link.drop() == [messages[1], messages[3], messages[5]]
    assert steps(take(link)) == [(1, 0)]


def test_a_link_that_shuts_hands_back_what_was_not_begun():
    link = uplink(1, 2)
    messages = [model(600_000, 0), model(5, 1), model(5, 2)]
    for message in messages:
        link.put(1, message)
    link.next(0)
    assert link.shut(1) == messages[1:]
    assert not link.put(1, messages[0])
    assert link.waiting == 0
    assert link.in_flight(1) == 0


def test_what_has_been_begun_can_be_abandoned():
    link = uplink(1)
    message = model(600_000)
    link.put(1, message)
    assert link.abandon(1) is None
    link.next(0)
    assert link.abandon(1) is message
    assert link.next(0) is None
    assert link.acknowledge(1, 1, 0)  # the other end counts it as well


def test_a_cap_holds_for_all_links_together():
    """A megabit a second: 125 kB take a second, whoever gets them."""
    link = uplink(1, 2, bps=1e6)
    for step in range(10):
        link.put(1 + step % 2, model(31_250 // 2, step))  # half a second each
    now, finished = 0, []
    while link.waiting:
        while (piece := link.next(now)) is not None:
            assert piece.stop - piece.start <= 1 << 14  # and no burst
            link.acknowledge(piece.to, len(finished) // 2 + 1 if piece.is_last else 0, now)
            if piece.is_last:
                finished.append(now)
            if link.free_at > now:
                break
        now = max(link.free_at, now + 1)
    assert 4.9 * SECOND < link.free_at < 5.1 * SECOND
    assert len(finished) == 10


def test_a_fast_cap_cuts_larger_pieces_and_of_late_time_20_ms_are_made_up_for():
    link = uplink(1, bps=80e6)
    link.put(1, model(1 << 20, 0))
    assert link.next(0).stop == 1_000_000
    free = link.free_at
    assert 100 * MILLISECOND <= free < 101 * MILLISECOND
    assert link.next(free - 1) is None
    link.next(free + SECOND)
    assert link.free_at == pytest.approx(free + SECOND + 80 * MILLISECOND, abs=MILLISECOND)


@pytest.mark.parametrize(
    "payload",
    [np.zeros((2, 2), np.float32), np.zeros(4, np.float64), np.zeros(8, np.float32)[::2]],
)
def test_a_payload_that_is_no_row_of_float32_is_refused(payload):
    with pytest.raises(AlgorithmError, match="one contiguous row of float32"):
        uplink(1).put(1, Message(kind="m", step=0, payload=payload))


def test_an_unknown_form_is_refused():
    message = Message(kind="m", step=0, payload=np.zeros(4, np.float32), wire="bf16")
    with pytest.raises(AlgorithmError, match="the form 'bf16' on the wire; there are float32, "):
        uplink(1).put(1, message)


def test_a_shorter_form_is_written_once_for_all_neighbors_and_not_before_it_is_sent(monkeypatch):
    written = []

    def write(payload, wire):
        written.append(wire)
        return codecs.encode(payload, wire)

    monkeypatch.setattr("flwr_decentral.channel.uplink.encode", write)
    payload = codecs.rounded(np.linspace(-1, 1, 300, dtype=np.float32), "int8")
    link = uplink(0, 1, 2)
    for peer in range(3):
        assert link.put(peer, Message(kind="m", step=1, payload=payload, wire="int8"))
    assert not written
    pieces = take(link)
    assert [bytes(piece.body) for piece in pieces] == [codecs.encode(payload, "int8").tobytes()] * 3
    assert written == ["int8"]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 2), st.integers(0, 400_000)),
        st.tuples(st.just("next"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("consume"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("block"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("unblock"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("break"), st.integers(0, 2), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.slow
@settings(deadline=None)
@given(ACTIONS)
def test_whatever_happens_order_credit_and_accounts_hold(actions):
    """A link gets its messages whole, in order and once; the window holds; none is forgotten."""
    link = uplink(0, 1, 2)
    step, queued, returned = 0, set(), set()
    under_way: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    begun: dict[int, list[int]] = {0: [], 1: [], 2: []}
    consumed = dict.fromkeys(range(3), 0)
    blocked: set[int] = set()
    for count, (action, number, size) in enumerate(actions):
        now = count * 10 * MILLISECOND
        match action:
            case "put":
                link.put(number, Message(kind="m", step=step, payload=np.zeros(size, np.float32)))
                queued.add(step)
                step += 1
            case "next":
                for _ in range(number):
                    if (piece := link.next(now)) is None:
                        break
                    assert piece.to not in blocked
                    message = piece.parcel.message
                    if piece.start == 0:
                        assert message.step > max(begun[piece.to], default=-1)
                        begun[piece.to].append(message.step)
                        under_way[piece.to].append((message.step, piece.parcel.size))
                        total = sum(size for _, size in under_way[piece.to])
                        others = total - piece.parcel.size
                        assert not others or total <= max(2 * piece.parcel.size, WINDOW)
                    assert begun[piece.to][-1] == message.step
                    assert link.in_flight(piece.to) == sum(s for _, s in under_way[piece.to])
            case "consume":
                waiting = link._lanes[number].waiting
                unfinished = bool(waiting) and waiting[0].begun
                if len(under_way[number]) > unfinished:
                    under_way[number].pop(0)
                    consumed[number] += 1
                    assert link.acknowledge(number, consumed[number], now)
            case "block":
                link.block(number)
                blocked.add(number)
            case "unblock":
                link.unblock(number)
                blocked.discard(number)
            case "drop":
                returned |= {message.step for message in link.drop(number)}
            case "break":
                returned |= {message.step for message in link.shut(number)}
                link.open(number)
                blocked.discard(number)
                under_way[number], consumed[number] = [], 0
    still = {parcel.message.step for lane in link._lanes.values() for parcel in lane.waiting}
    sent = {step for steps in begun.values() for step in steps}
    assert returned | still | sent == queued
    assert not returned & sent
