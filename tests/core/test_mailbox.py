import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import Letter, Mailbox


def letter(sender, slot, step, value=0.0):
    return Letter(sender, slot, step, np.full(2, value, np.float32))


LETTERS = st.lists(
    st.builds(letter, st.integers(0, 3), st.integers(0, 2), st.integers(0, 5)), max_size=40
)


def test_a_newer_letter_replaces_an_older_one():
    box, old, new = Mailbox(), letter(1, 0, step=3), letter(1, 0, step=4)
    assert box.put(old) is None
    assert box.put(new) is old
    assert list(box) == [new]


@pytest.mark.parametrize("step", [2, 3])
def test_a_letter_that_was_overtaken_or_comes_twice_is_returned(step):
    box, held, late = Mailbox(), letter(1, 0, step=3), letter(1, 0, step=step)
    box.put(held)
    assert box.put(late) is late
    assert next(iter(box)) is held


def test_slots_and_senders_are_apart():
    box = Mailbox()
    for sender, slot in [(2, 0), (0, 1), (0, 0), (10, 0)]:
        assert box.put(letter(sender, slot, step=1)) is None
    assert [held[:2] for held in box] == [(0, 0), (0, 1), (2, 0), (10, 0)]


@given(LETTERS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_newest_are_held_whatever_the_order_of_arrival(letters, random):
    newest = {}
    for item in letters:
        newest[item[:2]] = max(newest.get(item[:2], -1), item.step)
    shuffled = list(letters)
    random.shuffle(shuffled)
    box = Mailbox()
    for item in shuffled:
        box.put(item)
    assert [item[:3] for item in box] == [(*key, newest[key]) for key in sorted(newest)]
    assert len(box) == len(newest)


@given(LETTERS)
@settings(max_examples=50, deadline=None)
def test_every_letter_is_either_held_or_returned_once(letters):
    box, returned = Mailbox(), []
    for item in letters:
        back = box.put(item)
        if back is not None:
            returned.append(back)
    seen = sorted(map(id, [*returned, *box]))
    assert seen == sorted(map(id, letters))


def test_what_was_drained_still_decides_what_is_new():
    box, first = Mailbox(), letter(1, 0, step=5)
    box.put(first)
    assert box.drain() == [first]
    assert len(box) == 0
    assert box.drain() == []
    for late in (letter(1, 0, step=4), letter(1, 0, step=5)):
        assert box.put(late) is late
    assert len(box) == 0
    assert box.put(letter(1, 0, step=6)) is None


def test_a_sender_that_was_forgotten_may_start_over():
    box = Mailbox()
    for sender in (1, 2):
        box.put(letter(sender, 0, step=5))
    box.drain()
    box.forget(1)
    assert box.put(letter(1, 0, step=1)) is None
    assert box.put(letter(2, 0, step=1)) is not None


def test_discard_takes_out_one_sender():
    box = Mailbox()
    for sender, slot in [(1, 1), (2, 0), (1, 0)]:
        box.put(letter(sender, slot, step=1))
    assert [item[:2] for item in box.discard(1)] == [(1, 0), (1, 1)]
    assert [item[:2] for item in box] == [(2, 0)]
    assert box.discard(1) == []


def test_restore_holds_what_snapshot_listed_and_shares_nothing():
    box, other = Mailbox(), Mailbox()
    box.put(letter(2, 1, step=3, value=7.0))
    box.put(letter(0, 0, step=1, value=5.0))
    snapshot = box.snapshot()
    other.put(letter(9, 9, step=9))
    other.restore(snapshot)
    snapshot["letters"][0][3][:] = -1
    next(iter(box)).payload[:] = -2
    assert [item[:3] for item in other] == [(0, 0, 1), (2, 1, 3)]
    assert [item.payload.tolist() for item in other] == [[5.0, 5.0], [7.0, 7.0]]
    assert isinstance(next(iter(other)), Letter)
    other.drain()
    assert other.put(letter(2, 1, step=3)) is not None
    assert other.put(letter(9, 9, step=1)) is None
