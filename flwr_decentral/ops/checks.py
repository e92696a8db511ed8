"""What every backend refuses, before it writes anything.

A vector is of float32. The reference alone computes in another precision too, where all vectors are
of it: what a paper claims exactly is checked in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from flwr_decentral.core.fragments import Partition
from flwr_decentral.core.wire import Wire, check_wire, wire_bytes

from .contract import Bytes, Piece, Vector


def check_vectors(*vectors: Vector) -> int:
    """Demand vectors of one length.

    Returns
    -------
    int
        The length.

    Raises
    ------
    TypeError
        If one is not an ndarray of floating-point numbers, or if their types differ.
    ValueError
        If one is not one-dimensional and C-contiguous, or if their lengths differ.
    """
    for vector in vectors:
        _check_vector(vector)
    if len(vectors) == 1:
        return len(vectors[0])
    _check_types(*vectors)
    lengths = {len(vector) for vector in vectors}
    if len(lengths) > 1:
        # numpy would stretch a vector of length one.
        raise ValueError(f"vectors of lengths {sorted(lengths)} do not go together")
    return lengths.pop()


def check_weights(vectors: Sequence[Any], weights: Sequence[float]) -> None:
    """Demand at least one vector, and a weight for each.

    Raises
    ------
    ValueError
        If there is none, or their numbers differ.
    """
    if not vectors or len(vectors) != len(weights):
        raise ValueError(f"{len(vectors)} vectors and {len(weights)} weights do not combine")


def check_partition(partition: Partition) -> None:
    """Demand a partition.

    Raises
    ------
    TypeError
        If it is something else.
    """
    if not isinstance(partition, Partition):
        raise TypeError(f"vectors are cut by a Partition, got {type(partition).__qualname__}")


def check_partitioned(x: Vector, partition: Partition) -> None:
    """Demand a partition, and a vector of the length that it is of.

    Raises
    ------
    TypeError, ValueError
        If one is something else, or of another length.
    """
    check_partition(partition)
    _check_vector(x)
    if len(x) != partition.size:
        raise ValueError(f"the partition is of {partition.size} values, got a vector of {len(x)}")


def check_out(
    out: Vector, length: int, *, apart_from: Sequence[Vector], or_the_same_as: Vector
) -> None:
    """Demand a vector that a result may be written to.

    Parameters
    ----------
    out : ndarray of float32, shape (length,)
        Where to write.
    length : int
        How long the result is.
    apart_from : sequence of ndarray
        What it must not overlap.
    or_the_same_as : ndarray
        What it may share all its memory with, but not a part.

    Raises
    ------
    TypeError, ValueError
        If it does not fit.
    """
    _check_vector(out)
    _check_types(out, or_the_same_as)
    if len(out) != length:
        raise ValueError(f"a result of {length} values does not fit into a vector of {len(out)}")
    if not out.flags.writeable:
        raise ValueError("the vector for the result is read-only")
    # The bounds of contiguous arrays say all about what they share.
    if _address(out) != _address(or_the_same_as) and np.may_share_memory(out, or_the_same_as):
        raise ValueError("the vector for the result overlaps its first input in part")
    if any(np.may_share_memory(out, vector) for vector in apart_from):
        raise ValueError("the vector for the result overlaps an input")


def check_pieces(x: Vector, pieces: Sequence[Piece], length: Callable[[int], int]) -> None:
    """Demand fragments of the length that they have here.

    Parameters
    ----------
    x : ndarray of float32
        The vector that they are averaged with.
    pieces : sequence of Piece
        What was received.
    length : callable
        Tells the length of a fragment, or raises a ValueError if there is no such fragment.

    Raises
    ------
    TypeError, ValueError
        If one does not fit.
    """
    for fragment, payload in pieces:
        _check_vector(payload)
        _check_types(x, payload)
        expected = length(fragment)
        if len(payload) != expected:
            raise ValueError(
                f"fragment {fragment} has {expected} values here, a peer sent {len(payload)}"
            )


def check_payloads(payloads: Sequence[Vector], lengths: Sequence[int]) -> None:
    """Demand all fragments of a partition, in their order.

    Raises
    ------
    TypeError, ValueError
        If they are others.
    """
    for payload in payloads:
        _check_vector(payload)
    _check_types(*payloads)
    if [len(payload) for payload in payloads] != lengths:
        raise ValueError(
            f"the fragments have {lengths} values, got {[len(each) for each in payloads]}"
        )


def check_left_out(count: int, left_out: Sequence[int]) -> None:
    """Demand that what is left out of sums is there, once, in ascending order, and not all.

    Raises
    ------
    ValueError
        If it is not.
    """
    if count < 2:
        raise ValueError(f"of {count} vectors none can be left out")
    ascending = all(a < b for a, b in pairwise(left_out))
    if not ascending or not all(0 <= index < count for index in left_out):
        raise ValueError(f"{list(left_out)} are not some of {count} vectors in ascending order")


def check_bytes(data: Bytes, wire: Wire, length: int) -> None:
    """Demand as many bytes as a vector is on a wire.

    Raises
    ------
    ConfigurationError
        If there is no such wire.
    TypeError, ValueError
        If they are no bytes, or not as many.
    """
    check_wire(wire)
    kind = getattr(data, "dtype", type(data))
    if kind != np.uint8:
        raise TypeError(f"only arrays of uint8 are decoded, got {kind}")
    if data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError(f"got shape {data.shape} and strides {data.strides}, not contiguous bytes")
    expected = wire_bytes(length, wire)
    if len(data) != expected:
        raise ValueError(f"{length} values as {wire} take {expected} bytes, got {len(data)}")


def _check_vector(x: Any) -> None:
    if not isinstance(x, np.ndarray):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        hint = ""
        if type(x).__module__.partition(".")[0] == "torch":
            hint = "; hand over tensor.detach().numpy()"
        raise TypeError(f"a vector is a numpy array, got {kind}{hint}")
    if x.dtype.kind != "f":
        raise TypeError(f"a vector is of float32, got {x.dtype}")
    if x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(
            f"a vector is one-dimensional and contiguous, got shape {x.shape} and strides "
            f"{x.strides}"
        )


def _check_types(*vectors: Vector) -> None:
    types = {vector.dtype for vector in vectors}
    if len(types) > 1:
        raise TypeError(f"vectors of {' and '.join(sorted(map(str, types)))} do not go together")


def _address(x: Vector) -> int:
    return int(x.__array_interface__["data"][0])
