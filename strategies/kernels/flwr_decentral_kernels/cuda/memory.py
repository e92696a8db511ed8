"""Device memory for vectors that live on the host, and the way there and back.

Copies go through a window of pinned memory, which the device reads at full speed and while the host
does something else; where the system grants none, through ordinary memory.
"""

from __future__ import annotations

import ctypes
import threading  # noqa: TID251 - several threads may compute on one device
from ctypes import byref, c_size_t, c_uint64, c_void_p
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flwr_decentral_kernels.memory import Pool

from .driver import Device
from .errors import KernelError

Bytes = NDArray[np.uint8]

WINDOW: Final = 16 << 20
"""Bytes of pinned memory."""

_ALIGNMENT: Final = 256
_FIRST: Final = 1 << 20


class Staging:
    """Vectors on their way between host and device.

    All calls need the device's context, and its lock. Memory is kept from one use to the next.

    Parameters
    ----------
    device : Device
        Where to.
    window : int
        Bytes of pinned memory.

    Attributes
    ----------
    lock : threading.Lock
        Held by who uses it.
    stream : int
        The handle of the stream of its copies.
    results : Pool
        Host memory for results.
    """

    def __init__(self, device: Device, window: int = WINDOW) -> None:
        self.lock = threading.Lock()
        self.results = Pool()
        self._call = device.driver.call
        with device:
            self.stream = device.stream()
            self._window = self._pinned(window)
        self._cursor = 0
        self._slabs: list[tuple[int, int]] = []
        self._used = 0
        self._least = _FIRST
        self._waiting: list[tuple[Bytes, Bytes]] = []

    def _pinned(self, size: int) -> Bytes:
        address = c_void_p()
        try:
            self._call("cuMemHostAlloc", byref(address), size, 0)
        except KernelError:
            return np.empty(size, np.uint8)
        memory = (ctypes.c_uint8 * size).from_address(address.value or 0)
        return np.ctypeslib.as_array(memory)

    def reset(self) -> None:
        """Forget what lies on the device, after all work there has ended."""
        self.synchronize()
        # One slab as large as all: the next use of this size needs but one.
        if len(self._slabs) > 1:
            self._least = sum(length for _, length in self._slabs)
            self.release()
        self._used = 0

    def release(self) -> None:
        """Give the device's memory back."""
        self.synchronize()
        while self._slabs:
            self._call("cuMemFree_v2", self._slabs.pop()[0])
        self._used = 0

    def reserve(self, size: int) -> int:
        """Give the address of so many bytes on the device, whose content is not defined.

        Raises
        ------
        KernelError
            If the device has no more memory.
        """
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        if not self._slabs or self._used + size > self._slabs[-1][1]:
            held = sum(length for _, length in self._slabs)
            length, address = max(size, 2 * held, self._least), c_uint64()
            try:
                self._call("cuMemAlloc_v2", byref(address), c_size_t(length))
            except KernelError:
                # Room to grow is not necessary.
                length = size
                self._call("cuMemAlloc_v2", byref(address), c_size_t(length))
            self._slabs.append((address.value, length))
            self._used = 0
        address_of_slab, _ = self._slabs[-1]
        self._used += size
        return address_of_slab + self._used - size

    def upload(self, array: NDArray[Any]) -> int:
        """Copy an array to the device; the array may change as soon as this returns."""
        data = array.view(np.uint8)
        target = self.reserve(len(data))
        for start in range(0, len(data), len(self._window)):
            part = data[start : start + len(self._window)]
            room = self._room(len(part))
            room[:] = part
            self._call(
                "cuMemcpyHtoDAsync_v2", target + start, room.ctypes.data, len(part), self.stream
            )
        return target

    def download(self, address: int, array: NDArray[Any]) -> None:
        """Copy from the device into an array, which holds the values after `synchronize`."""
        data = array.view(np.uint8)
        for start in range(0, len(data), len(self._window)):
            part = data[start : start + len(self._window)]
            room = self._room(len(part))
            self._call(
                "cuMemcpyDtoHAsync_v2", room.ctypes.data, address + start, len(part), self.stream
            )
            self._waiting.append((part, room))

    def synchronize(self) -> None:
        """Wait until the device has done all it was told."""
        # When that fails nothing is left for the next operation, which has other results.
        waiting, self._waiting, self._cursor = self._waiting, [], 0
        self._call("cuStreamSynchronize", self.stream)
        for part, room in waiting:
            part[:] = room

    def _room(self, size: int) -> Bytes:
        if self._cursor + size > len(self._window):
            self.synchronize()
        start = self._cursor
        self._cursor += size
        return self._window[start : start + size]
