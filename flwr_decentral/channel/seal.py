"""TLS for one connection, from memory to memory: the socket is somebody else's.

What arrives is fed in as it comes, many records at a time, and what is written comes out the same
way. A socket that speaks TLS itself makes two calls of the kernel for each record of 16 KiB that
it reads, and one for each that it writes.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import cast

from .frames import Bytes


class Seal:
    """One end of a TLS connection.

    Parameters
    ----------
    context : ssl.SSLContext
        Certificates, and what is asked of the other end's.
    server_side : bool
        Whether this end was called.

    Attributes
    ----------
    ended : bool
        Whether no more can be read: the other end has said so, or `error`.
    error : OSError or None
        What is wrong with what was fed in.
    """

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server_side)
        self.ended = False
        self.error: OSError | None = None

    def shake_hands(self) -> bool:
        """Go on with the handshake; False if it needs more of the other end.

        Raises
        ------
        ssl.SSLError
            If it fails. What there is to :meth:`take` then tells the other end why.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def certificate(self) -> bytes:
        """Return the other end's certificate in DER form, after the handshake."""
        found = self._tls.getpeercert(binary_form=True)
        assert found is not None  # nobody comes through the handshake without one
        return found

    def feed(self, data: memoryview) -> None:
        """Take in what has arrived."""
        self._in.write(data)

    def read(self, buffer: memoryview) -> int:
        """Decrypt into ``buffer`` what has been fed in, and return how many bytes that makes.

        Less than there is room for means that more has to arrive, or that the stream has ``ended``.
        """
        filled = 0
        # Into a buffer it reads a number of bytes, whatever its annotation says.
        read = cast("Callable[[int, memoryview], int]", self._tls.read)
        try:
            while filled < len(buffer):  # each gives one record at most
                nbytes = read(len(buffer) - filled, buffer[filled:])
                if not nbytes:
                    self.ended = True
                    break
                filled += nbytes
        except ssl.SSLWantReadError:
            pass
        except OSError as error:
            self.ended, self.error = True, error
        return filled

    def write(self, data: Bytes) -> None:
        """Encrypt all of ``data``.

        Raises
        ------
        ssl.SSLError
            If the connection cannot be used any more.
        """
        self._tls.write(data)

    @property
    def pending(self) -> int:
        """Bytes that are to be taken and sent."""
        return self._out.pending

    def take(self) -> bytes:
        """Take what is to be sent."""
        return self._out.read()
