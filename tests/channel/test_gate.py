"""The gate: strangers cannot take the places of the roster, and the oldest make room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_decentral.channel.gate import Gate, Places

PLACES = Places(per_address=2, strangers=5)


class Hall:
    """A gate, and who was turned away."""

    def __init__(self, **known: int) -> None:
        self.gate = Gate(PLACES)
        self.gate.know(known)
        self.gone: list[str] = []

    def enter(self, source: str, name: str):
        ticket = self.gate.enter(source)
        ticket.evict = lambda: self.gone.append(name)
        return ticket


def test_the_oldest_of_an_address_goes():
    hall = Hall()
    for name in "abcd":
        hall.enter("x", name)
    assert hall.gone == ["a", "b"]
    hall.enter("y", "e")
    assert hall.gone == ["a", "b"]
    assert len(hall.gate) == 3


def test_strangers_share_few_places_and_leave_those_of_the_roster_alone():
    hall = Hall(friend=1)
    hall.enter("friend", "f1")
    for number in range(20):
        hall.enter(f"stranger-{number}", f"s{number}")
    assert hall.gone == [f"s{number}" for number in range(15)]
    hall.enter("friend", "f2")
    assert len(hall.gone) == 15
    assert len(hall.gate) == 7


def test_an_address_of_many_nodes_has_places_for_all_of_them():
    hall = Hall(host=10)
    for number in range(13):
        hall.enter("host", f"{number}")
    assert hall.gone == ["0"]


def test_who_has_left_is_not_in_the_way():
    hall = Hall()
    tickets = [hall.enter("x", name) for name in "ab"]
    tickets[0].leave()
    tickets[0].leave()
    hall.enter("x", "c")
    assert hall.gone == []
    hall.gate.clear()
    assert hall.gone == ["b", "c"]
    assert len(hall.gate) == 0


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("abcdefghij"), st.booleans()), max_size=60))
def test_there_are_never_more_than_places(calls):
    gate = Gate(PLACES)
    gate.know({"a": 0, "b": 0})
    held = []
    for source, leaves in calls:
        ticket = gate.enter(source)
        ticket.evict = lambda ticket=ticket: held.remove(ticket)
        held.append(ticket)
        if leaves:
            held.pop(0).leave()
        sources = [ticket.source for ticket in held]
        assert len(held) == len(gate)
        assert all(sources.count(source) <= PLACES.per_address for source in sources)
        assert sum(source not in "ab" for source in sources) <= PLACES.strangers
