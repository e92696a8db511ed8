"""Where a node's sidecar is, and starting one that no operator has started.

A sidecar that a ClientApp starts outlives it: it has a session of its own, and a log that it shares
with the others of this user. For as long as it is only about to start, its starter looks after it,
so that what is wrong with the node config is an error of the run and not a line in a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from logging import INFO
from pathlib import Path
from typing import Any, Final, NamedTuple

from flwr.common.logger import log

from flwr_decentral.channel.client import NoSidecar, connect
from flwr_decentral.core import RuntimeFault

_LAST: Final = 2000
"""Bytes of a log that are looked at for the reason of an end."""


class Place(NamedTuple):
    """Where a sidecar is.

    Attributes
    ----------
    address : str
        Its socket.
    look : callable
        To be called while it is waited for: raises NoSidecar if it was started for this and has
        ended.
    """

    address: str
    look: Callable[[], None]


def find(node_config: Mapping[str, Any]) -> Place:
    """Tell where the sidecar listens; start it unless it runs, or is an operator's."""
    address = socket_of(node_config)
    if node_config.get("peer-socket"):
        return Place(address, lambda: None)
    with contextlib.suppress(NoSidecar), connect(address, patience=0.0):
        return Place(address, lambda: None)
    return Place(address, _start(address, sidecar_arguments(node_config)))


def socket_of(node_config: Mapping[str, Any]) -> str:
    """Tell where the sidecar listens, if there is one."""
    socket = str(node_config.get("peer-socket", ""))
    return socket or own_socket(sidecar_arguments(node_config))


def sidecar_arguments(node_config: Mapping[str, Any]) -> list[str]:
    """Write what a node config says of the sidecar as arguments of the command line."""
    arguments = []
    for key in ("address", "listen", "ca", "cert", "key"):
        if value := str(node_config.get(f"peer-{key}", "")):
            arguments += [f"--{key}", value]
    if node_config.get("peer-insecure", False):
        arguments.append("--insecure")
    return arguments


def own_socket(arguments: Sequence[str]) -> str:
    """Name the socket of the sidecar that is started with these arguments, for this user."""
    digest = hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:16]
    return local_address(f"flwr-decentral-sidecar-{os.getuid()}-{digest}")


def local_address(name: str) -> str:
    """Make an address of a name: on Linux it needs no file."""
    if sys.platform != "linux":  # pragma: no cover - not on Linux
        return str(Path(tempfile.gettempdir()) / name)
    return f"@{name}"


def _start(address: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Start a sidecar; return what looks after it."""
    log_file = Path(tempfile.gettempdir()) / f"flwr-decentral-sidecar-{os.getuid()}.log"
    command = [
        *(sys.executable, "-m", "flwr_decentral.cli"),
        *("sidecar", "--own", "--socket", address),
        *arguments,
    ]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # A session of its own, and nobody who waits for it: it has to outlive this process.
    try:
        before = log_file.stat().st_size if log_file.exists() else 0
        process = os.posix_spawn(
            sys.executable,
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log_file, flags, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
    except OSError as error:
        raise RuntimeFault(
            f"a sidecar that logs to {log_file} cannot be started: {error.strerror}"
        ) from error
    log(INFO, "Started a sidecar, process %d, which logs to %s", process, log_file)
    ended: list[int] = []

    def look() -> None:
        if ended:
            raise NoSidecar(
                f"the sidecar that was started for this node has ended at once, with status "
                f"{ended[0]}; what {log_file} says since: {_last_line(log_file, before)}"
            )
        # Not at once: it may have ended because another one, which will answer, came first.
        with contextlib.suppress(ChildProcessError):
            known, status = os.waitpid(process, os.WNOHANG)
            if known:
                ended.append(os.waitstatus_to_exitcode(status))

    return look


def _last_line(log_file: Path, start: int) -> str:
    try:
        with log_file.open("rb") as file:
            file.seek(max(start, log_file.stat().st_size - _LAST))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError as error:
        return f"nothing that could be read ({error})"
    return lines[-1] if lines else "nothing"
