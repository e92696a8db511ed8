"""Listening at an address, and connecting to one: TCP, or a Unix socket on one machine.

Over TCP a peer proves itself by what it says. A Unix socket leaves nothing to prove: the kernel
tells that a process of the same user is at the other end, and there is nobody in between.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

from flwr_decentral.core import DecentralError
from flwr_decentral.localsocket import Listener, is_own, native

from .roster import Address

_BACKLOG: Final = 128


class Entrance:
    """Where peers call.

    Made by :meth:`open`.

    Attributes
    ----------
    socket : socket.socket
        Listens, and does not block.
    """

    def __init__(self, listening: socket.socket, local: Listener | None = None) -> None:
        self.socket, self._local = listening, local

    @classmethod
    async def open(cls, address: Address) -> Entrance:
        """Begin to listen.

        Raises
        ------
        OSError
            If that cannot be: the address is in use, or not of this host.
        """
        if address.is_local:
            try:
                local = Listener(address.path)
            except DecentralError as error:
                raise OSError(0, str(error.args[0])) from error
            return cls(local.socket, local)
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, place = found[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        listening.setblocking(False)
        return cls(listening)

    async def accept(self) -> tuple[socket.socket, str]:
        """Wait for a caller; return the connection, and where it comes from.

        A caller on a Unix socket who is another user comes from nowhere: the empty string.
        """
        connection, place = await accept(self.socket)
        if self._local is None:
            return connection, str(place[0]).removeprefix("::ffff:")
        return connection, HERE if is_own(connection) else ""

    def close(self) -> None:
        """Listen no more."""
        (self._local or self.socket).close()


async def accept(listening: socket.socket) -> tuple[socket.socket, Any]:
    """Wait for a caller; return the connection, which does not block, and its address.

    Unlike the loop's ``sock_accept`` it loses no caller if it is cancelled as one comes.
    """
    # However many wait, those who were accepted before have their turn.
    await asyncio.sleep(0)
    while True:
        try:
            connection, place = listening.accept()
        except (BlockingIOError, InterruptedError):
            await ready(listening, reading=True)
        else:
            connection.setblocking(False)
            return connection, place


async def ready(waiting: socket.socket, *, reading: bool) -> None:
    """Wait until a socket can be read from, or written to."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    descriptor = waiting.fileno()
    add, remove = (
        (loop.add_reader, loop.remove_reader) if reading else (loop.add_writer, loop.remove_writer)
    )

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    add(descriptor, wake)
    try:
        await future
    finally:
        remove(descriptor)


HERE: Final = "this machine"
"""Where callers on Unix sockets come from."""


async def sources(address: Address) -> set[str]:
    """List where callers may come from that live at an address."""
    if address.is_local:
        return {HERE}
    found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port)
    return {str(place[0]) for *_, place in found}


async def connect(address: Address) -> socket.socket:
    """Connect to the first of a host's addresses that answers; the socket does not block.

    Raises
    ------
    OSError
        If nobody answers or, on a Unix socket, another user does.
    """
    loop = asyncio.get_running_loop()
    places: list[tuple[int, int, int, Any]]
    if address.is_local:
        places = [(socket.AF_UNIX, socket.SOCK_STREAM, 0, native(address.path))]
    else:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        places = [(family, kind, protocol, place) for family, kind, protocol, _, place in found]
    failure: OSError | None = None
    for family, kind, protocol, place in places:
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, place)
            if address.is_local and not is_own(connection):
                raise PermissionError("the process that listens there is another user's")
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure or OSError(f"{address.host} has no address")
