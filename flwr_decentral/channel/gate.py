"""How many connections may be in their handshake at once, and whose.

A handshake costs memory and a signature, and whoever reaches the port can begin one and stop. So
each address has a few places, all strangers together have a few more, and the addresses of the
roster have places of their own, which strangers cannot take. Where there is no place left, the
oldest handshake goes: an honest one takes milliseconds, so the old ones are those that wait for
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Places:
    """How many handshakes may be pending.

    Attributes
    ----------
    per_address : int (default: 16)
        From one source address, and one more for each node of the roster that has it.
    strangers : int (default: 64)
        From all addresses together that are not in the roster.
    """

    per_address: int = 16
    strangers: int = 64


class Ticket:
    """A place in the gate.

    Attributes
    ----------
    source : str
        The address that the handshake comes from.
    evict : callable
        What ends it if it has to go.
    """

    def __init__(self, gate: Gate, source: str) -> None:
        self._gate = gate
        self.source = source
        self.evict: Callable[[], object] = lambda: None

    def leave(self) -> None:
        """Give the place back; again is no harm."""
        self._gate.forget(self)


class Gate:
    """Keep the pending handshakes.

    Parameters
    ----------
    places : Places
        How many there may be.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._pending: OrderedDict[Ticket, None] = OrderedDict()
        self._known: Mapping[str, int] = {}

    def know(self, addresses: Mapping[str, int]) -> None:
        """Say which source addresses are those of the roster, and of how many nodes each is."""
        self._known = addresses

    def enter(self, source: str) -> Ticket:
        """Take a place for a handshake; the oldest ones that are in its way are evicted."""
        ticket = Ticket(self, source)
        self._pending[ticket] = None
        most = self._places.per_address + self._known.get(source, 0)
        self._trim([t for t in self._pending if t.source == source], most)
        if source not in self._known:
            strange = [t for t in self._pending if t.source not in self._known]
            self._trim(strange, self._places.strangers)
        return ticket

    def forget(self, ticket: Ticket) -> None:
        """Free a place."""
        self._pending.pop(ticket, None)

    def clear(self) -> None:
        """Evict all."""
        self._trim(list(self._pending), 0)

    def __len__(self) -> int:
        return len(self._pending)

    def _trim(self, tickets: list[Ticket], most: int) -> None:
        for ticket in tickets[: max(0, len(tickets) - most)]:
            self.forget(ticket)
            ticket.evict()
