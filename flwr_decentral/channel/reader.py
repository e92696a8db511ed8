"""Reading frames: from pieces of a stream, as they arrive, to messages and what else there is.

Nothing here does I/O. The memory for what arrives next is the reader's: a scratch for prefixes,
heads and short bodies, and the payload's own array for long ones, which are so received where they
stay, if they came as float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from flwr_decentral.core import Message
from flwr_decentral.ops.codecs import decode

from .frames import (
    CHECKED,
    COUNT,
    MAGIC,
    MOST_BODY,
    MOST_HEAD,
    PREAMBLE,
    PREFIX,
    VERSION,
    WITH_BODY,
    Abandoned,
    Acknowledged,
    Goodbye,
    Item,
    Ping,
    Refused,
    Type,
)
from .heads import Cursor, Hello, MessageHead
from .refusals import Reason, Refusal

_SCRATCH: Final = 1 << 16
_DIRECT: Final = 1 << 14
"""From how many missing bytes on a body is received into its array and not through the scratch."""

_TYPES: Final = {int(kind): kind for kind in Type}


class _Prefix(NamedTuple):
    kind: Type
    head: int
    body: int
    check: int


class _Incoming:
    """A message that is being received, and the memory that it goes to."""

    __slots__ = ("data", "filled", "head", "memory", "missing")

    def __init__(self, head: MessageHead) -> None:
        self.head = head
        # Aligned for what it is read as: numpy aligns all its memory to 16 bytes or more.
        self.data = np.empty(head.nbytes, np.uint8)
        self.memory = self.data.data
        self.filled, self.missing = 0, len(self.memory)

    def message(self) -> Message:
        head, payload = self.head, None
        if head.length is not None:
            if head.wire == "float32":  # as many bytes as it takes, and aligned
                payload = self.data.view("<f4").astype(np.float32, copy=False)
            else:
                payload = decode(self.data, head.wire, head.length)
            payload.flags.writeable = False
        return Message(
            kind=head.kind, step=head.step, payload=payload, header=head.numbers, wire=head.wire
        )


class FrameReader:
    """Cut what arrives into frames, and put messages together.

    Ask for a :meth:`buffer`, put what has arrived into it, and say with :meth:`advance` how much
    it was.

    Parameters
    ----------
    limit : int
        Bytes of the longest payload that is accepted.
    checked : bool
        Whether frames carry a checksum: on a plaintext link.
    """

    def __init__(self, *, limit: int, checked: bool) -> None:
        self._limit = limit
        self._checked = checked
        self._memory = memoryview(bytearray(_SCRATCH))
        self._start = self._end = 0
        self._opened = False
        self._direct = False
        self._prefix: _Prefix | None = None
        self._head = b""
        self._left = 0
        self._check = 0
        self._incoming: _Incoming | None = None

    @property
    def cut(self) -> int:
        """Bytes of a message whose rest has not come."""
        return self._incoming.filled if self._incoming is not None else 0

    def buffer(self) -> memoryview:
        """Return memory for what arrives next; never empty."""
        self._direct = self._left >= _DIRECT
        if self._direct:
            assert self._incoming is not None
            start = self._incoming.filled
            return self._incoming.memory[start : start + self._left]
        rest = self._end - self._start
        if self._start:
            self._memory[:rest] = bytes(self._memory[self._start : self._end])
            self._start, self._end = 0, rest
        return self._memory[self._end :]

    def advance(self, nbytes: int) -> Iterator[Item]:
        """Take in what has been put into the buffer, and yield what is complete, as it is found.

        Raises
        ------
        Refusal
            If that is no frame. What came before it has been yielded.
        """
        if self._direct:
            self._took(nbytes)
        else:
            self._end += nbytes
        if not self._opened and not self._open():
            return
        while True:
            if self._prefix is None and not self._begin():
                return
            if self._left:
                self._fill()
                if self._left:
                    return
            item = self._finish()
            if item is not None:
                yield item

    def _open(self) -> bool:
        """Look at the first bytes of a stream, and complain at the first that is wrong."""
        came = bytes(self._memory[self._start : min(self._end, self._start + len(PREAMBLE))])
        if came[:1] in (b"\x15", b"\x16") and came[1:2] in (b"", b"\x03"):
            if len(came) < 2:
                return False
            raise Refusal(
                Reason.TLS, "the peer speaks TLS, but this end is configured with insecure = true"
            )
        if not MAGIC.startswith(came[: len(MAGIC)]):
            raise Refusal(Reason.GARBAGE, f"a stream cannot begin with {came!r}")
        if len(came) < len(PREAMBLE):
            return False
        if came != PREAMBLE:
            raise Refusal(
                Reason.PROTOCOL,
                f"the peer speaks version {came[-1]} of the protocol, this end {VERSION}; "
                "install the same version of flwr-decentral on both",
            )
        self._start += len(PREAMBLE)
        self._opened = True
        return True

    def _begin(self) -> bool:
        """Read a prefix and its head, if they are there."""
        there = self._end - self._start
        if there < PREFIX.size:
            return False
        kind, zero, head, body, check = PREFIX.unpack_from(self._memory, self._start)
        if kind not in _TYPES or zero:
            raise Refusal(Reason.FRAME, f"there is no frame of type {kind}, {zero}")
        if head > MOST_HEAD or body > MOST_BODY or (body and kind not in WITH_BODY):
            raise Refusal(
                Reason.FRAME, f"a {_TYPES[kind].name} cannot have a head of {head} and {body} bytes"
            )
        if there < PREFIX.size + head:
            return False
        start = self._start + PREFIX.size
        raw = bytes(self._memory[start : start + head])
        self._start = start + head
        if self._checked:
            self._check = zlib.crc32(raw, zlib.crc32(CHECKED.pack(kind, 0, head, body)))
            if not body:  # before the head is believed
                self._verify(check)
        elif check:
            raise Refusal(Reason.FRAME, "a frame under TLS carries a checksum")
        self._prefix = _Prefix(_TYPES[kind], head, body, check)
        self._head = raw
        if self._prefix.kind in WITH_BODY:
            self._expect(self._prefix, raw)
        self._left = body
        return True

    def _expect(self, prefix: _Prefix, raw: bytes) -> None:
        """Make room for a body."""
        if prefix.kind is Type.MESSAGE:
            if self._incoming is not None:
                raise Refusal(Reason.FRAME, "a message begins inside of another")
            head = MessageHead.decode(raw)
            if head.memory > self._limit:
                raise Refusal(
                    Reason.FRAME,
                    f"a message claims a payload of {head.length} values; in this run the longest "
                    f"has {self._limit // 4}",
                )
            try:
                self._incoming = _Incoming(head)
            except MemoryError:
                raise _no_memory(head) from None
        elif self._incoming is None or raw or not prefix.body:
            raise Refusal(Reason.FRAME, "there is nothing to go on with")
        missing = self._incoming.missing
        if prefix.body > missing or (missing and not prefix.body):
            raise Refusal(
                Reason.FRAME, f"a body of {prefix.body} bytes where {missing} are missing"
            )

    def _fill(self) -> None:
        """Move what came by way of the scratch to where it belongs."""
        assert self._incoming is not None
        take = min(self._left, self._end - self._start)
        if take:
            start = self._incoming.filled
            part = self._memory[self._start : self._start + take]
            self._incoming.memory[start : start + take] = part
            self._start += take
            self._took(take)

    def _took(self, nbytes: int) -> None:
        incoming = self._incoming
        assert incoming is not None
        if self._checked:
            part = incoming.memory[incoming.filled : incoming.filled + nbytes]
            self._check = zlib.crc32(part, self._check)
        incoming.filled += nbytes
        incoming.missing -= nbytes
        self._left -= nbytes

    def _finish(self) -> Item | None:
        """Make something of a frame that has come whole; None if the message goes on."""
        prefix, self._prefix = self._prefix, None
        assert prefix is not None
        if prefix.kind not in WITH_BODY:
            return self._item(prefix.kind, self._head)
        incoming = self._incoming
        assert incoming is not None
        if self._checked and prefix.body:
            self._verify(prefix.check)
        if incoming.missing:
            return None
        self._incoming = None
        try:
            return incoming.message()
        except MemoryError:
            raise _no_memory(incoming.head) from None

    def _item(self, kind: Type, raw: bytes) -> Item:
        cursor = Cursor(raw)
        item: Item
        match kind:
            case Type.HELLO:
                return Hello.decode(raw)
            case Type.REFUSED:
                item = Refused(cursor.text(40), cursor.text(240))
            case Type.ACK:
                item = Acknowledged(*cursor.unpack(COUNT))
            case Type.PING:
                item = Ping()
            case Type.GOODBYE:
                item = Goodbye()
            case _:
                if self._incoming is None:
                    raise Refusal(Reason.FRAME, "there is nothing to abandon")
                item = Abandoned(self._incoming.filled)
                self._incoming = None
        cursor.end()
        return item

    def _verify(self, check: int) -> None:
        if check != self._check:
            raise Refusal(Reason.CHECKSUM, "a frame's checksum does not fit; use TLS")


def _no_memory(head: MessageHead) -> Refusal:
    return Refusal(Reason.MEMORY, f"there is no memory for a payload of {head.length} values")
