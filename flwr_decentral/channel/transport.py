"""What the pump asks of whatever carries messages between nodes.

A transport knows the node's neighbors by their index. It has one uplink queue for all of them, as a
node has one uplink: the first message whose link has room goes first. Delivery is at most once and
in order for each link and incarnation; nothing is ever sent again. All methods, and all calls of
the listener, happen in one thread: that of the event loop. A listener may be called from within a
method, such as :meth:`Transport.send`; it puts off what it makes of that.

For each neighbor, ``peer_up`` and ``peer_down`` alternate, beginning with ``peer_up``, and
``received`` comes only between them. A neighbor that comes back before its old connection is known
to be broken, as a newer incarnation does, is down first and then up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flwr_decentral.core import Message


class Listener(Protocol):
    """Who is told what happens on the links."""

    def received(self, source: int, message: Message) -> None:
        """Take a message that has come whole, from a neighbor that is up."""

    def peer_up(self, peer: int) -> None:
        """Learn that messages can go to a neighbor now."""

    def peer_down(self, peer: int, dropped: Sequence[Message]) -> None:
        """Learn that a link broke, and what was queued for it and had not started: it is gone."""

    def link_idle(self) -> None:
        """Learn that the uplink queue has run empty and its last message has been sent."""


class Transport(Protocol):
    """Carries messages to neighbors."""

    async def open(self, listener: Listener) -> None:
        """Begin to connect to the neighbors, and to be connected to.

        Raises
        ------
        ConfigurationError
            If that cannot work: an address in use, a certificate that is not valid.
        """

    def send(self, to: int, message: Message) -> bool:
        """Queue a message; False, and nothing is queued, if the neighbor is not up.

        The payload is shared: it is not written to any more, by the sender or by the transport.
        """

    def drop(self, to: int | None = None) -> list[Message]:
        """Take messages that have not started off the queue, those to one neighbor or all.

        Together with ``peer_down`` this accounts for every message that was queued: what is not
        handed back has been put on a link, or is abandoned on it.
        """

    async def close(self) -> None:
        """Send what is queued for as long as that is quick, and close every link.

        The listener is not called any more.
        """
