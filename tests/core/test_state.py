import numpy as np
import pytest

from flwr_decentral.core import AlgorithmError, Letter, Mailbox, Seeds
from flwr_decentral.core.state import Part, take_up, write_down


class Inner(Part):
    STATE = ("count", "dice")

    def __init__(self):
        self.count = 0
        self.dice = Seeds(1).generator(0, "peers")
        self.fixed = "not state"


class Outer(Part):
    STATE = ("inner", "inbox", "arrays", "nothing")

    def __init__(self):
        self.inner = Inner()
        self.inbox = Mailbox()
        self.arrays = {3: [np.zeros(2, np.float32)], "a": (1, {2}, frozenset([3]))}
        self.nothing = None


def test_what_was_written_down_is_taken_up_again():
    one, other = Outer(), Outer()
    one.inner.count = 5
    one.inner.dice.random(7)
    one.inbox.put(Letter(1, 0, 2, np.ones(2, np.float32)))
    one.arrays[3][0][:] = 8
    snapshot = one.snapshot()
    inner, inbox = other.inner, other.inbox
    other.restore(snapshot)
    assert other.inner is inner
    assert other.inbox is inbox
    assert other.inner.count == 5
    assert other.inner.dice.random() == one.inner.dice.random()
    assert [letter.step for letter in other.inbox] == [2]
    np.testing.assert_array_equal(other.arrays[3][0], [8, 8])
    assert other.arrays["a"] == (1, {2}, frozenset([3]))
    assert other.nothing is None


def test_snapshots_are_copies_both_ways():
    one, other = Outer(), Outer()
    snapshot = one.snapshot()
    one.arrays[3][0][:] = 1
    one.inner.count = 1
    other.restore(snapshot)
    other.arrays[3][0][:] = 2
    assert snapshot["arrays"][3][0].tolist() == [0, 0]
    assert snapshot["inner"]["count"] == 0


def test_a_read_only_array_stays_so():
    one, other = Outer(), Outer()
    one.nothing = np.zeros(1)
    one.nothing.flags.writeable = False
    other.restore(one.snapshot())
    assert not other.nothing.flags.writeable
    assert other.arrays[3][0].flags.writeable


@pytest.mark.parametrize("names", [("count",), ("count", "dice", "fixed")])
def test_a_snapshot_of_something_else_is_refused(names):
    with pytest.raises(AlgorithmError, match="Inner cannot restore"):
        take_up(Inner(), Inner.STATE, write_down(Inner(), names))
