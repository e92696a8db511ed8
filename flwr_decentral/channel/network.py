"""The transport of a node: its listening socket, its links, and its uplink.

For each edge of the roster there is one connection, with both directions on it. The end that dials
keeps trying, with pauses that double and jitter; the other end waits to be called. Which of two
connections of one peer stays: that of the newer incarnation; of one incarnation, the one that the
lower index dialed; of two that the same end dialed, the later, since a node dials again only when
its own end of the first is gone.

Payloads with NaN or infinity are counted here, by peer, and logged; the machine that gets them
rejects them, and learns of it as it does in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from flwr_decentral.core import SECOND, ConfigurationError, Message
from flwr_decentral.ops import choose

from .connections import Connections, Settings
from .heads import Hello
from .links import Link
from .refusals import Reason, Refusal, Refusals
from .roster import Roster
from .tls import Contexts, Security
from .transport import Listener
from .uplink import Piece, Uplink

_LOGGER: Final = logging.getLogger(__name__)
_TURN: Final = 4 << 20
"""Bytes that are sent before the event loop looks at what has arrived."""

_BATCH: Final = 1 << 18
"""Bytes that go to a link together, or few more: each call costs as much."""


@dataclass
class _Account:
    """What has passed between this node and a peer."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    abandoned_bytes: int = 0
    not_finite: int = 0
    connected: int = 0
    breaks: Counter[str] = field(default_factory=Counter)


class Network:
    """Carry messages to the neighbors of a node: a :class:`~.transport.Transport` over sockets.

    Parameters
    ----------
    roster : Roster
        Who takes part.
    hello : Hello
        What this node says of itself; its index is the node's.
    security : Security
        How peers prove who they are.
    settings : Settings
        How it behaves.
    generator : numpy.random.Generator
        What pauses are jittered with.

    Raises
    ------
    ConfigurationError
        If these do not fit together.
    """

    def __init__(
        self,
        roster: Roster,
        hello: Hello,
        security: Security,
        settings: Settings,
        generator: np.random.Generator,
    ) -> None:
        if not 0 <= hello.index < len(roster.members):
            raise ConfigurationError(
                f"node {hello.index} is not in the roster of {len(roster.members)} nodes"
            )
        listen = settings.listen
        if security.local and listen is not None and not listen.is_local:
            raise ConfigurationError(
                f"node {hello.index} has a Unix socket for an address and knows no certificates, "
                f"but is to listen at {listen}, where anyone could pass for any node: leave out "
                "peer-listen, or give the node a host and a port, and certificates"
            )
        elsewhere = [m.index for m in roster.members if m.address and not m.address.is_local]
        if security.local and elsewhere:
            raise ConfigurationError(
                f"node {hello.index} listens at a Unix socket, but nodes {elsewhere} do not: use "
                "Unix sockets for all nodes of a run, on one machine, or for none"
            )
        if not (security.insecure or security.local or roster.members[hello.index].fingerprint):
            raise ConfigurationError(
                "the roster holds no certificate fingerprints, but insecure = true is not set; "
                "every node needs peer-ca, peer-cert and peer-key"
            )
        self.hello = hello
        self.neighbors = roster.neighbors(hello.index)
        self.refusals = Refusals()
        self._me = roster.members[hello.index]
        self._security = security
        self._timing = settings.timing
        self._connections = Connections(self, roster, settings, generator)
        self._uplink = Uplink(settings.limit, settings.uplink_bps)
        self._accounts = {peer: _Account() for peer in self.neighbors}
        self._links: dict[int, Link] = {}
        self._listener: Listener | None = None
        self._ops = choose()
        self._empty = asyncio.Event()
        self._scheduled = self._sending = self._closing = False
        self._alarm: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------ transport

    async def open(self, listener: Listener) -> None:
        """Begin to connect to the neighbors, and to be connected to.

        Raises
        ------
        ConfigurationError
            If that cannot work: an address in use, a certificate that is not valid or is not the
            one in the roster.
        """
        contexts = self._security.load()
        self._check_own(contexts)
        self._listener = listener
        await self._connections.open(contexts)

    def _check_own(self, contexts: Contexts | None) -> None:
        mine = self._me.fingerprint
        if contexts is not None and contexts.fingerprint != mine:
            raise ConfigurationError(
                f"the roster knows node {self._me.index} by certificate {mine[:16]}…, but "
                f"peer-cert has {contexts.fingerprint[:16]}…: peers would refuse it"
            )

    def send(self, to: int, message: Message) -> bool:
        """Queue a message; False, and nothing is queued, if the neighbor is not up.

        Raises
        ------
        AlgorithmError
            If a peer would refuse it: its payload is too long, or its header cannot be written.
        """
        queued = self._uplink.put(to, message)
        if queued:
            self._wake()
        return queued

    def drop(self, to: int | None = None) -> list[Message]:
        """Take messages that have not been begun off the queue, those to one neighbor or all."""
        dropped = self._uplink.drop(to)
        self._wake()
        return dropped

    async def close(self) -> None:
        """Send what is queued for as long as that is quick, and close every link."""
        if self._closing:
            return
        self._closing, self._listener = True, None
        await self._connections.close()
        if self._is_busy():
            self._empty.clear()
            self._wake()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.grace):
                    await self._empty.wait()
        for peer, link in list(self._links.items()):
            link.leave(abandon=self._uplink.abandon(peer) is not None)
        await self._connections.finished()
        if self._alarm is not None:
            self._alarm.cancel()

    @property
    def up(self) -> tuple[int, ...]:
        """The neighbors that can be reached now, ascending."""
        return tuple(sorted(self._links))

    def counters(self) -> dict[str, Any]:
        """Say what has happened so far, as plain values."""
        peers = {}
        for peer, account in self._accounts.items():
            state = {
                "up": peer in self._links,
                "in_flight_bytes": self._uplink.in_flight(peer),
                "unreachable": self._connections.unreachable[peer],
            }
            peers[peer] = {**state, **vars(account), "breaks": dict(account.breaks)}
        totals = {
            name: sum(getattr(account, name) for account in self._accounts.values())
            for name in ("sent", "sent_bytes", "received", "received_bytes", "not_finite")
        }
        connections = [account.connected for account in self._accounts.values()]
        return {
            **totals,
            "reconnects": sum(max(0, count - 1) for count in connections),
            "backlog": self._uplink.waiting,
            "backlog_bytes": self._uplink.backlog,
            "handshakes": self._connections.pending,
            "refused": dict(self.refusals.counts),
            "peers": peers,
        }

    # ------------------------------------------------------------------------------ greeting

    def check_neighbor(self, index: int) -> None:
        """Refuse who is no neighbor."""
        if index not in self._accounts:
            raise Refusal(
                Reason.NOT_A_NEIGHBOR,
                f"node {index} is no neighbor of node {self.hello.index} in this topology",
            )

    def judge(self, link: Link, hello: Hello) -> None:
        """Compare what the other end says of itself with the roster and with this node."""
        expected = link.peer
        if expected is not None and hello.index != expected:
            raise Refusal(Reason.INDEX, f"node {expected} says that it is node {hello.index}")
        self.check_neighbor(hello.index)
        self.hello.check(hello)
        old = self._links.get(hello.index)
        if old is None or old.theirs is None:
            return
        if hello.incarnation < old.theirs.incarnation:
            raise Refusal(
                Reason.STALE,
                f"incarnation {hello.incarnation} of node {hello.index} comes after "
                f"{old.theirs.incarnation}: an old process is still running there",
            )
        lower_dials = (self.hello.index < hello.index) == link.calling
        same = hello.incarnation == old.theirs.incarnation
        if same and old.calling != link.calling and not lower_dials:
            raise Refusal(
                Reason.DUPLICATE, f"nodes {self.hello.index} and {hello.index} are connected"
            )

    def came_up(self, link: Link) -> None:
        """Let messages go, in the place of an older connection if there is one."""
        peer = link.peer
        assert peer is not None
        self._connections.settle(link)
        if peer in self._links:
            self._links[peer].end("replaced")
        link.name = f"node {peer}"
        self._links[peer] = link
        self._uplink.open(peer)
        account = self._accounts[peer]
        account.connected += 1
        self._connections.unreachable[peer] = 0
        if self._listener is not None:
            self._listener.peer_up(peer)

    def ended(self, link: Link, how: str, refusal: Refusal | None) -> None:
        """Take a link off, and say so."""
        self._connections.settle(link)
        if refusal is not None:
            self.refusals.note(link.name, refusal)
        peer = link.peer
        if peer is None or self._links.get(peer) is not link:
            return
        del self._links[peer]
        self._accounts[peer].breaks[how] += 1
        dropped = self._uplink.shut(peer)
        self._wake()
        if self._listener is not None:
            self._listener.peer_down(peer, dropped)

    # ------------------------------------------------------------------------------ messages

    def received(self, link: Link, message: Message) -> None:
        """Hand a message on."""
        assert link.peer is not None
        account = self._accounts[link.peer]
        account.received += 1
        account.received_bytes += message.nbytes
        if message.payload is not None and not self._ops.finite(message.payload):
            account.not_finite += 1
            if account.not_finite == 1:
                _LOGGER.warning(
                    "%s sends a %r message with NaN or infinity in it, and it is rejected. Logged "
                    "once; the counters go on",
                    link.name,
                    message.kind,
                )
        if self._listener is not None:
            self._listener.received(link.peer, message)

    def abandoned(self, link: Link, nbytes: int) -> None:
        """Count what came in vain."""
        assert link.peer is not None
        self._accounts[link.peer].abandoned_bytes += nbytes

    def acknowledged(self, link: Link, count: int) -> bool:
        """Make room on a link."""
        assert link.peer is not None
        self._wake()
        return self._uplink.acknowledge(link.peer, count, _now())

    def may_write(self, link: Link) -> None:
        """Go on with a link."""
        assert link.peer is not None
        self._uplink.unblock(link.peer)
        self._wake()

    def owes(self, link: Link) -> bool:
        """Tell whether a peer has yet to take, or to consume, what was sent."""
        return link.peer is not None and bool(self._uplink.in_flight(link.peer))

    # ------------------------------------------------------------------------------ the uplink

    def _wake(self) -> None:
        """Pump soon: not before all that is asked for at once has been asked for."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send what there is room for."""
        self._scheduled = False
        now, sent = _now(), 0
        batches: defaultdict[int, list[Piece]] = defaultdict(list)
        sizes: Counter[int] = Counter()
        while sent < _TURN and (piece := self._uplink.next(now)) is not None:
            peer, size = piece.to, piece.size
            sent += size
            batches[peer].append(piece)
            sizes[peer] += size
            if sizes[peer] >= _BATCH:
                self._send(peer, batches.pop(peer))
                del sizes[peer]
        for peer, batch in batches.items():
            self._send(peer, batch)
        if sent >= _TURN:
            self._wake()
            return
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._uplink.free_at > now:
            wait = (self._uplink.free_at - now) / SECOND
            self._alarm = asyncio.get_running_loop().call_later(wait, self._wake)
        elif not self._is_busy():
            self._empty.set()
            if self._sending:
                self._sending = False
                if self._listener is not None:
                    self._listener.link_idle()

    def _send(self, peer: int, batch: list[Piece]) -> None:
        link, account = self._links[peer], self._accounts[peer]
        link.send(batch)
        self._sending = True
        if link.stream.pending:
            self._uplink.block(peer)
        for piece in batch:
            if piece.is_last:
                account.sent += 1
                account.sent_bytes += piece.parcel.message.nbytes

    def _is_busy(self) -> bool:
        pending = any(link.stream.pending for link in self._links.values())
        return pending or bool(self._uplink.waiting)


def _now() -> int:
    return round(asyncio.get_running_loop().time() * SECOND)
