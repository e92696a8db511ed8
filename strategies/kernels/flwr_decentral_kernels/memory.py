"""Memory of large results, used again once nobody holds them any longer.

The first touch of fresh memory costs more than a kernel that fills it: for 10 million values about
eight times as much. A result lies in a buffer that goes back to its pool when the last array that
views it is gone, so that the caller owns what it was given for as long as it likes.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flwr_decentral.ops.contract import Bytes, Vector

_LEAST: Final = 2**16
"""Bytes below which numpy's own memory is as good."""

_LINE: Final = 64
_PAGE: Final = 4096


class Pool:
    """Buffers that wait to be used again.

    It takes no lock: a buffer may come back at any time, in any thread, while a new one is handed
    out. The table of what waits is replaced, never changed; what is lost when two threads replace
    it at once is only made anew.

    Parameters
    ----------
    most : int (default: 512 MiB)
        Bytes of waiting buffers, of all sizes together, unless two of the size that came back last
        are more. Beyond it, buffers of the size that was not used for longest are given up.
    """

    def __init__(self, most: int = 2**29) -> None:
        self._most = most
        # By size, the one that was not used for longest first.
        self._waiting: dict[int, deque[Bytes]] = {}

    def empty(self, length: int) -> Vector:
        """Make a vector of any values."""
        return self.empty_bytes(4 * length).view(np.float32)

    def empty_bytes(self, size: int) -> Bytes:
        """Make an array of any bytes."""
        if size < _LEAST:
            return np.empty(size, np.uint8)
        # Fragments of one partition, which differ by a block, are of one size here.
        whole = -(-size // _PAGE) * _PAGE
        try:
            buffer = self._use(whole).pop()
        except IndexError:
            buffer = _aligned(whole)
        return np.asarray(_Loan(buffer, self))[:size]

    def keep(self, buffer: Bytes) -> None:
        """Take a buffer back."""
        self._use(len(buffer)).append(buffer)
        table = self._waiting
        excess = sum(size * len(waiting) for size, waiting in table.items())
        excess -= max(self._most, 2 * len(buffer))
        if excess <= 0:
            return
        for size, waiting in table.items():
            # Another thread may take the last one at any time.
            with suppress(IndexError):
                while excess > 0:
                    waiting.popleft()
                    excess -= size

    def _use(self, size: int) -> deque[Bytes]:
        """Give the waiting buffers of a size, which is then the one that was used last."""
        table = self._waiting
        mine = table.get(size)
        if mine is None:
            mine = deque()
        elif next(reversed(table)) == size:
            return mine
        others = {each: waiting for each, waiting in table.items() if waiting and each != size}
        self._waiting = {**others, size: mine}
        return mine


def _aligned(size: int) -> Bytes:
    """Make bytes that begin with a cache line, which lets kernels write past the caches."""
    whole = np.empty(size + _LINE, np.uint8)
    start = -whole.__array_interface__["data"][0] % _LINE
    return whole[start : start + size]


class _Loan:
    """What numpy keeps alive for as long as an array views a buffer."""

    __slots__ = ("__array_interface__", "_buffer", "_home")

    def __init__(self, buffer: Bytes, home: Pool) -> None:
        self.__array_interface__: dict[str, Any] = buffer.__array_interface__
        self._buffer: NDArray[np.uint8] = buffer
        self._home = home

    def __del__(self) -> None:
        self._home.keep(self._buffer)
