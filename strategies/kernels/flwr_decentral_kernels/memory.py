"""Memory of large results, used again once nobody holds them any longer.

The first touch of fresh memory costs more than a kernel that fills it: for 10 million values about
eight times as much. A result lies in a buffer that goes back to its pool when the last array that
views it is gone, so that the caller owns what it was given for as long as it likes.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flwr_decentral.ops.contract import Bytes, Vector

_LEAST: Final = 2**20
"""Bytes below which numpy's own memory is as good."""


class Pool:
    """Buffers that wait to be used again.

    It takes no lock: a buffer may come back at any time, in any thread, while a new one is handed
    out.

    Parameters
    ----------
    most : int (default: 512 MiB)
        Bytes of waiting buffers of one size, unless two of them are more.
    sizes : int (default: 16)
        Sizes to keep buffers of. When there is one more, all that wait are given up.
    """

    def __init__(self, most: int = 2**29, sizes: int = 16) -> None:
        self._most, self._sizes = most, sizes
        self._waiting: dict[int, deque[Bytes]] = {}

    def empty(self, length: int) -> Vector:
        """Make a vector of any values."""
        return self.empty_bytes(4 * length).view(np.float32)

    def empty_bytes(self, size: int) -> Bytes:
        """Make an array of any bytes."""
        if size < _LEAST:
            return np.empty(size, np.uint8)
        waiting = self._waiting.get(size)
        if waiting is None:
            if len(self._waiting) >= self._sizes:
                self._waiting.clear()
            waiting = self._waiting[size] = deque(maxlen=max(2, self._most // size))
        try:
            buffer = waiting.pop()
        except IndexError:
            buffer = np.empty(size, np.uint8)
        return np.asarray(_Loan(buffer, waiting))


class _Loan:
    """What numpy keeps alive for as long as an array views a buffer."""

    __slots__ = ("__array_interface__", "_buffer", "_home")

    def __init__(self, buffer: Bytes, home: deque[Bytes]) -> None:
        self.__array_interface__: dict[str, Any] = buffer.__array_interface__
        self._buffer: NDArray[np.uint8] = buffer
        self._home = home

    def __del__(self) -> None:
        self._home.append(self._buffer)
