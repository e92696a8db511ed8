"""One connection: a non-blocking socket that the event loop drives, with TLS or without.

asyncio's own TLS transport is not used, for three reasons that matter here. It drops the alert of a
handshake that it refuses, so that the other end never learns why; it takes whatever is written and
hides how much of it is still here, where the uplink must know; and it copies every byte three times
on its way.

Hardly anything is written ahead: :meth:`Stream.write` hands bytes to the kernel until it takes no
more, and :attr:`Stream.pending` says what is left; of that no more than :data:`GULP` is encrypted
already.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from .frames import Bytes
from .refusals import Reason
from .seal import Seal
from .sockets import ready
from .tls import explain

GULP: Final = 1 << 18
"""Bytes that are offered to the kernel, or asked of it, at once."""

_FAIR_SHARE: Final = 1 << 20
"""Bytes that one stream takes in before the event loop turns to the others."""

_SMALL: Final = 1 << 14
"""Bytes of a TLS record."""

_ALERT: Final = bytes.fromhex("15030300020246")
"""Fatal, protocol version. OpenSSL has nothing to say to bytes that are no TLS at all."""

_BLOCKED: Final = (BlockingIOError, InterruptedError)


class _Scratch(threading.local):
    """Memory for what is encrypted, on its way to a seal; each thread has its own."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(GULP))


_SCRATCH: Final = _Scratch()


class User(Protocol):
    """Who is told what happens on a stream."""

    def buffer(self) -> memoryview:
        """Return memory for what arrives next; not empty."""

    def arrived(self, nbytes: int) -> None:
        """Learn that so many bytes are in the buffer."""

    def settled(self) -> None:
        """Learn that this is all for now."""

    def drained(self) -> None:
        """Learn that all that was written has been taken, after some of it was pending."""

    def lost(self, error: OSError | None) -> None:
        """Learn that the connection has ended: by an error, or because the other end closed it."""


async def shake_hands(
    connection: socket.socket,
    context: ssl.SSLContext | None,
    *,
    server_side: bool,
    linger: float,
) -> tuple[Stream, bytes]:
    """Make a stream of a connected socket.

    Parameters
    ----------
    connection : socket.socket
        Non-blocking. It is taken over, and closed if that fails.
    context : ssl.SSLContext or None
        How to speak TLS; None for plaintext.
    server_side : bool
        Whether this end was called.
    linger : float
        Seconds that the other end has to take in why it was refused.

    Returns
    -------
    Stream, bytes
        What to speak on, and the other end's certificate in DER form; empty in plaintext.

    Raises
    ------
    OSError
        If the other end is not to be talked to, or does not want to talk. It has been told why.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is None:
        return Stream(connection), b""
    seal = Seal(context, server_side=server_side)
    try:
        while not seal.shake_hands():
            await _send(connection, seal.take())
            await _feed(connection, seal)
        await _send(connection, seal.take())
        return Stream(connection, seal), seal.certificate()
    except ssl.SSLError as error:
        # Closing at once, with bytes unread, could destroy the alert that is on its way.
        stream = Stream(connection)
        stream.write([seal.take() or (_ALERT if explain(error).reason is Reason.NOT_TLS else b"")])
        stream.finish(linger)
        try:
            await asyncio.shield(stream.over)
        finally:
            stream.abort()
        raise
    except BaseException:
        connection.close()
        raise


async def _send(connection: socket.socket, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[connection.send(rest) :]
        except _BLOCKED:
            await ready(connection, reading=False)


async def _feed(connection: socket.socket, seal: Seal) -> None:
    """Wait for the other end to say something more."""
    memory = _SCRATCH.memory[:_SMALL]
    while True:
        try:
            nbytes = connection.recv_into(memory)
        except _BLOCKED:
            await ready(connection, reading=True)
            continue
        if not nbytes:
            raise ConnectionResetError("the other end has closed the connection")
        seal.feed(memory[:nbytes])
        return


class Stream:
    """A connection, after its handshake.

    Parameters
    ----------
    connection : socket.socket
        Non-blocking.
    seal : Seal, optional
        What encrypts and decrypts; nothing does by default.

    Attributes
    ----------
    pending : int
        Bytes that were written and that the kernel has not taken.
    written : int
        Bytes that it has taken.
    over : asyncio.Future
        Done when the connection is no more.
    """

    def __init__(self, connection: socket.socket, seal: Seal | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._seal = seal
        self._descriptor = connection.fileno()
        self._user: User | None = None
        self._out: deque[Bytes] = deque()
        self._ready: Bytes = b""  # what goes to the kernel next
        self._behind = False
        self._finishing = self._goes_on = False
        self._deadline: asyncio.TimerHandle | None = None
        self.pending = 0
        self.written = 0
        self.over: asyncio.Future[None] = self._loop.create_future()

    def start(self, user: User) -> None:
        """Begin to read, and tell ``user`` of everything."""
        self._user = user
        self._loop.add_reader(self._descriptor, self._readable)
        if self._seal is not None:  # what came with the handshake wakes no reader
            self._go_on()

    def write(self, parts: Sequence[Bytes]) -> None:
        """Write; what the kernel does not take now is kept, and written when it does."""
        if self.over.done() or self._finishing:
            return
        for part in parts:
            if part:
                self._out.append(part)
                self.pending += len(part)
        if not self._behind:
            self._flush()

    def finish(self, linger: float) -> None:
        """Send what is pending, say that no more will come, and wait for the other end to close.

        Parameters
        ----------
        linger : float
            Seconds after which the connection is closed all the same.
        """
        if self.over.done() or self._finishing:
            return
        self._finishing = True
        if self._user is None:
            self._loop.add_reader(self._descriptor, self._readable)
        self._user = None
        self._deadline = self._loop.call_later(linger, self.abort)
        self._flush()

    def abort(self) -> None:
        """Close now."""
        if self.over.done():
            return
        self.over.set_result(None)
        self._user = None
        if self._deadline is not None:
            self._deadline.cancel()
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._out.clear()
        self._ready = b""
        self.pending = 0
        self._socket.close()

    def _readable(self) -> None:
        """Take in what is there, unless that is to come anyway: each stream has its turn once."""
        if not self._goes_on:
            self._take_in()

    def _go_on(self) -> None:
        self._goes_on = True
        self._loop.call_soon(self._take_in)

    def _take_in(self) -> None:
        """Take in what is there, but not so much that others have to wait long."""
        self._goes_on = False
        taken, more = 0, True
        while more and not self.over.done() and taken < _FAIR_SHARE:
            nbytes, more = self._receive()
            taken += nbytes
        if more and self._seal is not None and not self.over.done():
            self._go_on()  # what has been fed to it wakes no reader
        if taken and self._user is not None:
            self._user.settled()

    def _receive(self) -> tuple[int, bool]:
        """Fill the buffer with what is there; tell how much came, and whether there may be more."""
        buffer = memoryview(bytearray(_SMALL)) if self._user is None else self._user.buffer()
        seal, came, error = self._seal, 0, None
        try:
            if seal is not None:
                came, filled = self._decrypt(seal, buffer)
                ended, error = seal.ended, seal.error
                more = filled == len(buffer) or came == GULP
            else:
                came = filled = self._socket.recv_into(buffer)
                ended, more = not came, came == len(buffer)
        except _BLOCKED:
            return 0, False
        except OSError as problem:
            filled, ended, error, more = 0, True, problem, False
        if filled and self._user is not None:
            self._user.arrived(filled)
        if ended:
            self._lose(error)
        return max(came, filled), more

    def _decrypt(self, seal: Seal, buffer: memoryview) -> tuple[int, int]:
        """Fill the buffer; tell how many bytes came, and how many are in it."""
        came, filled = 0, seal.read(buffer)
        if filled < len(buffer) and not seal.ended:
            memory = _SCRATCH.memory
            try:
                came = self._socket.recv_into(memory)
                seal.ended = not came
            except _BLOCKED:
                pass
            except OSError as error:
                seal.ended, seal.error = True, error
            if came:
                seal.feed(memory[:came])
                filled += seal.read(buffer[filled:])
        if seal.pending:  # TLS has an answer of its own, be it an alert
            self._flush()
            if seal.pending > _SMALL:  # as to who asks for new keys, and does not read
                text = "the other end makes TLS answer, and does not take the answers"
                seal.ended, seal.error = True, ConnectionAbortedError(text)
        return came, filled

    def _flush(self) -> None:
        """Hand to the kernel what it takes."""
        try:
            while self._prepare():
                nbytes = self._socket.send(self._ready)
                self._ready = memoryview(self._ready)[nbytes:]
                self.pending -= nbytes
                self.written += nbytes
        except _BLOCKED:
            if not self._behind:
                self._behind = True
                self._loop.add_writer(self._descriptor, self._flush)
            return
        except OSError as error:
            # Not from within write(): its caller is in the middle of something.
            self._loop.call_soon(self._lose, error)
            self._out.clear()
            self._ready = b""
            return
        if self._behind:
            self._behind = False
            self._loop.remove_writer(self._descriptor)
            if self._user is not None:
                self._user.drained()
        if self._finishing:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def _prepare(self) -> bool:
        """Make something ready for the kernel, unless there is; False if nothing is left."""
        if self._ready:
            return True
        out, seal = self._out, self._seal
        if seal is None:
            if out:
                self._ready = self._next()
                out.popleft()
            return bool(self._ready)
        while out and seal.pending < GULP:
            part = self._next()
            nbytes = min(len(part), GULP - seal.pending)
            seal.write(memoryview(part)[:nbytes])
            self.pending -= nbytes
            if nbytes == len(part):
                out.popleft()
            else:
                out[0] = memoryview(part)[nbytes:]
        self._ready = seal.take()
        self.pending += len(self._ready)
        return bool(self._ready)

    def _next(self) -> Bytes:
        """Join small parts: each one that is sent is a TLS record of its own."""
        out = self._out
        if len(out) > 1 and len(out[0]) + len(out[1]) <= _SMALL:
            parts = [out.popleft()]
            room = _SMALL - len(parts[0])
            while out and len(out[0]) <= room:
                room -= len(out[0])
                parts.append(out.popleft())
            out.appendleft(b"".join(parts))
        return out[0]

    def _lose(self, error: OSError | None) -> None:
        if self.over.done():
            return
        user, self._user = self._user, None
        self.abort()
        if user is not None:
            user.lost(error)
