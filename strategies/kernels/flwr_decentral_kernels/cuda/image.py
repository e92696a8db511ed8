"""The kernels as the driver takes them: built ahead, out of the cache, or compiled now."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char_p, c_void_p
from pathlib import Path
from typing import Any, Final

from flwr_decentral.core.errors import ConfigurationError
from flwr_decentral_kernels.library import resource

from .driver import Device
from .errors import KernelError
from .kernels import SIGNATURES
from .nvrtc import OPTIONS, Nvrtc, libraries

SOURCE: Final = "cuda/kernels.cu"
HEADERS: Final = ("codecs.h", "partition.h")
_THREADS: Final = 256
_MOST_BLOCKS: Final = 2**31 - 1


class Image:
    """The kernels, loaded for one device.

    Parameters
    ----------
    device : Device
        Where they run.
    data : bytes
        A fatbin, a cubin or PTX.
    origin : str
        Where it comes from, for messages.

    Raises
    ------
    KernelError
        If the driver refuses it.
    """

    def __init__(self, device: Device, data: bytes, origin: str) -> None:
        self.origin = origin
        self._call = device.driver.call
        self._data = data  # the driver may come back to it
        library = c_void_p()
        empty = (None, None, 0)
        self._functions: dict[str, c_void_p] = {}
        with device:
            self._call("cuLibraryLoadData", byref(library), c_char_p(data), *empty, *empty)
            try:
                # A library is loaded lazily: only its functions tell whether it fits the device.
                for name in SIGNATURES:
                    kernel, function = c_void_p(), c_void_p()
                    self._call("cuLibraryGetKernel", byref(kernel), library, name.encode())
                    self._call("cuKernelGetFunction", byref(function), kernel)
                    self._functions[name] = function
            except KernelError:
                self._call("cuLibraryUnload", library)
                raise

    def launch(self, name: str, arguments: Sequence[Any], threads: int, stream: int) -> None:
        """Start a kernel; the current context must be that of the device.

        Parameters
        ----------
        name : str
            One of :data:`~flwr_decentral_kernels.cuda.kernels.SIGNATURES`.
        arguments : sequence
            What it takes: numbers, addresses as integers, or ctypes structures.
        threads : int
            How many threads have something to do.
        stream : int
            The handle of a stream.

        Raises
        ------
        KernelError
            If the driver refuses to start it.
        """
        types = SIGNATURES[name]
        # The driver copies the values before it returns.
        values = [
            value if isinstance(value, kind) else kind(value)
            for kind, value in zip(types, arguments, strict=True)
        ]
        pointers = (c_void_p * len(values))(*map(ctypes.addressof, values))
        grid = min(max(-(-threads // _THREADS), 1), _MOST_BLOCKS)
        function = self._functions[name]
        self._call(
            "cuLaunchKernel", function, grid, 1, 1, _THREADS, 1, 1, 0, stream, pointers, None
        )


def load(device: Device) -> Image:
    """Load the kernels for a device.

    Raises
    ------
    ConfigurationError
        If there is no image that the driver takes; says why each was refused.
    """
    refusals: list[str] = []
    for origin, data in _images(device, refusals):
        try:
            return Image(device, data, origin)
        except KernelError as error:
            refusals.append(f"{origin}: {error.args[0]}")
    why = "; ".join(refusals) or "the wheel has no image built ahead, and NVRTC was not found"
    raise ConfigurationError(
        f"there are no CUDA kernels for {device.name}: {why}. Install NVRTC for CUDA "
        f"{device.driver.version[0]} or older (torch brings it; or nvidia-cuda-nvrtc), or take "
        "another backend"
    )


def _images(device: Device, refusals: list[str]) -> Iterator[tuple[str, bytes]]:
    """Give images to try, the fastest to get first; note what could not be made."""
    built = resource("kernels.fatbin")
    if built is not None and not _outdated(built):
        yield "fatbin", built.read_bytes()
    source, headers = sources()
    seen = set()
    for library in libraries():
        try:
            compiler = Nvrtc(library)
            target = compiler.target(device.capability)
        except KernelError as error:
            # Names that are merely tried are no news.
            if os.sep in library:
                refusals.append(error.args[0])
            continue
        if compiler.version in seen:
            continue
        seen.add(compiler.version)
        label = f"NVRTC {compiler.version[0]}.{compiler.version[1]}"
        recipe = repr((target, compiler.version, OPTIONS, source, sorted(headers.items())))
        cached = cache() / f"{hashlib.sha256(recipe.encode()).hexdigest()}.{target}"
        if cached.is_file():
            yield f"{label}, from {cached.parent}", cached.read_bytes()
        try:
            data = compiler.compile(source, headers, target)
        except KernelError as error:
            refusals.append(f"{label}: {error.args[0]}")
            continue
        _keep(cached, data)
        yield label, data


def sources() -> tuple[bytes, dict[str, bytes]]:
    """Read the kernels' source, and what it includes by name."""
    texts = {}
    for name in (SOURCE, *HEADERS):
        path = resource(name)
        if path is None:
            raise ConfigurationError(
                f"{name} is missing in flwr-decentral-kernels: install the wheel again"
            )
        texts[name] = path.read_bytes()
    source = texts.pop(SOURCE)
    # The kernels name them from their own folder, and they each other from theirs.
    return source, {up + name: text for name, text in texts.items() for up in ("../", "")}


def _outdated(built: Path) -> bool:
    """Tell whether a source has been changed since, as may be in a checkout."""
    paths = [resource(name) for name in (SOURCE, *HEADERS)]
    # What was installed together has the times at which each file was written, in any order.
    return any(
        path.stat().st_mtime > built.stat().st_mtime
        for path in paths
        if path is not None and not path.is_relative_to(built.parent)
    )


def cache() -> Path:
    """Name the folder of what was compiled, which may be removed at any time."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "flwr-decentral" / "kernels"


def _keep(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; without a place to write to, it is compiled each time."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError:
        return
