"""A link between two nodes that is slow, late, stalled or cut, on one machine and without root.

A :class:`Proxy` listens at an address of its own, and passes on what comes there, both ways. It
never looks into the bytes, so it works under TLS as well. Let a roster say the proxy's address in
place of a node's, and the node listen at its own.

=============  ==================================================================================
rate           bytes go one after the other, as on an uplink: :class:`Line`. Several ways may share
               one line, such as all that leads away from one node
delay          each byte comes so much later; their order stays
stall          connections stay open, new ones are accepted, and nothing is passed on
cut            connections are reset, with what is on its way, and new ones refused
=============  ==================================================================================

All of them may change at any time; a piece that has been begun keeps its rate and its delay. What
waits here is bounded, for each connection and way, by :data:`ROOM`: while there is so much, nothing
is read, so the sender is held up as by a slow network. A way with a delay of d seconds so carries
at most ``ROOM / d`` bytes per second.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - a proxy is sockets and time
import contextlib
import math
import socket  # noqa: TID251 - a proxy is sockets and time
import struct
from collections import deque
from functools import partial
from types import TracebackType
from typing import Final, TypeAlias

ROOM: Final = 1 << 20
"""Bytes that wait here for one connection, each way, and are not in the system's buffers."""

_BUFFER: Final = 1 << 16
"""Bytes of each of the system's buffers."""
_PIECE: Final = 1 << 16
_LEAST_PIECE: Final = 1 << 10
_PIECES_A_SECOND: Final = 200
_AHEAD: Final = 0.01
"""Seconds that the next piece is read before its turn: a sleep ends late, a line does not wait."""

Place: TypeAlias = tuple[str, int]


class Line:
    """What carries one bit after the other.

    Parameters
    ----------
    bps : float (default: inf)
        Bits per second.
    """

    def __init__(self, bps: float = math.inf) -> None:
        self._free_at = 0.0
        self.bps = bps

    @property
    def bps(self) -> float:
        """Bits per second; may be set."""
        return self._bps

    @bps.setter
    def bps(self, bps: float) -> None:
        if not bps > 0:
            raise ValueError(f"a line carries more than {bps} bits per second; to halt it, stall")
        self._bps = bps

    @property
    def piece(self) -> int:
        """Bytes to pass on at once, so that ways which share the line take turns."""
        if math.isinf(self._bps):
            return _PIECE
        return min(_PIECE, max(_LEAST_PIECE, int(self._bps / 8 / _PIECES_A_SECOND)))

    def carry(self, nbytes: int, now: float) -> float:
        """Take so many bytes, and tell when they are through, in seconds."""
        self._free_at = max(self._free_at, now) + 8 * nbytes / self._bps
        return self._free_at


class Way:
    """One direction of a proxy.

    Attributes
    ----------
    line : Line
        What its bytes go through.
    delay : float
        Seconds that they take after that.
    carried : int
        How many bytes have been passed on.
    """

    def __init__(self) -> None:
        self.line = Line()
        self.carried = 0
        self._delay = 0.0
        self._flows = asyncio.Event()
        self._flows.set()

    @property
    def delay(self) -> float:
        """Seconds; may be set."""
        return self._delay

    @delay.setter
    def delay(self, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a delay is a number of seconds, zero or more, not {seconds}")
        self._delay = seconds

    def stall(self) -> None:
        """Pass nothing on."""
        self._flows.clear()

    def resume(self) -> None:
        """Go on, with all that has waited."""
        self._flows.set()

    async def flows(self) -> None:
        """Wait while it is stalled."""
        await self._flows.wait()


class Proxy:
    """Pass on what comes to an address to another one, and what that answers.

    Made by :meth:`open`; ends with :meth:`close`, or with its ``async with`` block.

    Attributes
    ----------
    address : (str, int)
        Where it listens.
    there, back : Way
        From who calls to who is called, and the other way.
    accepted : int
        How many connections it has accepted.
    """

    def __init__(self, target: Place, host: str, port: int) -> None:
        self.there, self.back = Way(), Way()
        self.accepted = 0
        self._target = target
        # Bound and not listening: while this proxy is cut nobody else gets its port.
        self._keeper = _bound((host, port))
        self.address: Place = self._keeper.getsockname()[:2]
        self._listening: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def open(cls, target: Place, *, host: str = "127.0.0.1", port: int = 0) -> Proxy:
        """Begin to listen.

        Parameters
        ----------
        target : (str, int)
            Where to pass things on to. Nobody needs to be there yet.
        host : str (default: "127.0.0.1")
            Where to listen: an IPv4 address of this machine.
        port : int (default: 0)
            The port; 0 finds one.

        Raises
        ------
        OSError
            If that cannot be.
        """
        proxy = cls(target, host, port)
        try:
            proxy.heal()
        except OSError:
            proxy._keeper.close()
            raise
        return proxy

    @property
    def open_connections(self) -> int:
        """How many connections there are now."""
        return len(self._connections)

    def stall(self) -> None:
        """Accept and keep connections, and pass nothing on, neither way."""
        self.there.stall()
        self.back.stall()

    async def cut(self) -> None:
        """Reset all connections, and refuse new ones; return when that is done."""
        listening, self._listening = self._listening, None
        if listening is not None:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def heal(self) -> None:
        """Pass things on again, be it stalled or cut."""
        if self._closed:
            raise ValueError("this proxy is closed")
        self.there.resume()
        self.back.resume()
        if self._listening is None:
            listening = _bound(self.address)
            try:
                listening.listen(128)
            except OSError:
                listening.close()
                raise
            self._listening = listening
            # Not the loop's sock_accept: one that is cancelled may lose a caller.
            self._watch(listening)

    async def close(self) -> None:
        """Cut it for good."""
        self._closed = True
        await self.cut()
        self._keeper.close()

    async def __aenter__(self) -> Proxy:
        """Do nothing more: it is open."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        await self.close()

    # ------------------------------------------------------------------------------ inside

    def _watch(self, listening: socket.socket) -> None:
        if self._listening is listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            caller, _ = listening.accept()
        except OSError:  # it has gone already, or there are no descriptors left
            loop.remove_reader(listening)
            loop.call_later(_AHEAD, self._watch, listening)
            return
        self.accepted += 1
        task = loop.create_task(self._connect(caller))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(partial(_ended, caller))

    async def _connect(self, caller: socket.socket) -> None:
        """Be one connection, to its end."""
        called = socket.socket()
        try:
            for end in (caller, called):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            called.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            called.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            await self.there.flows()
            await asyncio.get_running_loop().sock_connect(called, self._target)
            with contextlib.suppress(OSError):
                pipes = (_Pipe(caller, called, self.there), _Pipe(called, caller, self.back))
                await _together(pipes)
                # Both ends have said all they wanted: this is no reset.
                called.close()
                caller.close()
        except OSError:
            return  # nobody is there: the caller is reset
        finally:
            _reset(called)
            _reset(caller)


class _Pipe:
    """One way of one connection: what has been read, and when it may go on."""

    def __init__(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        self._source, self._sink, self._way = source, sink, way
        self._loop = asyncio.get_running_loop()
        self._held: deque[tuple[float, bytes]] = deque()
        self._nbytes = 0
        self._changed = asyncio.Event()

    async def take(self) -> None:
        """Read to the end, as far as there is room, no faster than the line allows."""
        while True:
            await self._way.flows()
            line = self._way.line
            while self._nbytes >= ROOM:
                await self._change()
            room = min(line.piece, ROOM - self._nbytes)
            data = await self._loop.sock_recv(self._source, room)
            now = self._loop.time()
            through = line.carry(len(data), now)
            self._held.append((through + self._way.delay, data))
            self._nbytes += len(data)
            self._changed.set()
            if not data:
                return
            if through - _AHEAD > now:
                await asyncio.sleep(through - _AHEAD - now)

    async def give(self) -> None:
        """Pass on what is due, to the end."""
        while True:
            while not self._held:
                await self._change()
            due, data = self._held[0]
            if (early := due - self._loop.time()) > 0:
                await asyncio.sleep(early)
            await self._way.flows()
            if not data:
                self._sink.shutdown(socket.SHUT_WR)
                return
            await self._loop.sock_sendall(self._sink, data)
            self._way.carried += len(data)
            self._held.popleft()
            self._nbytes -= len(data)
            self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


async def _together(pipes: tuple[_Pipe, _Pipe]) -> None:
    """Run both ways until both have ended, or one has failed; raise what ended it."""
    tasks = [asyncio.ensure_future(work()) for pipe in pipes for work in (pipe.take, pipe.give)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _bound(place: Place) -> socket.socket:
    made = socket.socket()
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # What is accepted inherits this; by default the system reads ahead by megabytes.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        made.bind(place)
    except OSError:
        made.close()
        raise
    return made


def _ended(connection: socket.socket, task: asyncio.Task[None]) -> None:
    """Leave nothing open of a task that was cancelled before it had begun."""
    del task
    _reset(connection)


def _reset(connection: socket.socket) -> None:
    """Close a socket so that the other end sees a reset, if it is open."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
