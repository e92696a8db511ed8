"""Frames: how messages, acknowledgements and greetings are written on a stream.

Why by hand: gRPC's dialing side never sees the peer's certificate and hides refused handshakes;
WebSocket, HTTP/2 and ZeroMQ libraries know no identity that a roster could name, or copy and
buffer each message whole, without credit. What is left to write is small. All numbers are
little-endian.

A stream opens, each way, with :data:`PREAMBLE`: seven letters and the version of the protocol. Then
come frames, each with a prefix of 12 bytes:

======  ===================================================================================
type    uint8
zero    uint8
head    uint16: length of the head, at most :data:`MOST_HEAD`
body    uint32: length of the body, at most :data:`MOST_BODY`; only MESSAGE and MORE have one
check   uint32: CRC-32 of prefix, head and body on a plaintext link; 0 under TLS, which has
        a better one
======  ===================================================================================

==========  ==================================================================================
type        head
==========  ==================================================================================
HELLO       who speaks, and about what: see :class:`Hello`
REFUSED     a reason, and a sentence; the sender closes
MESSAGE     kind, step, length and form of the payload, named numbers; the payload begins
MORE        nothing; the body goes on with the payload
ABANDON     nothing; the rest of the payload will not come
ACK         uint64: how many messages of this link have been consumed or abandoned
PING        nothing; I am alive
GOODBYE     nothing; I leave and close
==========  ==================================================================================

A payload travels in one of the forms of :mod:`flwr_decentral.ops.codecs`, 1 MiB at most in one
body; float32 is received straight into its array. Between two bodies others may come, of ACK, PING
and the like; messages do not overlap. What is not as written here is refused with a
:class:`~flwr_decentral.channel.refusals.Refusal`, and the link ends: nothing is skipped over,
nothing is guessed. The memory that a peer can claim is one payload of the longest length that the
run allows, and, in a shorter form, the bytes that it came in.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from flwr_decentral.core import Message

from .heads import Hello, sentence

VERSION: Final = 1
"""Version of what is written here; both ends must have the same."""

MAGIC: Final = b"flwrdec"
PREAMBLE: Final = MAGIC + bytes([VERSION])
MOST_HEAD: Final = 512
MOST_BODY: Final = 1 << 20

PREFIX: Final = struct.Struct("<BBHII")
CHECKED: Final = struct.Struct("<BBHI")
"""The prefix without its checksum: what the checksum begins with."""
COUNT: Final = struct.Struct("<Q")
Bytes: TypeAlias = bytes | memoryview


class Type(IntEnum):
    """What a frame is."""

    HELLO = 1
    REFUSED = 2
    MESSAGE = 3
    MORE = 4
    ABANDON = 5
    ACK = 6
    PING = 7
    GOODBYE = 8


WITH_BODY: Final = (Type.MESSAGE, Type.MORE)


@dataclass(frozen=True)
class Refused:
    """The other end refuses us."""

    reason: str
    detail: str


@dataclass(frozen=True)
class Acknowledged:
    """So many of our messages have been consumed, since the link came up."""

    count: int


@dataclass(frozen=True)
class Abandoned:
    """The rest of a message will not come; ``nbytes`` of it came in vain."""

    nbytes: int


@dataclass(frozen=True)
class Ping:
    """The other end is alive."""


@dataclass(frozen=True)
class Goodbye:
    """The other end leaves."""


Item: TypeAlias = Hello | Refused | Message | Abandoned | Acknowledged | Ping | Goodbye


class FrameWriter:
    """Write frames.

    Parameters
    ----------
    checked : bool
        Whether frames carry a checksum: on a plaintext link.
    """

    def __init__(self, *, checked: bool) -> None:
        self._checked = checked

    def hello(self, hello: Hello) -> list[Bytes]:
        """Write a HELLO."""
        return self._frame(Type.HELLO, hello.encode())

    def refused(self, reason: str, detail: str) -> list[Bytes]:
        """Write why the other end is refused; what is too long is cut."""
        return self._frame(Type.REFUSED, sentence(reason, 40) + sentence(detail, 240))

    def first(self, head: bytes, body: Bytes) -> list[Bytes]:
        """Write the beginning of a message, with the head that :class:`MessageHead` makes."""
        return self._frame(Type.MESSAGE, head, body)

    def more(self, body: Bytes) -> list[Bytes]:
        """Write on."""
        return self._frame(Type.MORE, b"", body)

    def abandon(self) -> list[Bytes]:
        """Give up the message that is under way."""
        return self._frame(Type.ABANDON)

    def acknowledge(self, count: int) -> list[Bytes]:
        """Write how many messages have been consumed."""
        return self._frame(Type.ACK, COUNT.pack(count))

    def ping(self) -> list[Bytes]:
        """Write a sign of life."""
        return self._frame(Type.PING)

    def goodbye(self) -> list[Bytes]:
        """Write that this end leaves."""
        return self._frame(Type.GOODBYE)

    def _frame(self, kind: Type, head: bytes = b"", body: Bytes = b"") -> list[Bytes]:
        check = 0
        if self._checked:
            check = zlib.crc32(CHECKED.pack(kind, 0, len(head), len(body)))
            check = zlib.crc32(body, zlib.crc32(head, check))
        front = PREFIX.pack(kind, 0, len(head), len(body), check) + head
        return [front, body] if len(body) else [front]
