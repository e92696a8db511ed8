"""The compiled library: where it lies, and what its functions take.

It is called through ctypes, which releases the GIL. ``src/flwr_decentral_kernels.h`` says what each
function does.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

from flwr_decentral.core.errors import ConfigurationError, RuntimeFault

LIBRARY: Final = "libflwr_decentral_kernels.so"

_ABI: Final = 1
_HERE: Final = Path(__file__).parent
_REINSTALL: Final = "install it again, with pip's --force-reinstall --no-deps"

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_FLOAT = ctypes.c_float
_PARTITION: Final = (_SIZE, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64)
_HOW: Final = (_INT, _INT)

_SIGNATURES: Final = {
    "fdk_pack": (_POINTER, *_PARTITION, ctypes.c_uint32, _POINTER, *_HOW),
    "fdk_pack_all": (_POINTER, *_PARTITION, _POINTER, *_HOW),
    "fdk_assemble": (_POINTER, *_PARTITION, _POINTER, *_HOW),
    "fdk_average": (_POINTER, *_PARTITION, _SIZE, *(_POINTER,) * 3, *_HOW),
    "fdk_combine": (_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, *_HOW),
    "fdk_sums_without": (_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _POINTER, *_HOW),
    "fdk_update": (*(_POINTER,) * 3, _SIZE, _POINTER, *_HOW),
    "fdk_pairwise": (*(_POINTER,) * 3, _FLOAT, _SIZE, _POINTER, *_HOW),
    "fdk_mix": (*(_POINTER,) * 2, _FLOAT, _SIZE, *(_POINTER,) * 2, *_HOW),
    "fdk_mix_pairwise": (
        *(*(_POINTER,) * 4, _INT, *(_FLOAT,) * 3, _SIZE),
        *(*(_POINTER,) * 2, *_HOW),
    ),
    "fdk_mix_update": (*(_POINTER,) * 4, _INT, _FLOAT, _SIZE, *(_POINTER,) * 2, *_HOW),
    "fdk_finite": (_POINTER, _SIZE, *_HOW),
    "fdk_encode": (_POINTER, _SIZE, _INT, _POINTER, *_HOW),
    "fdk_decode": (_POINTER, _SIZE, _INT, _POINTER, *_HOW),
    "fdk_abi": (),
    "fdk_isas": (),
}


def resource(name: str) -> Path | None:
    """Find a file that this package brings.

    Parameters
    ----------
    name : str
        The path of a source from ``src`` on (``"partition.h"``), or the name of what was built
        (``"kernels.fatbin"``).

    Returns
    -------
    Path or None
        Where it lies, or None if it was not built.
    """
    # Sources of a checkout lie where they were written.
    for folder in (_HERE, _HERE / "src", _HERE.parent / "src"):
        if (folder / name).is_file():
            return folder / name
    return None


@cache
def load() -> ctypes.CDLL:
    """Load the library, once.

    Raises
    ------
    ConfigurationError
        If it is not there, or cannot be used on this machine.
    """
    path = resource(LIBRARY)
    if path is None:
        raise ConfigurationError(
            "flwr-decentral-kernels was installed without its compiled library, because there was "
            f"no C++ compiler, or it failed; see that `c++` works and {_REINSTALL}"
        )
    try:
        library = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _INT
        library.fdk_fragment.argtypes = (*_PARTITION, ctypes.c_uint32)
        library.fdk_fragment.restype = _SIZE
    except (AttributeError, OSError) as error:
        raise ConfigurationError(f"{path} cannot be used here: {error}; {_REINSTALL}") from error
    if library.fdk_abi() != _ABI:
        raise ConfigurationError(
            f"{path} is of another version than the Python code beside it; {_REINSTALL}"
        )
    return library


_REFUSALS: Final = {
    -1: "a bad length",
    -2: "a bad partition",
    -3: "a bad fragment",
    -4: "a bad number of vectors",
    -5: "a bad wire",
    -6: "an instruction set that this machine lacks",
}
_NO_MEMORY: Final = -7


def check(answer: int) -> int:
    """Return what a function answered, unless it refused to work.

    Raises
    ------
    MemoryError
        If there was no memory.
    RuntimeFault
        If it refused an argument, which our checks should have done before.
    """
    if answer >= 0:
        return answer
    if answer == _NO_MEMORY:
        raise MemoryError("no memory for the table of an inbox")
    raise RuntimeFault(f"the compiled kernels refuse {_REFUSALS.get(answer, answer)}; report this")
