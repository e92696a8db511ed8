"""The uplink: one queue for all links of a node, and what each link may have on its way.

A node has one uplink, so it has one queue, as in virtual time: the first message whose link has
room goes first, and messages to one neighbor keep their order. A link has room while

* the kernel has taken all that was written to it before, and
* no more than ``max(2 messages, window)`` would be sent and not yet acknowledged.

So a neighbor that does not read holds up nobody else. A message is cut into pieces of at most 1 MiB
(less on a capped uplink) when they are sent; a message that has been begun goes on before those
behind it, link by link, and is given up only with its link or when the node leaves.

What is on its way cannot be dropped any more, so the window of a link follows the delay that it
causes, as in LEDBAT (RFC 6817) and FAST TCP. A message takes a time t from its first piece to its
acknowledgement; the least that messages of like size have taken is the base, and t less the base
is queueing, q. Of the b bytes that are acknowledged at once, with a target T of 50 ms for q:

=================================  =================================================================
q < T / 4, and only the window     grows by b, up to 1 MiB: it doubles in a round trip
held the next message back
q < T, and the same                grows by b (T - q) / t: in a round trip by what is missing
q > T                              shrinks by b (q - T) / t, down to 8 KiB; but by no more than
                                   b / 2, for the other end may only have been busy for a moment
q > T, and the window is 8 KiB     the base rises by q / 4: it is others that queue, or the way has
                                   become longer
=================================  =================================================================

A link begins with 16 KiB, since what queues in the beginning is in the base. On a slow uplink links
so end with little under way, and on one that is fast and long with as much as it holds. A node that
is told what its uplink carries need not find out: the cap keeps its queue here, where it can be
dropped. The cap counts frames, TLS and acknowledgements, but not TCP and IP.

Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from flwr_decentral.core import (
    MILLISECOND,
    SECOND,
    AlgorithmError,
    Message,
    Vector,
    Wire,
    wire_bytes,
)
from flwr_decentral.ops.codecs import encode

from .frames import MOST_BODY
from .heads import MessageHead

WINDOW: Final = 1 << 20
"""Bytes that a link has under way at most, unless two messages are more."""

FIRST_WINDOW: Final = 1 << 14
LEAST_WINDOW: Final = 1 << 13
TARGET: Final = 50 * MILLISECOND
"""The queueing that a link aims at."""

_CREEP: Final = 4
"""Which part of its queueing a link with the least window takes for the way."""

_EXTRA: Final = 80
"""Bytes of a frame, of a TLS record, and of the acknowledgement of what comes the other way."""

_LATE: Final = 20 * MILLISECOND
"""What an alarm may be late and the cap makes up for."""

_LEAST_PIECE: Final = 1 << 14
_PIECES_A_SECOND: Final = 10


class Written:
    """A payload as the bytes that it travels in.

    Parameters
    ----------
    payload : ndarray of float32, shape (any,), optional
        The values. As long as this object lives, so do they.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form.
    """

    __slots__ = ("__weakref__", "_data", "_wire", "nbytes", "payload")

    def __init__(self, payload: Vector | None, wire: Wire) -> None:
        self.payload, self._wire = payload, wire
        self.nbytes = 0 if payload is None else wire_bytes(len(payload), wire)
        self._data: memoryview | None = None

    @property
    def data(self) -> memoryview:
        """The bytes. Not before they are asked for: what waits may be dropped."""
        if self._data is None:
            self._data = self._write()
        return self._data

    def _write(self) -> memoryview:
        if self.payload is None or not self.nbytes:
            return memoryview(b"")
        if self._wire == "float32":  # checked already, and mostly there already
            return self.payload.astype("<f4", copy=False).view(np.uint8).data
        return memoryview(encode(self.payload, self._wire).data)


class Parcel:
    """A message in the queue.

    Parameters
    ----------
    number : int
        Its place in the queue.
    message : Message
        What it is.
    head : bytes
        What its first frame says.
    payload : Written
        Its payload, which messages to several neighbors share.

    Attributes
    ----------
    length : int
        Bytes of the payload.
    size : int
        Bytes of head and payload.
    sent : int
        How many bytes of the payload have been handed to the link.
    begun : bool
        Whether any of it has been.
    """

    __slots__ = ("begun", "head", "length", "message", "number", "payload", "sent", "size")

    def __init__(self, number: int, message: Message, head: bytes, payload: Written) -> None:
        self.number = number
        self.message = message
        self.head = head
        self.payload = payload
        self.length = payload.nbytes
        self.size = len(head) + self.length
        self.sent = 0
        self.begun = False


class Piece(NamedTuple):
    """What goes on a link next: a part of a parcel, from ``start`` to ``stop``."""

    to: int
    parcel: Parcel
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes of this piece, and of the head if it is the first."""
        return self.stop - self.start + (0 if self.start else len(self.parcel.head))

    @property
    def is_last(self) -> bool:
        """Whether the message is complete with it."""
        return self.stop == self.parcel.length

    @property
    def body(self) -> memoryview:
        """The bytes of this part."""
        return self.parcel.payload.data[self.start : self.stop]


@dataclass
class _Lane:
    """What waits for one link, and what is on its way there."""

    waiting: deque[Parcel] = field(default_factory=deque)
    unacknowledged: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: int = 0
    acknowledged: int = 0
    writable: bool = True
    window: int = FIRST_WINDOW
    bases: dict[int, int] = field(default_factory=dict)

    def has_room(self) -> bool:
        return bool(self.waiting) and self.writable and not self._is_full()

    def _is_full(self) -> bool:
        parcel = self.waiting[0]
        if parcel.begun or not self.in_flight:
            return False
        return self.in_flight + parcel.size > max(2 * parcel.size, self.window)

    def begin(self, parcel: Parcel, now: int) -> None:
        parcel.begun = True
        self.unacknowledged.append((parcel.size, now))
        self.in_flight += parcel.size

    def acknowledge(self, news: int, now: int) -> None:
        held = self.writable and bool(self.waiting) and self._is_full()
        before = self.in_flight
        for _ in range(news):
            size, begun = self.unacknowledged.popleft()
            self.in_flight -= size
        self.acknowledged += news
        if news:  # of several the last has waited least for the others
            self._follow(size.bit_length(), now - begun, before - self.in_flight, held)

    def _follow(self, kind: int, took: int, nbytes: int, held: bool) -> None:
        base = self.bases[kind] = min(took, self.bases.get(kind, took))
        queueing = took - base
        change = nbytes * (TARGET - queueing) // max(took, TARGET)
        if queueing > TARGET:
            self.window += max(change, -nbytes // 2)
            if self.window <= LEAST_WINDOW:
                self.window = LEAST_WINDOW
                self.bases[kind] += queueing // _CREEP
        elif held:
            growth = nbytes if queueing < TARGET // 4 else change
            self.window = min(self.window + growth, WINDOW)


class Uplink:
    """Queue messages, and say which piece goes next.

    Parameters
    ----------
    limit : int
        Bytes of the longest payload that a run allows.
    bps : float, optional
        Bits per second that this node may send, all links together; by default as many as it can.

    Attributes
    ----------
    free_at : int
        When the cap allows the next piece, in nanoseconds.
    """

    def __init__(self, limit: int, bps: float | None = None) -> None:
        self._limit = limit
        self._bps = bps
        self._lanes: dict[int, _Lane] = {}
        self._number = 0
        self._written: WeakValueDictionary[tuple[int, Wire], Written] = WeakValueDictionary()
        self.free_at = self._late = 0
        self._piece = MOST_BODY
        if bps is not None:
            share = int(bps / 8 / _PIECES_A_SECOND)
            self._piece = min(MOST_BODY, max(_LEAST_PIECE, share))

    @property
    def backlog(self) -> int:
        """Bytes that are queued and not on a link."""
        parcels = (parcel for lane in self._lanes.values() for parcel in lane.waiting)
        return sum(parcel.size - parcel.sent for parcel in parcels)

    @property
    def waiting(self) -> int:
        """Messages that are queued, or begun and not complete."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def in_flight(self, peer: int) -> int:
        """Count the bytes of messages that were begun and are not acknowledged."""
        return self._lanes[peer].in_flight if peer in self._lanes else 0

    def open(self, peer: int) -> None:
        """Let messages go to a neighbor."""
        self._lanes[peer] = _Lane()

    def shut(self, peer: int) -> list[Message]:
        """Let none go any more; return those that had not been begun."""
        lane = self._lanes.pop(peer)
        return [parcel.message for parcel in lane.waiting if not parcel.begun]

    def put(self, to: int, message: Message) -> bool:
        """Queue a message; False, and nothing is queued, if its link is not open.

        Raises
        ------
        AlgorithmError
            If no peer would accept it.
        """
        if to not in self._lanes:
            return False
        _check_payload(message)
        head = MessageHead.of(message, self._limit)
        self._number += 1
        parcel = Parcel(self._number, message, head.encode(), self._write(message))
        self._lanes[to].waiting.append(parcel)
        return True

    def _write(self, message: Message) -> Written:
        if message.wire == "float32":  # which is there already
            return Written(message.payload, message.wire)
        key = id(message.payload), message.wire
        written = self._written.get(key)
        if written is None:
            written = self._written[key] = Written(message.payload, message.wire)
        return written

    def drop(self, to: int | None = None) -> list[Message]:
        """Take messages that have not been begun off the queue, in its order."""
        dropped: list[Parcel] = []
        for peer, lane in self._lanes.items():
            if to is None or peer == to:
                dropped += (parcel for parcel in lane.waiting if not parcel.begun)
                lane.waiting = deque(parcel for parcel in lane.waiting if parcel.begun)
        return [parcel.message for parcel in sorted(dropped, key=lambda parcel: parcel.number)]

    def abandon(self, peer: int) -> Message | None:
        """Give up the message that has been begun on a link, if there is one."""
        waiting = self._lanes[peer].waiting
        return waiting.popleft().message if waiting and waiting[0].begun else None

    def block(self, peer: int) -> None:
        """Note that the kernel has not taken all that was written to a link."""
        self._lanes[peer].writable = False

    def unblock(self, peer: int) -> None:
        """Note that it has."""
        self._lanes[peer].writable = True

    def acknowledge(self, peer: int, count: int, now: int) -> bool:
        """Take in how many messages the other end has consumed; False if that cannot be."""
        lane = self._lanes[peer]
        news = count - lane.acknowledged
        if not 0 <= news <= len(lane.unacknowledged):
            return False
        lane.acknowledge(news, now)
        return True

    def next(self, now: int) -> Piece | None:
        """Take the next piece; None if no link has room, or the cap does not allow one now."""
        if now < self.free_at:
            return None
        first = None
        for peer, each in self._lanes.items():
            if each.has_room() and (first is None or each.waiting[0].number < first):
                to, lane, first = peer, each, each.waiting[0].number
        if first is None:
            self._late = 0  # idle time is not saved up
            return None
        parcel = lane.waiting[0]
        if not parcel.begun:
            lane.begin(parcel, now)
        start = parcel.sent
        parcel.sent = min(start + self._piece, parcel.length)
        if parcel.sent == parcel.length:
            lane.waiting.popleft()
        piece = Piece(to, parcel, start, parcel.sent)
        if self._bps is not None:
            cost = round(8 * (piece.size + _EXTRA) * SECOND / self._bps)
            self.free_at = max(self.free_at, now - self._late) + cost
            self._late = _LATE
        return piece


def _check_payload(message: Message) -> None:
    payload = message.payload
    if payload is None:
        return
    if payload.dtype != np.float32 or payload.ndim != 1 or not payload.flags.c_contiguous:
        raise AlgorithmError(
            f"the payload of a {message.kind!r} message must be one contiguous row of float32, got "
            f"{payload.dtype} of shape {payload.shape}"
        )
