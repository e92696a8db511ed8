"""Links within one process: for tests, and for replays of what has happened elsewhere.

A :class:`Switchboard` joins the transports of all nodes. When and in which order its messages move
is up to a *carrier*, a function that is called with each :class:`Parcel` as it is queued:

========================  =====================================================================
``parcel.start()``        takes it off its sender's outbox; until then it can be dropped
``parcel.leave()``        tells the sender that its uplink is through with it
``parcel.deliver()``      hands it to its receiver, if the link has not broken since
========================  =====================================================================

On real links, messages from one node to another stay in order; a carrier should see to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from flwr_decentral.core import Message, RuntimeFault
from flwr_decentral.core.algorithm import Topology

from .transport import Listener, Transport


class Parcel:
    """A message on its way.

    Attributes
    ----------
    src, dst : int
        From whom, to whom.
    message : Message
        What.
    """

    def __init__(self, sender: MemoryTransport, receiver: MemoryTransport, message: Message):
        self._sender, self._receiver = sender, receiver
        self._link = sender.links[receiver.node]
        self._delivered = False
        self.src, self.dst, self.message = sender.node, receiver.node, message

    def start(self) -> bool:
        """Take it off the outbox; False if it is not there any more."""
        if self not in self._sender.outbox:
            return False
        self._sender.outbox.remove(self)
        return True

    def leave(self) -> None:
        """Tell the sender if its uplink is idle now."""
        if not self._sender.outbox and self._sender.listener is not None:
            self._sender.listener.link_idle()

    def deliver(self) -> bool:
        """Hand it over, at most once; False if it is lost."""
        receiver = self._receiver
        broken = self._sender.links.get(self.dst) != self._link or self.src not in receiver.links
        if broken or self._delivered or receiver.listener is None:
            return False
        self._delivered = True
        receiver.listener.received(self.src, self.message)
        return True


Carrier: TypeAlias = Callable[[Parcel], object]


def carried_by(call_soon: Callable[[Callable[[], object]], object]) -> Carrier:
    """Make a carrier that moves each parcel by itself, soon after it has been queued.

    Parameters
    ----------
    call_soon : callable
        Calls a function later, in the order in which it was asked to: an event loop's
        ``call_soon``.
    """

    def move(parcel: Parcel) -> None:
        if parcel.start():
            parcel.leave()
            parcel.deliver()

    return lambda parcel: call_soon(lambda: move(parcel))


class Switchboard:
    """Join the nodes of a topology.

    Parameters
    ----------
    topology : networkx.Graph
        Who is linked to whom.
    carry : callable
        The carrier.
    """

    def __init__(self, topology: Topology, carry: Carrier) -> None:
        self.topology, self.carry = topology, carry
        self._transports = {node: MemoryTransport(self, node) for node in topology}

    def transport(self, node: int) -> MemoryTransport:
        """Return the transport of a node."""
        return self._transports[node]

    def connect(self, a: int, b: int) -> None:
        """Make the link of two nodes; nothing happens where there is one, or one is not open."""
        ends = self.transport(a), self.transport(b)
        if all(end.listener is not None for end in ends):
            ends[0].meet(b)
            ends[1].meet(a)

    def disconnect(self, a: int, b: int) -> None:
        """Break the link of two nodes; nothing happens where there is none."""
        self.transport(a).lose(b)
        self.transport(b).lose(a)


class MemoryTransport(Transport):
    """One node's end of a :class:`Switchboard`.

    Attributes
    ----------
    node : int
        Whose it is.
    listener : Listener or None
        Who is told, while this is open.
    links : dict of int to int
        The neighbors that are up, each with the number of its link: every link has another one.
    outbox : list of Parcel
        What is queued.
    """

    def __init__(self, board: Switchboard, node: int) -> None:
        self._board, self.node = board, node
        self.listener: Listener | None = None
        self.links: dict[int, int] = {}
        self.outbox: list[Parcel] = []
        self._made = 0

    async def open(self, listener: Listener) -> None:
        """Connect to the neighbors that are open already."""
        self.attach(listener)
        for peer in sorted(self._board.topology[self.node]):
            self._board.connect(self.node, peer)

    def attach(self, listener: Listener) -> None:
        """Open without making any link."""
        if self.listener is not None:
            raise RuntimeFault(f"the transport of node {self.node} is open already")
        self.listener = listener

    def send(self, to: int, message: Message) -> bool:
        """Queue a message, and let the carrier know."""
        if to not in self.links:
            return False
        parcel = Parcel(self, self._board.transport(to), message)
        self.outbox.append(parcel)
        self._board.carry(parcel)
        return True

    def drop(self, to: int | None = None) -> list[Message]:
        """Take messages off the queue."""
        dropped = [parcel for parcel in self.outbox if to in (None, parcel.dst)]
        self.outbox = [parcel for parcel in self.outbox if parcel not in dropped]
        return [parcel.message for parcel in dropped]

    async def close(self) -> None:
        """Deliver what is queued, and break every link."""
        for parcel in list(self.outbox):
            if parcel.start():
                parcel.deliver()
        self.listener = None
        for peer in sorted(self.links):
            self._board.disconnect(self.node, peer)

    def meet(self, peer: int) -> None:
        """Let this end know that a link has been made; the other may learn of it later."""
        if peer not in self.links and self.listener is not None:
            self._made += 1
            self.links[peer] = self._made
            self.listener.peer_up(peer)

    def lose(self, peer: int) -> None:
        """Let this end know that a link has broken; the other may learn of it later."""
        if peer in self.links:
            del self.links[peer]
            dropped = self.drop(peer)
            if self.listener is not None:
                self.listener.peer_down(peer, dropped)
