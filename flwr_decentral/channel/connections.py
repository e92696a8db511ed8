"""Connections: being called, calling, and finding out who is at the other end.

The end of an edge that dials keeps trying, with pauses that double and jitter; the other end waits
to be called. Whoever calls or answers has to show the certificate that the roster knows, before
anything else is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from flwr_decentral.core import ConfigurationError

from .gate import Gate, Places, Ticket
from .heads import MOST_PAYLOAD
from .links import Desk, Link, Timing
from .refusals import Reason, Refusal, Refusals
from .roster import Address, Roster
from .sockets import Entrance, connect, sources
from .stream import Stream, shake_hands
from .tls import Contexts, explain, fingerprint

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a network behaves.

    Attributes
    ----------
    limit : int
        Bytes of the longest payload that the run allows: messages above it are refused. It is also
        what a peer can make this node reserve.
    listen : Address, optional
        Where to listen; by default at the node's address in the roster.
    uplink_bps : float, optional
        Bits per second that this node may send; by default as many as it can.
    timing : Timing
        How long it waits for what.
    places : Places
        How many handshakes may be pending.
    """

    limit: int
    listen: Address | None = None
    uplink_bps: float | None = None
    timing: Timing = field(default_factory=Timing)
    places: Places = field(default_factory=Places)

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not 0 < self.limit <= MOST_PAYLOAD:
            raise ConfigurationError(f"a payload of {self.limit} bytes cannot be the longest one")
        if self.uplink_bps is not None and not 0 < self.uplink_bps < math.inf:
            raise ConfigurationError(
                f"uplink-bps is {self.uplink_bps}: name bits per second, or leave it out for no cap"
            )


class Node(Desk, Protocol):
    """The node whose connections these are."""

    refusals: Refusals
    neighbors: tuple[int, ...]

    def check_neighbor(self, index: int) -> None:
        """Refuse who is no neighbor."""


class Connections:
    """Make the connections of a node, and keep making them.

    Parameters
    ----------
    node : Node
        Whose they are.
    roster : Roster
        Who takes part.
    settings : Settings
        How it behaves.
    generator : numpy.random.Generator
        What pauses are jittered with.

    Attributes
    ----------
    unreachable : Counter of int
        How often each peer could not be reached.
    """

    def __init__(
        self, node: Node, roster: Roster, settings: Settings, generator: np.random.Generator
    ) -> None:
        self.unreachable: Counter[int] = Counter()
        self._node = node
        self._roster = roster
        self._settings = settings
        self._timing = settings.timing
        self._generator = generator
        self._gate = Gate(settings.places)
        self._greeting: dict[Link, Ticket | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._contexts: Contexts | None = None
        self._entrance: Entrance | None = None
        self._streams: set[Stream] = set()
        self._closing = False

    async def open(self, contexts: Contexts | None) -> None:
        """Begin to listen, if there is anyone to call this node, and to dial.

        Raises
        ------
        ConfigurationError
            If it cannot listen.
        """
        self._contexts = contexts
        me = self._roster.members[self._node.hello.index]
        called = [p for p in self._node.neighbors if self._roster.dialer(me.index, p) == p]
        if called:
            self._entrance = await self._listen(self._settings.listen or me.address)
            self._spawn(self._accept(self._entrance))
            self._spawn(self._resolve())
        for peer in self._node.neighbors:
            if peer not in called:
                self._spawn(self._dial(peer))

    async def close(self) -> None:
        """End whatever has not come up, and make nothing new."""
        self._closing = True
        self._gate.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._entrance is not None:
            self._entrance.close()
        for link in list(self._greeting):
            link.end("closed-here")

    async def finished(self) -> None:
        """Wait until no connection is left; each link has been told to end."""
        if self._streams:
            await asyncio.wait([stream.over for stream in self._streams])

    def settle(self, link: Link) -> None:
        """Learn that a link is up, or over."""
        ticket = self._greeting.pop(link, None)
        if ticket is not None:
            ticket.leave()

    @property
    def pending(self) -> int:
        """How many callers have not come up yet."""
        return len(self._gate)

    # ------------------------------------------------------------------------------ being called

    async def _listen(self, address: Address | None) -> Entrance:
        index = self._node.hello.index
        if address is None:
            raise ConfigurationError(
                f"node {index} is to be called by neighbors, but has no address"
            )
        try:
            return await Entrance.open(address)
        except OSError as error:
            raise ConfigurationError(
                f"node {index} cannot listen at {address}: {error.strerror}; choose another "
                "peer-listen, or end what uses it"
            ) from error

    async def _accept(self, entrance: Entrance) -> None:
        while True:
            try:
                connection, source = await entrance.accept()
            except OSError as error:
                # Out of descriptors, mostly: what is open may end, and must not stand still.
                self._note("a caller", Reason.NO_ROOM, f"no connection: {error.strerror}")
                await asyncio.sleep(self._timing.shortest)
                continue
            if not source:
                connection.close()
                self._note("a caller", Reason.STRANGER, "it is another user of this machine")
                continue
            ticket = self._gate.enter(source)
            task = self._spawn(self._answer(connection, source, ticket))
            ticket.evict = partial(self._evict, source, connection, task)

    def _evict(self, source: str, connection: socket.socket, task: asyncio.Task[None]) -> None:
        """End a handshake that is not through with TLS."""
        task.cancel()
        connection.close()  # a task that has not begun cannot do it
        if not self._closing:
            self._note(source, Reason.CROWD, "it has too many handshakes open")

    async def _answer(self, connection: socket.socket, source: str, ticket: Ticket) -> None:
        """Shake hands with a caller."""
        context = self._contexts.server if self._contexts else None
        try:
            async with asyncio.timeout(self._timing.handshake):
                stream, certificate = await shake_hands(
                    connection, context, server_side=True, linger=self._timing.linger
                )
        except OSError as error:
            ticket.leave()
            if isinstance(error, TimeoutError):
                self._note(source, Reason.TIMEOUT, f"no TLS in {self._timing.handshake:g} s")
            else:
                self._node.refusals.note(source, explain(error))
            return
        link = self._link(stream, calling=False)
        self._greeting[link] = ticket
        ticket.evict = partial(link.refuse, Refusal(Reason.CROWD, "too many handshakes are open"))
        link.name = source
        self._greet(link, certificate, None)

    # ------------------------------------------------------------------------------ calling

    async def _dial(self, peer: int) -> None:
        """Keep a connection to a neighbor, or keep trying."""
        loop, attempts = asyncio.get_running_loop(), 0
        while True:
            began = loop.time()
            link = await self._call(peer)
            # Shielded: a task that is cancelled cancels what it waits for.
            lasted = link is not None and await asyncio.shield(link.over)
            if lasted and loop.time() - began > self._timing.steady:
                attempts = 0
            await asyncio.sleep(pause(self._timing, attempts, self._generator))
            attempts += 1

    async def _call(self, peer: int) -> Link | None:
        """Connect to a neighbor, as far as the greeting; None if that fails."""
        address = self._roster.members[peer].address
        assert address is not None
        context = self._contexts.client if self._contexts else None
        connection = None
        try:
            async with asyncio.timeout(self._timing.handshake):
                connection = await connect(address)
                stream, certificate = await shake_hands(
                    connection, context, server_side=False, linger=self._timing.linger
                )
        except OSError as error:
            self.unreachable[peer] += 1
            if connection is None:
                if self.unreachable[peer] == 1:
                    _LOGGER.warning(
                        "node %d cannot be reached at %s: %s. Trying on", peer, address, error
                    )
            elif isinstance(error, TimeoutError):
                self._note(f"node {peer}", Reason.TIMEOUT, f"no TLS at {address}")
            else:
                self._node.refusals.note(f"node {peer}", explain(error))
            return None
        link = self._link(stream, calling=True)
        self._greeting[link] = None
        link.name = f"node {peer}"
        self._greet(link, certificate, peer)
        return link

    # ------------------------------------------------------------------------------ greeting

    def _link(self, stream: Stream, *, calling: bool) -> Link:
        self._streams.add(stream)
        stream.over.add_done_callback(lambda _: self._streams.discard(stream))
        return Link(
            stream,
            self._node,
            self._timing,
            limit=self._settings.limit,
            secure=self._contexts is not None,
            calling=calling,
        )

    def _greet(self, link: Link, certificate: bytes, dialed: int | None) -> None:
        """Look at the certificate, and begin to talk, be it to say that we do not."""
        try:
            link.peer = self._identify(certificate, dialed) if self._contexts else dialed
        except Refusal as refusal:
            link.refuse(refusal)
            return
        if link.peer is not None:
            link.name = f"node {link.peer}"
        link.greet()

    def _identify(self, certificate: bytes, dialed: int | None) -> int:
        """Tell whose certificate that is, if it is one that may be here."""
        digits = fingerprint(certificate)
        index = self._roster.index_of(digits)
        if index is None:
            raise Refusal(
                Reason.NOT_IN_ROSTER, f"certificate {digits[:16]}… is not in this run's roster"
            )
        if dialed is not None and index != dialed:
            address = self._roster.members[dialed].address
            raise Refusal(
                Reason.WRONG_INDEX, f"node {index} answers at {address}, where node {dialed} should"
            )
        self._node.check_neighbor(index)
        return index

    async def _resolve(self) -> None:
        """Learn from which addresses the nodes of the roster may call."""
        known: Counter[str] = Counter()
        for peer in self._node.neighbors:
            address = self._roster.members[peer].address
            if address is not None:
                with contextlib.suppress(OSError):
                    known.update(await sources(address))
        self._gate.know(known)

    def _note(self, who: str, reason: Reason, detail: str) -> None:
        self._node.refusals.note(who, Refusal(reason, detail))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def pause(timing: Timing, attempts: int, generator: np.random.Generator) -> float:
    """Choose how many seconds to wait after so many attempts in a row that led to nothing.

    Examples
    --------
    >>> dice = np.random.default_rng(0)
    >>> [round(pause(Timing(), attempts, dice), 1) for attempts in (0, 1, 2, 100)]
    [0.2, 0.3, 0.4, 2.6]
    """
    usual = min(timing.longest, timing.shortest * 2.0 ** min(attempts, 60))
    return usual * (0.5 + float(generator.random()))
