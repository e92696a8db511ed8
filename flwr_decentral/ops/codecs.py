"""The forms of payloads on the wire, in numpy: every backend gives these bits.

Each form is a row of bytes, little-endian; :mod:`flwr_decentral.core.wire` has their sizes.
Writing, reading and writing again gives the same bytes, so a vector that was rounded once travels
without further loss.

Rounding is to nearest, ties to even. Denormals are numbers like others, never flushed, except in
int8. The result is a function of the bits of the input alone, on every backend and machine:

- bfloat16 and float16 keep infinities, signs of zeros, and NaNs, which become quiet and keep the
  upper bits of their payload. What is too large becomes infinite.
- int8 has first, for each block of 256 values, the last one perhaps shorter, a scale of float32,
  then for each value a code from -127 to 127. A value is read as its code times the scale. The
  scale is the largest magnitude of the block over 127, rounded up to 16 significant bits: up, so
  that no code is beyond 127, and to so few bits that the product of code and scale is exact. A code
  is the value over the scale, rounded.
- A block of int8 without a magnitude of 2**-100 or more has the scale 0 and codes 0.
- A block of int8 that holds a value that is not finite has the scale NaN (0x7fc00000) and codes 0:
  it decodes to NaN throughout, so that its receiver refuses it as it refuses any other NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flwr_decentral.core.wire import BLOCK, Wire, check_wire, wire_bytes

from .checks import check_bytes, check_vectors
from .contract import Bytes, Vector

__all__ = ["decode", "encode", "rounded"]

_PART: Final = 256 * BLOCK
_LARGEST: Final = np.float32(127)
_LEAST: Final = np.float32(2.0**-100)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITE: Final = np.uint32(0x7F800000)
_QUIET: Final = np.uint32(0x7FC00000)
_LOW_BITS: Final = np.uint32(0xFF)


def encode(x: Vector, wire: Wire) -> Bytes:
    """Turn a vector into bytes.

    Parameters
    ----------
    x : ndarray of float32, shape (D,)
        C-contiguous.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form.

    Returns
    -------
    ndarray of uint8, shape (wire_bytes(D, wire),)
        New bytes; for float32 they may be those of x.

    Raises
    ------
    ConfigurationError
        If there is no such form.
    TypeError, ValueError
        If x is not a vector of float32.

    Examples
    --------
    >>> encode(np.array([1.0, -2.5], np.float32), "bfloat16").tolist()
    [128, 63, 32, 192]
    """
    check_wire(wire)
    check_vectors(x)
    if x.dtype != np.float32:
        raise TypeError(f"only vectors of float32 are encoded, got {x.dtype}")
    return _ENCODERS[wire](x)


def decode(data: Bytes, wire: Wire, length: int) -> Vector:
    """Turn bytes into the vector nearest to the one they were made of.

    Parameters
    ----------
    data : ndarray of uint8, shape (wire_bytes(length, wire),)
        C-contiguous, at any address. Any bytes of that number make a vector, whose values need
        not be finite.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form.
    length : int
        How many values to make.

    Returns
    -------
    ndarray of float32, shape (length,)
        A new vector; for float32 its memory may be that of data.

    Raises
    ------
    ConfigurationError
        If there is no such form.
    TypeError, ValueError
        If data are no bytes, or not as many as ``wire_bytes(length, wire)``.
    """
    check_bytes(data, wire, length)
    if wire == "float32":
        return _decode_float32(data)
    x = np.empty(length, np.float32)
    scales = wire_bytes(length, wire) - length
    # In parts: what a peer has sent must not cost many times its length, whatever it holds.
    for start in range(0, length, _PART):
        stop = min(start + _PART, length)
        match wire:
            case "bfloat16":
                x[start:stop] = _decode_bfloat16(data[2 * start : 2 * stop])
            case "float16":
                x[start:stop] = _decode_float16(data[2 * start : 2 * stop])
            case "int8":
                of_part = data[4 * start // BLOCK : 4 * _blocks(stop)]
                x[start:stop] = _decode_int8(of_part, data[scales + start : scales + stop])
    return x


def rounded(x: Vector, wire: Wire) -> Vector:
    """Round a vector to what its receivers will read: ``x`` itself for float32, else a new one."""
    check_wire(wire)
    return x if wire == "float32" else decode(encode(x, wire), wire, len(x))


def _values(data: Bytes, kind: str) -> NDArray[np.generic]:
    """Copy little-endian values out of bytes, which may lie at any address."""
    little = np.dtype(kind).newbyteorder("<")
    return np.frombuffer(data.tobytes(), little).astype(little.newbyteorder("="))


def _bytes(values: NDArray[np.generic]) -> Bytes:
    little = values.astype(values.dtype.newbyteorder("<"))
    return little.view(np.uint8)


def _encode_float32(x: Vector) -> Bytes:
    return x.astype("<f4", copy=False).view(np.uint8)


def _decode_float32(data: Bytes) -> Vector:
    little = np.frombuffer(data, "<f4")
    return little.astype(np.float32, copy=not little.flags.aligned)


def _encode_bfloat16(x: Vector) -> Bytes:
    bits = x.view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    nan = (bits & _MAGNITUDE) > _INFINITE
    return _bytes(np.where(nan, upper | np.uint32(0x40), rounded).astype(np.uint16))


def _decode_bfloat16(data: Bytes) -> Vector:
    upper = _values(data, "u2").astype(np.uint32)
    return (upper << np.uint32(16)).view(np.float32)


def _encode_float16(x: Vector) -> Bytes:
    with np.errstate(all="ignore"):
        half = x.astype(np.float16).view(np.uint16)
    # What numpy makes of a NaN depends on how it was built.
    at = np.flatnonzero(np.isnan(x))
    bits = x.view(np.uint32)[at]
    sign, payload = bits >> np.uint32(16) & np.uint32(0x8000), bits >> np.uint32(13)
    half[at] = sign | np.uint32(0x7E00) | payload & np.uint32(0x1FF)
    return _bytes(half)


def _decode_float16(data: Bytes) -> Vector:
    half = _values(data, "u2")
    with np.errstate(all="ignore"):
        x = half.view(np.float16).astype(np.float32)
    at = np.flatnonzero(np.isnan(x))
    bits = half[at].astype(np.uint32)
    sign, payload = (bits & np.uint32(0x8000)) << np.uint32(16), bits & np.uint32(0x3FF)
    x.view(np.uint32)[at] = sign | _QUIET | payload << np.uint32(13)
    return x


def _encode_int8(x: Vector) -> Bytes:
    count = _blocks(len(x))
    blocks = np.zeros((count, BLOCK), np.float32)
    blocks.reshape(-1)[: len(x)] = x
    # The bits of magnitudes are ordered as the magnitudes are, with infinity and NaN above.
    peak = (blocks.view(np.uint32) & _MAGNITUDE).max(axis=1)
    broken = peak >= _INFINITE
    kept = ~broken & (peak.view(np.float32) >= _LEAST)
    blocks[~kept] = 0
    scale = np.where(kept, peak.view(np.float32), np.float32(0)) / _LARGEST
    bits = (scale.view(np.uint32) + _LOW_BITS) & ~_LOW_BITS
    blocks /= np.where(kept, bits.view(np.float32), np.float32(1))[:, None]
    codes = np.rint(blocks).astype(np.int8).reshape(-1)[: len(x)]
    return np.concatenate([_bytes(np.where(broken, _QUIET, bits)), codes.view(np.uint8)])


def _decode_int8(scales: Bytes, codes: Bytes) -> Vector:
    scale = _values(scales, "u4").view(np.float32)
    with np.errstate(all="ignore"):  # the scales are the sender's
        return codes.view(np.int8).astype(np.float32) * np.repeat(scale, BLOCK)[: len(codes)]


def _blocks(length: int) -> int:
    return -(-length // BLOCK)


_ENCODERS: Final[dict[Wire, Callable[[Vector], Bytes]]] = {
    "float32": _encode_float32,
    "bfloat16": _encode_bfloat16,
    "float16": _encode_float16,
    "int8": _encode_int8,
}
