"""A link: one connection to a peer, from the greeting to its end.

The end that was called speaks first. So the calling end has written nothing yet when it learns that
its certificate is refused, and no reset of the connection can destroy what says so. Over plaintext
it sends its preamble at once, which tells a TLS end what it has to do with.

=============  ==================================================================================
state          ends with
=============  ==================================================================================
greeting       a HELLO from the other end that fits ours; it has until ``Timing.handshake``
up             the connection, GOODBYE, a frame that is none, a peer that is silent or stalled,
               or a newer connection of the same peer
over           nothing: a link never comes back, its peer comes with a new one
=============  ==================================================================================

A peer of which nothing at all is heard for ``Timing.patience`` is silent; one that takes nothing of
what is meant for it for ``Timing.stall`` is stalled. Both are as good as dead.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flwr_decentral.core import Message

from .frames import (
    PREAMBLE,
    Abandoned,
    Acknowledged,
    Bytes,
    FrameWriter,
    Goodbye,
    Item,
    Refused,
)
from .heads import Hello
from .reader import FrameReader
from .refusals import Reason, Refusal
from .stream import Stream
from .tls import explain
from .uplink import Piece


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a network waits for what, in seconds.

    Attributes
    ----------
    handshake : float (default: 5)
        For TLS to come up, and as long again for both HELLOs.
    keepalive : float (default: 5)
        Between two signs of life.
    patience : float (default: 20)
        For any sign of life.
    stall : float (default: 60)
        For a peer to take anything of what is meant for it.
    shortest, longest : float (default: 0.2 and 5)
        Between two attempts to connect: doubled each time, and jittered by half.
    steady : float (default: 10)
        How long a link has to be up before the next attempt is the first again.
    grace : float (default: 2)
        To send what is queued when the network closes.
    linger : float (default: 1)
        For the other end to close, too.
    """

    handshake: float = 5.0
    keepalive: float = 5.0
    patience: float = 20.0
    stall: float = 60.0
    shortest: float = 0.2
    longest: float = 5.0
    steady: float = 10.0
    grace: float = 2.0
    linger: float = 1.0


class Desk(Protocol):
    """The node that a link belongs to."""

    hello: Hello

    def judge(self, link: Link, hello: Hello) -> None:
        """Compare what the other end says of itself; raise a Refusal if it does not fit."""

    def came_up(self, link: Link) -> None:
        """Learn that a link is up."""

    def received(self, link: Link, message: Message) -> None:
        """Consume a message."""

    def abandoned(self, link: Link, nbytes: int) -> None:
        """Learn that part of a message came in vain."""

    def acknowledged(self, link: Link, count: int) -> bool:
        """Take in what the other end has consumed; False if it cannot have."""

    def may_write(self, link: Link) -> None:
        """Learn that the kernel has taken all that was written."""

    def owes(self, link: Link) -> bool:
        """Tell whether anything waits for the other end to take it."""

    def ended(self, link: Link, how: str, refusal: Refusal | None) -> None:
        """Learn that a link is over, up before or not."""


class Link:
    """One connection to a peer.

    Parameters
    ----------
    stream : Stream
        What it runs on.
    desk : Desk
        Whom it tells.
    timing : Timing
        How long it waits.
    limit : int
        Bytes of the longest payload that is accepted.
    secure : bool
        Whether the stream is TLS.
    calling : bool
        Whether this end has dialed.

    Attributes
    ----------
    peer : int or None
        Who the other end is, or has to be; None while only its HELLO can tell.
    name : str
        How to call the other end in a log.
    theirs : Hello or None
        What it has said of itself.
    up : bool
        Whether messages can go.
    over : asyncio.Future
        Done when the link is over; whether it was ever up.
    """

    def __init__(
        self,
        stream: Stream,
        desk: Desk,
        timing: Timing,
        *,
        limit: int,
        secure: bool,
        calling: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.stream = stream
        self.calling = calling
        self.peer: int | None = None
        self.name = ""
        self.theirs: Hello | None = None
        self.up = False
        self.over: asyncio.Future[bool] = self._loop.create_future()
        self._desk = desk
        self._timing = timing
        self._secure = secure
        self._reader = FrameReader(limit=limit, checked=not secure)
        self._writer = FrameWriter(checked=not secure)
        self._opened = False
        self._consumed = self._told = 0
        self._heard = self._moved = self._loop.time()
        self._mark = (0, 0)
        self._acknowledged = 0
        self._due = 0.0
        self._timer = self._loop.call_later(timing.handshake, self._too_slow)

    def greet(self) -> None:
        """Begin."""
        if not self.calling:
            self._write(self._writer.hello(self._desk.hello))
        elif not self._secure:
            self._write([])
        self.stream.start(self)

    def send(self, pieces: Sequence[Piece]) -> None:
        """Send pieces of messages."""
        parts: list[Bytes] = []
        for piece in pieces:
            if piece.start:
                parts += self._writer.more(piece.body)
            else:
                parts += self._writer.first(piece.parcel.head, piece.body)
        self._write(parts)

    def leave(self, *, abandon: bool) -> None:
        """Say good-bye and end, for this end leaves; give up the message under way, if any."""
        if self.up:
            self._write(self._writer.abandon() if abandon else [])
            self._write(self._writer.goodbye())
        self.end("closed-here")

    def refuse(self, refusal: Refusal) -> None:
        """Tell the other end that it is refused, and end."""
        self._write(self._writer.refused(str(refusal.reason), refusal.detail))
        self.end("refused", refusal)

    def end(self, how: str, refusal: Refusal | None = None) -> None:
        """End, once."""
        if self.over.done():
            return
        self._timer.cancel()
        self.over.set_result(self.up)
        self.stream.finish(self._timing.linger)
        self._desk.ended(self, how, refusal)
        self.up = False

    # ------------------------------------------------------------------------------ the stream's

    def buffer(self) -> memoryview:
        """Return memory for what arrives next."""
        return self._reader.buffer()

    def arrived(self, nbytes: int) -> None:
        """Take in what has arrived."""
        self._heard = self._loop.time()
        try:
            for item in self._reader.advance(nbytes):
                self._take(item)
                if self.over.done():
                    return
        except Refusal as refusal:
            self.refuse(refusal)

    def settled(self) -> None:
        """Answer what has arrived."""
        self._tell()

    def drained(self) -> None:
        """Go on writing."""
        self._tell()
        if self.up:
            self._desk.may_write(self)

    def lost(self, error: OSError | None) -> None:
        """End with the connection."""
        if self.up:
            if cut := self._reader.cut:
                self._desk.abandoned(self, cut)
            self.end("broken" if error is not None else "closed-there")
        elif isinstance(error, ssl.SSLError):
            self.end("refused", explain(error))
        else:
            why = "it closed the connection without a word"
            self.end("refused", Refusal(f"peer:{Reason.CLOSED}", why))

    # ------------------------------------------------------------------------------ frames

    def _take(self, item: Item) -> None:
        if isinstance(item, Message) and self.up:  # nearly always
            self._consumed += 1
            self._desk.received(self, item)
        elif isinstance(item, Refused):
            self.end("refused", Refusal(f"peer:{item.reason}", f"it says: {item.detail}"))
        elif isinstance(item, Hello):
            self._meet(item)
        elif not self.up:
            raise Refusal(Reason.FRAME, f"a {type(item).__name__} came before a HELLO")
        elif isinstance(item, Abandoned):
            self._consumed += 1
            self._desk.abandoned(self, item.nbytes)
        elif isinstance(item, Acknowledged):
            self._acknowledged = item.count
            if not self._desk.acknowledged(self, item.count):
                raise Refusal(Reason.FRAME, f"{item.count} messages cannot have been consumed")
        elif isinstance(item, Goodbye):
            self.end("left")

    def _meet(self, hello: Hello) -> None:
        if self.theirs is not None:
            raise Refusal(Reason.FRAME, "a second HELLO")
        self._desk.judge(self, hello)
        self.theirs, self.peer = hello, hello.index
        if self.calling:
            self._write(self._writer.hello(self._desk.hello))
        self.up = True
        self._timer.cancel()
        self._moved = self._loop.time()
        self._wait()
        self._desk.came_up(self)

    def _tell(self) -> None:
        """Acknowledge what was consumed; later, if the other end does not read."""
        if self._consumed != self._told and not self.stream.pending:
            self._told = self._consumed
            self._write(self._writer.acknowledge(self._told))

    def _write(self, parts: list[Bytes]) -> None:
        if not self._opened:
            self._opened = True
            parts = [PREAMBLE, *parts]
        self.stream.write(parts)

    # ------------------------------------------------------------------------------ time

    def _too_slow(self) -> None:
        self.refuse(Refusal(Reason.TIMEOUT, f"no HELLO within {self._timing.handshake:g} s"))

    def _wait(self) -> None:
        self._due = self._loop.time() + self._timing.keepalive
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now, timing = self._loop.time(), self._timing
        # A loop that was held up has heard nobody meanwhile: that is not the peer's silence.
        late = now - self._due
        self._heard += late
        self._moved += late
        mark = (self._acknowledged, self.stream.written)
        if mark != self._mark or not self._desk.owes(self):
            self._mark, self._moved = mark, now
        if now - self._heard > timing.patience:
            self.end("silent")
        elif now - self._moved > timing.stall:
            self.end("stalled")
        else:
            if not self.stream.pending:
                self._write(self._writer.ping())
                self._mark = (self._acknowledged, self.stream.written)
            self._wait()
