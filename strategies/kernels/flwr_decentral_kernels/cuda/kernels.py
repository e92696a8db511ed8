"""What the kernels of ``kernels.cu`` take, and how its structures lie in memory.

The tests compare the sizes with those that a C++ compiler gives.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int64, c_uint16, c_uint32, c_void_p
from typing import Any, Final

MOST_TERMS: Final = 320
MOST_SUMMANDS: Final = 384
MOST_SUMS: Final = 8
MOST_FRAGMENTS: Final = 480
MOST_PIECES: Final = 384
MOST_AVERAGED: Final = 128


class Extent(Structure):
    """What a launch covers: values, the first ``4 * chunks`` of them by fours."""

    _fields_ = (("length", c_int64), ("chunks", c_int64))


class Turns(Structure):
    """A rotation partition; without ``turns``, every rotation of it is zero."""

    _fields_ = tuple((name, c_uint32) for name in ("fragments", "shift", "low", "high", "turns"))


class Terms(Structure):
    """The vectors and weights of a combination."""

    _fields_ = (
        ("vector", c_void_p * MOST_TERMS),
        ("weight", c_float * MOST_TERMS),
        ("count", c_uint32),
        ("resumes", c_uint32),
    )


class Summands(Structure):
    """The vectors of sums that each leave one of them out."""

    _fields_ = (
        ("vector", c_void_p * MOST_SUMMANDS),
        ("out", c_void_p * MOST_SUMS),
        ("left_out", c_uint32 * MOST_SUMS),
        ("count", c_uint32),
        ("first", c_uint32),
        ("sums", c_uint32),
    )


class Payloads(Structure):
    """Successive fragments."""

    _fields_ = (("of", c_void_p * MOST_FRAGMENTS), ("first", c_uint32), ("count", c_uint32))


class Inbox(Structure):
    """Received pieces of successive fragments."""

    _fields_ = (
        ("piece", c_void_p * MOST_PIECES),
        ("factor", c_float * MOST_AVERAGED),
        ("begin", c_uint16 * (MOST_AVERAGED + 1)),
        ("first", c_uint32),
        ("fragments", c_uint32),
    )


_P, _U, _F = c_void_p, c_uint32, c_float

SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "fdk_update": (_P, _P, _P, _P, Extent),
    "fdk_combine": (Terms, _P, Extent),
    "fdk_pairwise": (_P, _P, _P, _F, _P, Extent),
    "fdk_mix": (_P, _P, _F, _P, _P, Extent),
    "fdk_mix_pairwise": (_P, _P, _P, _P, _U, _F, _F, _F, _P, _P, Extent),
    "fdk_mix_update": (_P, _P, _P, _P, _U, _F, _P, _P, Extent),
    "fdk_sums_without": (Summands, Extent),
    "fdk_finite": (_P, _P, Extent),
    "fdk_pack": (_P, Turns, _U, _P, Extent),
    "fdk_pack_all": (_P, Turns, Payloads, Extent),
    "fdk_assemble": (Payloads, Turns, _P, Extent),
    "fdk_average": (_P, Inbox, Turns, _P, Extent),
    "fdk_encode_bfloat16": (_P, _P, Extent),
    "fdk_decode_bfloat16": (_P, _P, Extent),
    "fdk_encode_float16": (_P, _P, Extent),
    "fdk_decode_float16": (_P, _P, Extent),
    "fdk_encode_int8": (_P, _P, _P, Extent),
    "fdk_decode_int8": (_P, _P, _P, Extent),
}
