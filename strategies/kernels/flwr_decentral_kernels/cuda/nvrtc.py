"""NVRTC, NVIDIA's compiler as a library, called through ctypes.

It is used where no image of the kernels was built ahead, or none that this driver takes. torch's
own wheels bring it along, in the version that fits the driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from .errors import KernelError

OPTIONS: Final = (
    *(b"--std=c++17", b"--device-as-default-execution-space"),
    # Without these the bits would not be those of the reference.
    *(b"--fmad=false", b"--prec-div=true", b"--ftz=false"),
)

_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcGetNumSupportedArchs": (POINTER(c_int),),
    "nvrtcGetSupportedArchs": (POINTER(c_int),),
    "nvrtcCreateProgram": (
        POINTER(c_void_p),
        *(c_char_p, c_char_p, c_int, POINTER(c_char_p), POINTER(c_char_p)),
    ),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "nvrtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
    "nvrtcGetCUBINSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
    "nvrtcGetPTXSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetPTX": (c_void_p, c_char_p),
}


def libraries() -> Iterator[str]:
    """Name the libraries that may be NVRTC, those of Python's packages first, newest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(each) for each in (spec.submodule_search_locations or [])] if spec else []
    found = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*")]
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home:
            found += Path(home).glob("lib64/libnvrtc.so.*")
    yield from map(str, sorted(found, key=_newest))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def _newest(path: Path) -> tuple[int, ...]:
    return tuple(-int(number) for number in re.findall(r"\d+", path.name))


class Nvrtc:
    """The compiler.

    Parameters
    ----------
    library : str
        What to load.

    Raises
    ------
    KernelError
        If it cannot be loaded.
    """

    def __init__(self, library: str) -> None:
        try:
            # NVRTC opens its built-in functions by their bare name when it compiles, and finds
            # them only if they are loaded already. A bare name has no folder to look into.
            folder = Path(library).parent if os.sep in library else None
            for builtins in sorted(folder.glob("libnvrtc-builtins.so.*")) if folder else ():
                if ".alt." not in builtins.name:
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            self._library = ctypes.CDLL(library)
            for name, arguments in _FUNCTIONS.items():
                getattr(self._library, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise KernelError(f"{library} cannot be loaded: {error}") from error
        self._library.nvrtcGetErrorString.restype = c_char_p

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = self._library.nvrtcGetErrorString(status).decode()
            raise KernelError(f"{name} failed: {text}")

    @cached_property
    def version(self) -> tuple[int, int]:
        """The version of CUDA it is of."""
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        return major.value, minor.value

    @cached_property
    def architectures(self) -> tuple[int, ...]:
        """What it can compile for, ascending: 90 is compute capability 9.0."""
        count = c_int()
        self._call("nvrtcGetNumSupportedArchs", byref(count))
        numbers = (c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return tuple(numbers)

    def target(self, capability: tuple[int, int]) -> str:
        """Choose what to compile for: the device itself, or what its driver can translate."""
        wanted = capability[0] * 10 + capability[1]
        known = [each for each in self.architectures if each <= wanted]
        if not known:
            raise KernelError(f"NVRTC {self.version} knows no device of capability {capability}")
        return f"sm_{wanted}" if known[-1] == wanted else f"compute_{known[-1]}"

    def compile(self, source: bytes, headers: Mapping[str, bytes], target: str) -> bytes:
        """Compile to machine code, or to PTX for a virtual target.

        Parameters
        ----------
        source : bytes
            A .cu file.
        headers : mapping
            What it includes, by the names that it includes them by.
        target : str
            ``sm_90`` or ``compute_90``, for example.

        Raises
        ------
        KernelError
            If it does not compile; the message holds the compiler's.
        """
        program = c_void_p()
        count = len(headers)
        texts = (c_char_p * count)(*headers.values())
        names = (c_char_p * count)(*(name.encode() for name in headers))
        self._call("nvrtcCreateProgram", byref(program), source, b"kernels.cu", count, texts, names)
        try:
            options = [b"--gpu-architecture=" + target.encode(), *OPTIONS]
            try:
                array = (c_char_p * len(options))(*options)
                self._call("nvrtcCompileProgram", program, len(options), array)
            except KernelError as error:
                log = self._text(program, "nvrtcGetProgramLog").rstrip(b"\0").decode()
                raise KernelError(f"{error.args[0]}\n{log}") from error
            kind = "CUBIN" if target.startswith("sm_") else "PTX"
            return self._text(program, f"nvrtcGet{kind}")
        finally:
            self._call("nvrtcDestroyProgram", byref(program))

    def _text(self, program: c_void_p, name: str) -> bytes:
        size = c_size_t()
        self._call(f"{name}Size", program, byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(name, program, text)
        return text.raw
