"""Shared memory for the vectors of all nodes, mapped by trainers and runtime alike.

A trainer works in another process than the runtime, on the same host. Instead of sending a model
back and forth, both map one arena:

=========  ===============================================================================
region     content
=========  ===============================================================================
header     what the arena is, so that a stale or foreign one is refused
blob       any bytes, written once (the model's layout)
inputs     a vector for each node; immutable while the node's task is in flight
outputs    a vector for each node; what training returned
private    two times the private bytes of each node: the input's and the output's
=========  ===============================================================================

On Linux the arena is an anonymous memory file that others open through ``/proc/PID/fd/FD``: it has
no name that could be left behind, and it is gone when the last process that maps it has ended.
Elsewhere it is a file in the temporary directory, and files of dead processes are swept. Either
way the memory is allocated when the arena is made, so that a lack of it is an error message then
and not a crash in mid-run. A memory file is also sealed: no process that maps it can change its
length, which would crash the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .core.errors import RuntimeFault
from .core.message import Vector

_MAGIC: Final = b"flwrdec1"
_HEADER: Final = struct.Struct("<8s16sQQQQ")
_LINE: Final = 64
_PREFIX: Final = "flwr-decentral-arena-"
_SEALS: Final = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    if hasattr(fcntl, "F_ADD_SEALS")
    else 0
)
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class ArenaRef:
    """What another process needs to map an arena.

    Attributes
    ----------
    path : str
        A path under which the arena can be opened on this host.
    token : str
        32 hexadecimal digits; an arena with another token is not the one that was meant.
    """

    path: str
    token: str


def _align(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


class Arena:
    """A store of flat vectors in shared memory.

    Use :meth:`create` in the runtime and :meth:`attach` in a trainer.

    Attributes
    ----------
    ref : ArenaRef
        How to attach to it.
    nodes : int
        Number of nodes.
    size : int
        Length of each vector, in float32 scalars.
    private_bytes : int
        Private bytes of each node.
    """

    def __init__(self, memory: mmap.mmap, ref: ArenaRef, keep: int | None, owns: Path | None):
        self._memory = memory
        self._keep = keep
        self._owns = owns
        self.ref = ref
        _, _, self.nodes, self.size, self.private_bytes, self._blob = _HEADER.unpack_from(memory)
        self._row = _align(4 * self.size)
        self._private_row = _align(self.private_bytes)
        self._inputs = _align(_HEADER.size) + _align(self._blob)
        self._outputs = self._inputs + self.nodes * self._row
        self._private = self._outputs + self.nodes * self._row

    @classmethod
    def create(cls, nodes: int, size: int, private_bytes: int = 0, blob: bytes = b"") -> Arena:
        """Allocate an arena.

        Parameters
        ----------
        nodes, size, private_bytes : int
            Number of nodes, scalars of a vector, private bytes of a node.
        blob : bytes (default: b"")
            Anything that attached processes should read.

        Raises
        ------
        RuntimeFault
            If there is not enough memory. It says how much is needed and for what.
        """
        header = _align(_HEADER.size) + _align(len(blob))
        row = 2 * (_align(4 * size) + _align(private_bytes))
        total = max(header + nodes * row, mmap.PAGESIZE)
        purpose = (
            f"{total / 2**20:.0f} MiB of shared memory for {nodes} nodes with {size} shared "
            f"parameters and {private_bytes} private bytes each"
        )
        _check_memory(total, purpose)
        token = secrets.token_bytes(16)
        fd, path, owns = _open_new(total, purpose)
        try:
            memory = mmap.mmap(fd, total)
        except OSError as error:
            _discard(fd, owns)
            raise RuntimeFault(f"cannot map {purpose}: {error.strerror}") from error
        _HEADER.pack_into(memory, 0, _MAGIC, token, nodes, size, private_bytes, len(blob))
        start = _align(_HEADER.size)
        memory[start : start + len(blob)] = blob
        return cls(memory, ArenaRef(path, token.hex()), fd, owns)

    @classmethod
    def attach(cls, ref: ArenaRef) -> Arena:
        """Map an arena that another process made.

        Raises
        ------
        RuntimeFault
            If it cannot be opened here, or is not the one that was meant.
        """
        try:
            fd = os.open(ref.path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise RuntimeFault(
                f"cannot open the run's shared memory at {ref.path}: {error.strerror}. The process "
                "that made it has ended, belongs to another user, or runs on another host"
            ) from error
        return cls._map(fd, ref)

    @classmethod
    def receive(cls, fd: int, token: str) -> Arena:
        """Map an arena whose descriptor another process has passed to this one, and close that.

        Raises
        ------
        RuntimeFault
            If it is not the one that was meant, or not sealed.
        """
        ref = ArenaRef(f"descriptor {fd}", token)
        if _SEALS and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            os.close(fd)
            raise RuntimeFault("the shared memory that was passed is not sealed")
        return cls._map(fd, ref)

    @classmethod
    def _map(cls, fd: int, ref: ArenaRef) -> Arena:
        try:
            memory = mmap.mmap(fd, 0)
        except (OSError, ValueError) as error:
            raise RuntimeFault(
                f"cannot map the run's shared memory at {ref.path}: {error}"
            ) from error
        finally:
            os.close(fd)
        header = memory[: _HEADER.size].ljust(_HEADER.size, b"\0")
        magic, token, *_ = _HEADER.unpack(header)
        if magic != _MAGIC or token.hex() != ref.token:
            memory.close()
            raise RuntimeFault(
                f"{ref.path} is not this run's shared memory: it was left by another run"
            )
        return cls(memory, ref, None, None)

    def fileno(self) -> int:
        """Return the descriptor to pass to another process; only where the arena was made."""
        if self._keep is None:
            raise ValueError("this end of the arena has no descriptor of it")
        return self._keep

    @property
    def blob(self) -> bytes:
        """The bytes that the arena was made with."""
        start = _align(_HEADER.size)
        return self._memory[start : start + self._blob]

    def input(self, node: int) -> Vector:
        """View the vector that a node's task starts from, shape (size,)."""
        return self._vector(self._inputs, node)

    def output(self, node: int) -> Vector:
        """View the vector that a node's task returned, shape (size,)."""
        return self._vector(self._outputs, node)

    def private_input(self, node: int) -> NDArray[np.uint8]:
        """View the private bytes that a node's task starts from, shape (private_bytes,)."""
        return self._bytes(0, node)

    def private_output(self, node: int) -> NDArray[np.uint8]:
        """View the private bytes that a node's task returned, shape (private_bytes,)."""
        return self._bytes(1, node)

    def close(self) -> None:
        """Let go of the memory; it is freed once no process maps it.

        Views that are still alive keep their process's mapping.
        """
        with contextlib.suppress(BufferError):
            self._memory.close()
        if self._keep is not None:
            _discard(self._keep, self._owns)
            self._keep = None

    def _vector(self, region: int, node: int) -> Vector:
        self._check(node)
        return np.frombuffer(self._memory, np.float32, self.size, region + node * self._row)

    def _bytes(self, half: int, node: int) -> NDArray[np.uint8]:
        self._check(node)
        start = self._private + (half * self.nodes + node) * self._private_row
        return np.frombuffer(self._memory, np.uint8, self.private_bytes, start)

    def _check(self, node: int) -> None:
        if not 0 <= node < self.nodes:
            raise IndexError(f"node {node} is not in 0..{self.nodes - 1}")


def _open_new(total: int, purpose: str) -> tuple[int, str, Path | None]:
    """Make a file of allocated memory; return its descriptor, a path to it, and what to unlink."""
    if hasattr(os, "memfd_create"):
        fd, owns = os.memfd_create(_PREFIX, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), None
        path = f"/proc/{os.getpid()}/fd/{fd}"
    else:  # pragma: no cover - not on Linux
        sweep()
        owns = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        fd, path = os.open(owns, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), str(owns)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, total)
        else:  # pragma: no cover - not on Linux
            for start in range(0, total, 1 << 20):
                os.pwrite(fd, bytes(min(1 << 20, total - start)), start)
        if owns is None:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        _discard(fd, owns)
        raise RuntimeFault(
            f"cannot allocate {purpose}: {error.strerror}; use fewer nodes or a smaller model, or "
            "give the machine more memory"
        ) from error
    return fd, path, owns


def _discard(fd: int, owns: Path | None) -> None:
    os.close(fd)
    if owns is not None:
        owns.unlink(missing_ok=True)


def sweep(folder: Path | None = None) -> list[Path]:
    """Remove arena files whose process is dead. Only needed where there are no memory files.

    Returns
    -------
    list of Path
        What was removed.
    """
    removed = []
    for path in (folder or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        match = re.fullmatch(rf"{_PREFIX}(\d+)-[0-9a-f]+", path.name)
        if match and not _alive(int(match[1])):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def available_memory() -> int | None:
    """Estimate how many bytes can still be allocated, or None where that is not known.

    The smaller of what the kernel calls available and what the process's control group has left:
    memory files count against both, and exceeding the second ends in a kill and not in an error.
    Cached files count as free, since they make room.
    """
    limits = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = _MEMINFO.read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        limits.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        cached = int(dict(line.split() for line in lines)["inactive_file"])
        limits.append(limit - used + cached)
    return max(min(limits), 0) if limits else None


def _check_memory(total: int, purpose: str) -> None:
    available = available_memory()
    if available is not None and total > available:
        raise RuntimeFault(
            f"cannot allocate {purpose}: only {available / 2**20:.0f} MiB are available; use fewer "
            "nodes or a smaller model, or give the machine more memory"
        )
