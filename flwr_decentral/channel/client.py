"""Asking a sidecar something over its local socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from flwr_decentral.core import RuntimeFault, error_of
from flwr_decentral.localsocket import Frame, FrameBuffer, encode_frame, is_own, native

_RETRY_S: Final = 0.05
_SLICE_S: Final = 1.0
_ANSWER_S: Final = 120.0
"""Seconds that an answer may take: connecting anew to all neighbors is part of some."""


class NoSidecar(RuntimeFault):
    """Tell that nobody answers where the sidecar should be."""


def ask(
    address: str,
    do: str,
    blobs: Sequence[bytes] = (),
    *,
    patience: float = 10.0,
    look: Callable[[], object] = lambda: None,
    **values: Any,
) -> dict[str, Any]:
    """Say one thing to a sidecar, and return its answer.

    Parameters
    ----------
    address : str
        Its socket: a path, or a name after ``@`` in Linux's abstract namespace.
    do : str
        What is asked; see :mod:`flwr_decentral.channel.sidecar`.
    blobs : sequence of bytes
        What goes with it.
    patience : float (default: 10.0)
        Seconds to wait for a sidecar that is about to start.
    look : callable, optional
        Called while it is waited for; may raise to give up.
    **values
        The details.

    Raises
    ------
    NoSidecar
        If there is none, it belongs to another user, or it does not answer.
    DecentralError
        If it refuses, with the fault that it has found.
    """
    with connect(address, patience, look) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.sendall(encode_frame({"do": do, **values}, blobs))
            answer = _receive(connection).header
        except OSError as error:
            raise NoSidecar(
                f"the sidecar at {address} has not answered {do!r}: {error!r}"
            ) from error
    if answer.get("do") == "refused":
        raise error_of(answer.get("fault"), answer.get("reason"))
    return answer


def connect(
    address: str, patience: float, look: Callable[[], object] = lambda: None
) -> socket.socket:
    """Connect to a socket of a sidecar of this user.

    Parameters
    ----------
    address : str
        Where it listens.
    patience : float
        Seconds to wait for one that is about to start.
    look : callable, optional
        Called between two attempts; may raise to give up.

    Raises
    ------
    NoSidecar
        If nobody listens, or another user does.
    """
    deadline = time.monotonic() + patience
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_SLICE_S)  # a listener that is too busy to accept lets one wait
        try:
            connection.connect(native(address))
        except OSError as error:
            connection.close()
            look()
            if time.monotonic() >= deadline:
                raise NoSidecar(
                    f"no sidecar listens at {address} ({error}): is `flwr-decentral sidecar` "
                    "running on this host, for this user?"
                ) from error
            time.sleep(_RETRY_S)
            continue
        if is_own(connection):
            return connection
        connection.close()
        raise NoSidecar(f"the process that listens at {address} is another user's")


def _receive(connection: socket.socket) -> Frame:
    buffer = FrameBuffer()
    while data := connection.recv(1 << 16):
        if frames := buffer.feed(data):
            return frames[0]
    raise ConnectionResetError("it has closed the connection")
