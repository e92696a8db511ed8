"""The local socket between a runtime and the processes that train for it.

Both ends are processes of one user on one host, so this is not the peer channel: there is nothing
to encrypt. A frame is a JSON header and any number of byte strings, length-prefixed. On Linux the
socket lives in the abstract namespace, where it leaves no file behind; elsewhere, or where it is
given a path, it is a file that only its user can open and that is removed in the end. The user of
the other end is checked where the kernel tells.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .core.errors import RuntimeFault

_PREFIX: Final = struct.Struct("<II")
_MOST_HEADER: Final = 1 << 24


class Frame(NamedTuple):
    """A header and its byte strings."""

    header: dict[str, Any]
    blobs: tuple[bytes, ...]


def encode_frame(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Write a frame."""
    head = json.dumps({**header, "lengths": [len(blob) for blob in blobs]}).encode()
    return b"".join((_PREFIX.pack(len(head), len(blobs)), head, *blobs))


class FrameBuffer:
    """Cut a stream of bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Add what has arrived, and take out the frames that are complete."""
        self._data += data
        frames = []
        while (frame := self._take()) is not None:
            frames.append(frame)
        return frames

    def _take(self) -> Frame | None:
        data = self._data
        if len(data) < _PREFIX.size:
            return None
        length, count = _PREFIX.unpack_from(data)
        if length > _MOST_HEADER:
            raise RuntimeFault(f"a frame on the local socket claims a header of {length} bytes")
        start = _PREFIX.size + length
        if len(data) < start:
            return None
        try:
            header = json.loads(data[_PREFIX.size : start])
            lengths = header.pop("lengths")
            end = start + sum(lengths)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RuntimeFault(f"a frame on the local socket has no header: {error!r}") from error
        if len(lengths) != count or any(size < 0 for size in lengths):
            raise RuntimeFault(
                f"a frame on the local socket claims {count} byte strings of lengths {lengths}"
            )
        if len(data) < end:
            return None
        blobs = []
        for size in lengths:
            blobs.append(bytes(data[start : start + size]))
            start += size
        del data[:end]
        return Frame(header, tuple(blobs))


class Connection:
    """The trainer's end: one frame at a time, each with a deadline.

    Parameters
    ----------
    address : str
        Where the engine listens, from :attr:`Listener.address`.
    token : str
        The run's token.
    patience : float
        Seconds to wait for anything.
    """

    def __init__(self, address: str, token: str, patience: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(patience)
        self._buffer = FrameBuffer()
        self._frames: list[Frame] = []
        try:
            self._socket.connect(native(address))
            self.send({"token": token, "pid": os.getpid()})
        except OSError:
            self._socket.close()
            raise

    def send(self, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Send a frame."""
        self._socket.sendall(encode_frame(header, blobs))

    def wait_for_work(self) -> None:
        """Have no patience end from now on: the engine's end is the end of the connection."""
        self._socket.settimeout(None)

    def receive(self) -> Frame | None:
        """Wait for a frame; None if the engine has closed the connection.

        Raises
        ------
        TimeoutError
            If nothing came within the patience.
        """
        while not self._frames:
            data = self._socket.recv(1 << 20)
            if not data:
                return None
            self._frames = self._buffer.feed(data)
        return self._frames.pop(0)

    def close(self) -> None:
        """Close."""
        self._socket.close()


class Listener:
    """A runtime's end: a listening socket that is gone when it is closed.

    Parameters
    ----------
    address : str, optional
        Where to listen: a path, or a name after ``@`` in Linux's abstract namespace. By default
        an address that nobody else has.

    Attributes
    ----------
    address : str
        Where to connect.
    token : str
        What connections of an engine's trainers have to open with.

    Raises
    ------
    RuntimeFault
        If another process listens there, or nobody can.
    """

    def __init__(self, address: str | None = None) -> None:
        self.token = secrets.token_hex(16)
        self._folder: Path | None = None
        self._file: Path | None = None
        self._lock: int | None = None
        name = f"flwr-decentral-{os.getpid()}-{secrets.token_hex(4)}"
        if address is not None:
            self.address = address
        elif sys.platform == "linux":
            self.address = f"@{name}"
        else:  # pragma: no cover - not on Linux
            self._folder = Path(tempfile.mkdtemp(prefix="flwr-decentral-"))
            self.address = str(self._folder / "s")
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self._bind()
        except OSError as error:
            self.close()
            if error.errno in (errno.EADDRINUSE, errno.EWOULDBLOCK):
                raise RuntimeFault(f"another process listens at {self.address} already") from error
            reason = error.strerror or error
            raise RuntimeFault(f"cannot listen at {self.address}: {reason}") from error
        self.socket.listen(128)
        self.socket.setblocking(False)

    def accept(self) -> socket.socket | None:
        """Accept a connection of the same user; others are closed."""
        try:
            connection, _ = self.socket.accept()
        except BlockingIOError:
            return None
        if not is_own(connection):
            connection.close()
            return None
        return connection

    def close(self) -> None:
        """Close, and leave nothing behind."""
        self.socket.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._folder is not None:  # pragma: no cover - not on Linux
            with contextlib.suppress(OSError):
                shutil.rmtree(self._folder)

    def _bind(self) -> None:
        if self.address.startswith("@"):
            self.socket.bind(native(self.address))
            return
        path = Path(self.address)
        # The lock, which ends with its process, tells a socket in use from one left behind.
        self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            self.socket.bind(self.address)
        finally:
            os.umask(mask)
        self._file = path


def is_own(connection: socket.socket) -> bool:
    """Tell whether a process of this user is at the other end, as far as the kernel tells."""
    if not hasattr(socket, "SO_PEERCRED"):  # pragma: no cover - not on Linux
        return True
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", raw)
    return bool(user == os.getuid())


def native(address: str) -> str:
    """Write an address as the kernel takes it."""
    return f"\0{address[1:]}" if address.startswith("@") else address
