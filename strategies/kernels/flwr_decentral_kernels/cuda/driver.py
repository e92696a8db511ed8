"""The CUDA driver, called through ctypes.

Only ``libcuda.so.1`` is needed, which comes with NVIDIA's driver: no toolkit, no runtime library
and no torch, so that one wheel fits machines with a GPU and without. Each device is used in its
primary context, which is the one that torch and others use as well.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cached_property
from typing import Any, Final

from flwr_decentral.core.errors import ConfigurationError

from .errors import KernelError

LIBRARY: Final = "libcuda.so.1"

_NO_DEVICE: Final = 100
_MAJOR, _MINOR = 75, 76
_NON_BLOCKING: Final = 1
_OLDEST: Final = (8, 0)
"""Compute capability from which on all instructions of the kernels exist."""

_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuLibraryLoadData": (POINTER(c_void_p), c_char_p, *[c_void_p, c_void_p, c_uint] * 2),
    "cuLibraryUnload": (c_void_p,),
    "cuLibraryGetKernel": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuKernelGetFunction": (POINTER(c_void_p), c_void_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemsetD32Async": (c_uint64, c_uint, c_size_t, c_void_p),
}


class Driver:
    """The driver of this machine, initialized.

    Parameters
    ----------
    library : str (default: "libcuda.so.1")
        What to load.

    Raises
    ------
    ConfigurationError
        If there is no driver, if it is too old, or if it finds no device.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise ConfigurationError(
                f"the ops backend 'cuda' needs an NVIDIA GPU, and there is no driver here "
                f"({error}). Install NVIDIA's driver, or take another backend"
            ) from error
        try:
            for name, arguments in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, c_int
        except AttributeError as error:
            raise ConfigurationError(
                f"NVIDIA's driver is too old for the ops backend 'cuda' ({error}). Install one for "
                "CUDA 12 or newer, or take another backend"
            ) from error
        status = self._library.cuInit(0)
        if status:
            why = "there is none" if status == _NO_DEVICE else self.describe(status)
            raise ConfigurationError(
                f"the ops backend 'cuda' needs an NVIDIA GPU: {why}. Where there should be one, "
                "look at nvidia-smi and at CUDA_VISIBLE_DEVICES; or take another backend"
            )
        self._devices: dict[int, Device] = {}

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises
        ------
        KernelError
            If it fails.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            raise KernelError(f"{name.removesuffix('_v2')} failed: {self.describe(status)}")

    def describe(self, status: int) -> str:
        """Give the driver's name of an error, and what it says about it."""
        name, text = c_char_p(), c_char_p()
        if self._library.cuGetErrorName(status, byref(name)):
            return f"unknown CUDA error {status}"
        self._library.cuGetErrorString(status, byref(text))
        return f"{(name.value or b'').decode()} ({(text.value or b'').decode()})"

    @cached_property
    def version(self) -> tuple[int, int]:
        """The version of CUDA that the driver supports, as (major, minor)."""
        number = c_int()
        self.call("cuDriverGetVersion", byref(number))
        return number.value // 1000, number.value % 1000 // 10

    @property
    def count(self) -> int:
        """How many devices there are."""
        number = c_int()
        self.call("cuDeviceGetCount", byref(number))
        return number.value

    def device(self, index: int) -> Device:
        """Give a device by its number, the same object each time."""
        if index not in self._devices:
            if not 0 <= index < self.count:
                raise ConfigurationError(f"there is no CUDA device {index}, but {self.count}")
            self._devices[index] = Device(self, index)
        return self._devices[index]


class Device:
    """A GPU; as a context manager, what the driver is told meanwhile is about it.

    Attributes
    ----------
    driver : Driver
    index : int
        Its number, which is torch's as well.
    name : str
    capability : tuple of int
        Its compute capability, as (major, minor).

    Raises
    ------
    ConfigurationError
        If the kernels cannot run on it.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        self.driver, self.index = driver, index
        handle, name = c_int(), ctypes.create_string_buffer(256)
        driver.call("cuDeviceGet", byref(handle), index)
        driver.call("cuDeviceGetName", name, len(name), handle)
        self.name = name.value.decode(errors="replace")
        numbers = []
        for attribute in (_MAJOR, _MINOR):
            value = c_int()
            driver.call("cuDeviceGetAttribute", byref(value), attribute, handle)
            numbers.append(value.value)
        self.capability = (numbers[0], numbers[1])
        if self.capability < _OLDEST:
            raise ConfigurationError(
                f"{self.name} has compute capability {numbers[0]}.{numbers[1]}, and the ops "
                f"backend 'cuda' needs {_OLDEST[0]}.{_OLDEST[1]} or newer. Take another backend"
            )
        self._context = c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", byref(self._context), handle)

    def __enter__(self) -> Device:
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def stream(self) -> int:
        """Make a stream that waits for no other."""
        handle = c_void_p()
        self.driver.call("cuStreamCreate", byref(handle), _NON_BLOCKING)
        return handle.value or 0

    def clear(self, address: int, stream: int) -> None:
        """Set four bytes to zero."""
        self.driver.call("cuMemsetD32Async", address, 0, 1, stream)
