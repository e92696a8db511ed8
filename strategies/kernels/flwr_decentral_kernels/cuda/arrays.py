"""Vectors of callers as addresses on a device: numpy arrays are copied, CUDA tensors used in place.

A *call* is one operation on vectors of one kind. It gives the addresses of what is read, makes room
for results, starts kernels, and hands the results over in the kind that came in.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from .driver import Device
from .image import Image
from .memory import Staging
from .tensors import Tensors


class Buffer(NamedTuple):
    """Room for a result: its address on the device, and the array that it becomes."""

    address: int
    array: Any


class Call(Protocol):
    """One operation."""

    def __enter__(self) -> Call: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def read(self, array: Any) -> int:
        """Give the address of a vector's values."""
        ...

    def new(self, length: int, dtype: str = "float32") -> Buffer:
        """Make room for a result, whose content is not defined."""
        ...

    def into(self, array: Any) -> Buffer:
        """Take a caller's array as room for a result."""
        ...

    def clear(self, buffer: Buffer) -> None:
        """Set the first four bytes of a result to zero."""
        ...

    def launch(self, kernel: str, *arguments: Any, threads: int) -> None:
        """Start a kernel."""
        ...

    def give(self, *buffers: Buffer) -> list[Any]:
        """Hand results over."""
        ...

    def number(self, buffer: Buffer) -> int:
        """Wait for a result of one number."""
        ...


class HostCall:
    """An operation on numpy arrays: copied there, computed, copied back, done when it returns."""

    def __init__(self, device: Device, image: Image, staging: Staging) -> None:
        self._device, self._image, self._staging = device, image, staging
        self._read: dict[tuple[int, int], int] = {}

    def __enter__(self) -> HostCall:
        self._staging.lock.acquire()
        try:
            self._device.__enter__()
        except BaseException:
            self._staging.lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            try:
                self._staging.reset()
            finally:
                self._device.__exit__()
        finally:
            self._staging.lock.release()

    def read(self, array: Any) -> int:
        """Copy a vector to the device, once however often it is read.

        Raises
        ------
        TypeError
            If it is of another precision, in which the reference alone computes.
        """
        if array.dtype not in (np.float32, np.uint8):
            raise TypeError(f"CUDA kernels take vectors of float32, got {array.dtype}")
        key = (array.ctypes.data, array.nbytes)
        if key not in self._read:
            self._read[key] = self._staging.upload(array)
        return self._read[key]

    def new(self, length: int, dtype: str = "float32") -> Buffer:
        """Make room on both sides."""
        array = self._staging.results.empty_bytes(length * np.dtype(dtype).itemsize)
        return self.into(array.view(dtype))

    def into(self, array: Any) -> Buffer:
        """Make room on the device for what is to come into a caller's array."""
        return Buffer(self._staging.reserve(array.nbytes), array)

    def clear(self, buffer: Buffer) -> None:
        """Set the first four bytes of a result to zero."""
        self._device.clear(buffer.address, self._staging.stream)

    def launch(self, kernel: str, *arguments: Any, threads: int) -> None:
        """Start a kernel on this operation's own stream."""
        self._image.launch(kernel, arguments, threads, self._staging.stream)

    def give(self, *buffers: Buffer) -> list[Any]:
        """Copy results back and wait for them."""
        for buffer in buffers:
            self._staging.download(buffer.address, buffer.array)
        self._staging.synchronize()
        return [buffer.array for buffer in buffers]

    def number(self, buffer: Buffer) -> int:
        """Wait for a result of one number."""
        return int(self.give(buffer)[0][0])


class TensorCall:
    """An operation on CUDA tensors: where they are, in the order of torch's current stream.

    torch gives the memory of a tensor that is no longer used to others in the order of the stream,
    so tensors need to be kept only until the last kernel of the operation has been started.
    """

    def __init__(self, device: Device, image: Image, tensors: Tensors, like: Any) -> None:
        self._device, self._image = device, image
        self._tensors, self._where = tensors, like.device
        self._stream = tensors.stream(like.device)
        self._copies: list[Any] = []

    def __enter__(self) -> TensorCall:
        self._device.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._device.__exit__()

    def read(self, array: Any) -> int:
        """Give the address of a tensor; bytes at an odd address are copied to an even one."""
        if array.data_ptr() % 4:
            array = self._tensors.copy(array)
            self._copies.append(array)
        return int(array.data_ptr())

    def new(self, length: int, dtype: str = "float32") -> Buffer:
        """Make a tensor."""
        return self.into(self._tensors.empty(length, dtype, self._where))

    def into(self, array: Any) -> Buffer:
        """Write into a caller's tensor."""
        return Buffer(int(array.data_ptr()), array)

    def clear(self, buffer: Buffer) -> None:
        """Set the first four bytes of a result to zero."""
        self._device.clear(buffer.address, self._stream)

    def launch(self, kernel: str, *arguments: Any, threads: int) -> None:
        """Start a kernel on torch's current stream."""
        self._image.launch(kernel, arguments, threads, self._stream)

    def give(self, *buffers: Buffer) -> list[Any]:
        """Hand tensors over; their values follow in the order of the stream."""
        return [buffer.array for buffer in buffers]

    def number(self, buffer: Buffer) -> int:
        """Wait for a result of one number."""
        return self._tensors.number(buffer.array)
