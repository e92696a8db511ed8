"""One connection: a non-blocking socket that the event loop drives, with TLS or without.

asyncio's own TLS transport is not used, for three reasons that matter here. It drops the alert of a
handshake that it refuses, so that the other end never learns why; it takes whatever is written and
hides how much of it is still here, where the uplink must know; and it copies every byte three times
on its way. A socket with TLS of its own does none of this, and needs little more code.

Nothing is written ahead: :meth:`Stream.write` hands bytes to the kernel until it takes no more, and
:attr:`Stream.pending` says what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

from .refusals import Reason
from .sockets import ready
from .tls import explain

Bytes: TypeAlias = bytes | memoryview

_FAIR_SHARE: Final = 1 << 20
"""Bytes that one stream takes in before the event loop turns to the others."""

_SMALL: Final = 1 << 14
"""Bytes of a TLS record."""

_ALERT: Final = bytes.fromhex("15030300020246")
"""Fatal, protocol version. OpenSSL has nothing to say to bytes that are no TLS at all."""

_GULP: Final = 1 << 16
"""Bytes that are offered to the kernel at once: it is known how much it took when it took all."""

_BLOCKED: Final = (BlockingIOError, InterruptedError)


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
) -> tuple[socket.socket, bytes]:
    """Make a connected socket a TLS one.

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
    socket, bytes
        What to speak on, and the other end's certificate in DER form; empty in plaintext.

    Raises
    ------
    OSError
        If the other end is not to be talked to, or does not want to talk. It has been told why.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is None:
        return connection, b""
    try:
        # Of one that has been reset already, wrap_socket would leave a descriptor open.
        if not _is_connected(connection):
            raise ConnectionResetError("the other end has closed the connection")
        secure = context.wrap_socket(
            connection, server_side=server_side, do_handshake_on_connect=False
        )
    except OSError:
        connection.close()
        raise
    try:
        while True:
            try:
                secure.do_handshake()
                break
            except ssl.SSLWantReadError:
                await ready(secure, reading=True)
            except ssl.SSLWantWriteError:
                await ready(secure, reading=False)
        certificate = secure.getpeercert(binary_form=True)
        assert certificate is not None
        return secure, certificate
    except ssl.SSLError as error:
        # The alert is on its way; closing at once, with bytes unread, could destroy it.
        stream = Stream(socket.socket(fileno=secure.detach()))
        if explain(error).reason is Reason.NOT_TLS:
            stream.write([_ALERT])
        stream.finish(linger)
        try:
            await asyncio.shield(stream.over)
        finally:
            stream.abort()
        raise
    except BaseException:
        secure.close()
        raise


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


class Stream:
    """A connection, after its handshake.

    Parameters
    ----------
    connection : socket.socket
        Non-blocking, plain or TLS.

    Attributes
    ----------
    pending : int
        Bytes that were written and that the kernel has not taken.
    written : int
        Bytes that it has taken.
    over : asyncio.Future
        Done when the connection is no more.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._descriptor = connection.fileno()
        self._user: User | None = None
        self._out: deque[Bytes] = deque()
        self._behind = False
        self._watching = False
        self._finishing = False
        # TLS may have to read before it can go on writing, and the other way around.
        self._write_waits = self._read_waits = False
        self._deadline: asyncio.TimerHandle | None = None
        self.pending = 0
        self.written = 0
        self.over: asyncio.Future[None] = self._loop.create_future()

    def start(self, user: User) -> None:
        """Begin to read, and tell ``user`` of everything."""
        self._user = user
        self._loop.add_reader(self._descriptor, self._readable)

    def write(self, parts: Sequence[Bytes]) -> None:
        """Write; what the kernel does not take now is kept, and written when it does."""
        if self.over.done() or self._finishing:
            return
        for part in parts:
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
        self.pending = 0
        self._socket.close()

    def _readable(self) -> None:
        """Take in what is there, but not so much that others have to wait long."""
        taken, more = 0, True
        while more and not self.over.done() and taken < _FAIR_SHARE:
            nbytes, more = self._receive()
            taken += nbytes
        # What TLS has decrypted already wakes no reader.
        secure = self._socket if isinstance(self._socket, ssl.SSLSocket) else None
        if more and secure is not None and not self.over.done() and secure.pending():
            self._loop.call_soon(self._readable)
        if self._write_waits:
            self._write_waits = False
            self._flush()
        if taken and self._user is not None:
            self._user.settled()

    def _receive(self) -> tuple[int, bool]:
        """Fill the buffer with what is there; tell how much that was, and whether it is full."""
        buffer = memoryview(bytearray(_SMALL)) if self._user is None else self._user.buffer()
        filled, ended, error = 0, False, None
        # TLS gives no more than a record at a time, and there is much to do after each advance.
        while filled < len(buffer):
            try:
                nbytes = self._socket.recv_into(buffer[filled:])
            except (*_BLOCKED, ssl.SSLWantReadError):
                break
            except ssl.SSLWantWriteError:
                self._read_waits = True
                self._watch()
                break
            except OSError as problem:
                ended, error = True, problem
                break
            if not nbytes:
                ended = True
                break
            filled += nbytes
        full = filled == len(buffer)
        if filled and self._user is not None:
            self._user.arrived(filled)
        if ended:
            self._lose(error)
        return filled, full

    def _flush(self) -> None:
        while self._out:
            part = self._next()
            try:
                nbytes = self._socket.send(memoryview(part)[:_GULP])
            except (*_BLOCKED, ssl.SSLWantWriteError):
                self._behind = True
                self._watch()
                return
            except ssl.SSLWantReadError:
                self._behind = self._write_waits = True
                return
            except OSError as error:
                # Not from within write(): its caller is in the middle of something.
                self._loop.call_soon(self._lose, error)
                self._out.clear()
                return
            self.pending -= nbytes
            self.written += nbytes
            if nbytes == len(part):
                self._out.popleft()
            else:
                self._out[0] = memoryview(part)[nbytes:]
        if self._watching:
            self._watching = False
            self._loop.remove_writer(self._descriptor)
        if self._read_waits:
            self._read_waits = False
            self._loop.call_soon(self._readable)
        if self._behind:
            self._behind = False
            if self._user is not None:
                self._user.drained()
        if self._finishing:
            with contextlib.suppress(OSError):
                # Not SSLSocket.shutdown, which would go on in plaintext.
                socket.socket.shutdown(self._socket, socket.SHUT_WR)

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

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._loop.add_writer(self._descriptor, self._flush)

    def _lose(self, error: OSError | None) -> None:
        if self.over.done():
            return
        user, self._user = self._user, None
        self.abort()
        if user is not None:
            user.lost(error)
