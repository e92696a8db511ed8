"""The forms of payloads on the wire, in numpy: every backend gives these bits.

Each form is a row of bytes, little-endian. Writing, reading and writing again gives the same bytes,
so a vector that was rounded once travels without further loss.

**int8.** Each block of 256 values, the last one perhaps shorter, has a scale. First come the scales
of all blocks, float32, then the codes of all values, int8 from -127 to 127. A value is read as its
code times the scale.

- The scale is the largest magnitude of the block over 127, rounded up to 16 significant bits; up,
  so that no code is beyond 127, and to so few bits that the product of code and scale is exact.
- A code is the value over the scale, to the nearest integer, ties to even.
- A block without a magnitude of 2**-100 or more has scale 0 and is read as zeros.
- A block with a value that is not finite has the scale NaN, and all of it is read as NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flwr_decentral.core.wire import BLOCK, Wire, check_wire, wire_bytes

from .contract import Bytes, Vector

LEAST_MAGNITUDE: Final = np.float32(2.0**-100)
"""Blocks of smaller values are read as zeros in the int8 form."""

_QUIET_NAN: Final = np.uint32(0x00400000)
_LOW_BITS: Final = np.uint32(0xFF)


def encode(x: Vector, wire: Wire) -> Bytes:
    """Write a vector in a form.

    Parameters
    ----------
    x : ndarray of float32, shape (any,)
        The values.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form.

    Returns
    -------
    ndarray of uint8, shape (wire_bytes(len(x), wire),)
        A new array, except that for float32 it may share the memory of ``x``.
    """
    check_wire(wire)
    match wire:
        case "bfloat16":
            return _to_bfloat16(x).astype("<u2", copy=False).view(np.uint8)
        case "float16":
            with np.errstate(over="ignore"):
                return x.astype("<f2").view(np.uint8)
        case "int8":
            return _to_int8(x)
        case _:
            return x.astype("<f4", copy=False).view(np.uint8)


def decode(data: Bytes, wire: Wire, length: int) -> Vector:
    """Read a vector from a form.

    Parameters
    ----------
    data : ndarray of uint8, shape (wire_bytes(length, wire),)
        What :func:`encode` wrote.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form.
    length : int
        The number of values.

    Returns
    -------
    ndarray of float32, shape (length,)
        A new array, except that for float32 it may share the memory of ``data``.

    Raises
    ------
    ValueError
        If the number of bytes is not that of the length.
    """
    check_wire(wire)
    expected = wire_bytes(length, wire)
    if data.shape != (expected,):
        raise ValueError(
            f"{length} values are {expected} bytes as {wire}, got an array of shape {data.shape}"
        )
    match wire:
        case "bfloat16":
            bits = data.view("<u2").astype(np.uint32) << np.uint32(16)
            return bits.view(np.float32)
        case "float16":
            return data.view("<f2").astype(np.float32)
        case "int8":
            cut = expected - length
            scales = data[:cut].view("<f4").astype(np.float32)
            codes = data[cut:].view(np.int8).astype(np.float32)
            codes *= _spread(scales, length)
            return codes
        case _:
            return data.view("<f4").astype(np.float32, copy=False)


def rounded(x: Vector, wire: Wire) -> Vector:
    """Round a vector to what its receivers will read.

    Returns
    -------
    ndarray of float32, shape (len(x),)
        ``x`` itself for float32, else a new array.
    """
    check_wire(wire)
    return x if wire == "float32" else decode(encode(x, wire), wire, len(x))


def _to_bfloat16(x: Vector) -> NDArray[np.uint16]:
    bits = x.view(np.uint32)
    # Half of the last kept bit, less one if that bit is zero: ties go to even.
    half = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    kept = np.where(np.isnan(x), bits | _QUIET_NAN, bits + half)
    return (kept >> np.uint32(16)).astype(np.uint16)


def _to_int8(x: Vector) -> Bytes:
    blocks = -(-len(x) // BLOCK)
    data = np.empty(wire_bytes(len(x), "int8"), np.uint8)
    if not blocks:
        return data
    # Zeros do not change the largest magnitude; NaN is the maximum of whatever it is among.
    padded = np.zeros(blocks * BLOCK, np.float32)
    np.abs(x, out=padded[: len(x)])
    largest = padded.reshape(blocks, BLOCK).max(axis=1)
    largest[np.isinf(largest)] = np.nan
    scales = largest / np.float32(127)
    bits = (scales.view(np.uint32) + _LOW_BITS) & ~_LOW_BITS
    scales = np.where(np.isnan(largest), np.float32(np.nan), bits.view(np.float32))
    scales[largest < LEAST_MAGNITUDE] = 0
    usable = np.where(scales > 0, scales, np.float32(1))
    codes = x / _spread(usable, len(x))
    np.rint(codes, out=codes)
    codes[_spread(~(scales > 0), len(x))] = 0
    cut = 4 * blocks
    data[:cut] = scales.astype("<f4", copy=False).view(np.uint8)
    data[cut:] = codes.astype(np.int8).view(np.uint8)
    return data


def _spread(of_blocks: NDArray[Any], length: int) -> NDArray[Any]:
    """Repeat what belongs to a block for each of its values."""
    return np.repeat(of_blocks, BLOCK)[:length]
