"""Vector arithmetic by the compiled library, with the bits of the reference."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flwr_decentral.core.errors import ConfigurationError, suggest
from flwr_decentral.core.fragments import Partition, Rotation
from flwr_decentral.core.wire import WIRES, Wire, check_wire, wire_bytes
from flwr_decentral.ops.checks import (
    check_bytes,
    check_left_out,
    check_out,
    check_partitioned,
    check_payloads,
    check_pieces,
    check_vectors,
    check_weights,
)
from flwr_decentral.ops.contract import Bytes, Piece, Vector
from flwr_decentral.ops.reference import Reference

from .library import check, load
from .memory import Pool

THREADS: Final = "FLWR_DECENTRAL_KERNELS_THREADS"
"""The environment variable that says how many threads may work on one vector."""

ISA: Final = "FLWR_DECENTRAL_KERNELS_ISA"
"""The environment variable that names an instruction set, to compare them."""

ISAS: Final = {"baseline": 1, "x86-64-v2": 2, "x86-64-v3": 3}

_MOST_THREADS: Final = 64
_THREADED_FROM: Final = 2**20
_GROUP_BELOW: Final = 2**31
_GROUPS_BELOW: Final = 2**32 - 1

_Shape = tuple[int, int, int, int]


class Native:
    """Vector arithmetic in compiled code. See :class:`~flwr_decentral.ops.contract.Ops`.

    Partitions other than :class:`~flwr_decentral.core.fragments.Rotation` are left to the
    reference.

    Parameters
    ----------
    isa : {"baseline", "x86-64-v2", "x86-64-v3"}, optional
        The instruction set; by default what ``FLWR_DECENTRAL_KERNELS_ISA`` says, or the best that
        this machine has. The bits do not depend on it.
    threads : int, optional
        How many threads may work on one vector; by default what ``FLWR_DECENTRAL_KERNELS_THREADS``
        says, or 1. The bits do not depend on it.
    threaded_from : int (default: 2**20)
        The number of values from which on more than one thread is worth its start.

    Raises
    ------
    ConfigurationError
        If the library is not there, or a value is out of range.
    """

    name = "native"

    def __init__(
        self,
        *,
        isa: str | None = None,
        threads: int | None = None,
        threaded_from: int = _THREADED_FROM,
    ) -> None:
        self._library = load()
        self._isa = _choose_isa(self._library.fdk_isas(), isa or os.environ.get(ISA))
        self._threads = _count_threads(os.environ.get(THREADS) if threads is None else threads)
        self._threaded_from = threaded_from
        self._reference = Reference()
        self._pool = Pool()

    def describe(self) -> str:
        """Say what does the arithmetic."""
        isa = next(name for name, number in ISAS.items() if number == self._isa)
        return f"compiled for {isa}, {self._threads} thread{'s' if self._threads > 1 else ''}"

    def update(self, x: Vector, before: Vector, after: Vector) -> Vector:
        """Apply what training did."""
        length = check_vectors(x, before, after)
        if x is before:
            return after
        out = self._pool.empty(length)
        self._call("update", length, *_aligned(x, before, after), length, out)
        return out

    def combine(
        self, vectors: Sequence[Vector], weights: Sequence[float], out: Vector | None = None
    ) -> Vector:
        """Sum weighted vectors, from the first to the last."""
        check_weights(vectors, weights)
        length = check_vectors(*vectors)
        if out is not None:
            check_out(out, length, apart_from=vectors[1:], or_the_same_as=vectors[0])
            if not out.flags.aligned:
                return self._reference.combine(vectors, weights, out)
        target = self._pool.empty(length) if out is None else out
        table, _kept = _table(vectors)
        factors = np.array([np.float32(weight) for weight in weights], np.float32)
        self._call("combine", length, table, factors, len(vectors), length, target)
        return target

    def sums_without(self, vectors: Sequence[Vector], left_out: Sequence[int]) -> list[Vector]:
        """Sum all vectors but one, for each of several that are left out."""
        check_left_out(len(vectors), left_out)
        length = check_vectors(*vectors)
        outs = [self._pool.empty(length) for _ in left_out]
        (table, _kept), (targets, _) = _table(vectors), _table(outs)
        which = np.array(left_out, np.int64)
        values = length * len(outs)
        self._call("sums_without", values, table, len(vectors), which, len(which), length, targets)
        return outs

    def pairwise(self, x: Vector, mine: Vector, theirs: Vector, weight: float) -> Vector:
        """Move toward a peer by what it was apart."""
        length = check_vectors(x, mine, theirs)
        out = self._pool.empty(length)
        self._call("pairwise", length, *_aligned(x, mine, theirs), weight, length, out)
        return out

    def mix(self, x: Vector, y: Vector, share: float) -> tuple[Vector, Vector]:
        """Move two vectors toward each other."""
        length = check_vectors(x, y)
        outs = self._pool.empty(length), self._pool.empty(length)
        self._call("mix", length, *_aligned(x, y), share, length, *outs)
        return outs

    def mix_pairwise(
        self,
        x: Vector,
        y: Vector,
        mine: Vector,
        theirs: Vector,
        *,
        share: float | None,
        weights: tuple[float, float],
    ) -> tuple[Vector, Vector]:
        """Mix two vectors, and then move both toward a peer."""
        length = check_vectors(x, y, mine, theirs)
        outs = self._pool.empty(length), self._pool.empty(length)
        flow = share is not None, 0.0 if share is None else share
        inputs = _aligned(x, y, mine, theirs)
        self._call("mix_pairwise", length, *inputs, *flow, *weights, length, *outs)
        return outs

    def mix_update(
        self, x: Vector, y: Vector, before: Vector, after: Vector, *, share: float | None
    ) -> tuple[Vector, Vector]:
        """Mix two vectors, and then apply to both what training did."""
        length = check_vectors(x, y, before, after)
        if share is None:
            return self.update(x, before, after), self.update(y, before, after)
        outs = self._pool.empty(length), self._pool.empty(length)
        inputs = _aligned(x, y, before, after)
        self._call("mix_update", length, *inputs, True, share, length, *outs)
        return outs

    def pack(self, x: Vector, partition: Partition, fragment: int) -> Vector:
        """Copy one fragment out of a vector."""
        shape = _shape(partition)
        if shape is None:
            return self._reference.pack(x, partition, fragment)
        check_partitioned(x, partition)
        out = self._pool.empty(self._lengths(partition, shape)(fragment))
        self._call("pack", len(x), *_aligned(x), *shape, operator.index(fragment), out)
        return out

    def pack_all(self, x: Vector, partition: Partition) -> list[Vector]:
        """Copy every fragment out of a vector."""
        shape = _shape(partition)
        if shape is None:
            return self._reference.pack_all(x, partition)
        check_partitioned(x, partition)
        length = self._lengths(partition, shape)
        outs = [self._pool.empty(length(fragment)) for fragment in range(partition.fragments)]
        self._call("pack_all", len(x), *_aligned(x), *shape, _table(outs)[0])
        return outs

    def assemble(self, partition: Partition, payloads: Sequence[Vector]) -> Vector:
        """Put all fragments together again."""
        shape = _shape(partition)
        if shape is None:
            return self._reference.assemble(partition, payloads)
        check_payloads(
            payloads, list(map(self._lengths(partition, shape), range(partition.fragments)))
        )
        out = self._pool.empty(partition.size)
        table, _kept = _table(payloads)
        self._call("assemble", len(out), table, *shape, out)
        return out

    def average(
        self, x: Vector, partition: Partition, pieces: Sequence[Piece], out: Vector | None = None
    ) -> Vector:
        """Average a vector with an inbox of fragments, each coordinate by its own count."""
        shape = _shape(partition)
        if shape is None:
            return self._reference.average(x, partition, pieces, out)
        check_partitioned(x, partition)
        check_pieces(x, pieces, self._lengths(partition, shape))
        received = [payload for _, payload in pieces]
        if out is not None:
            check_out(out, partition.size, apart_from=received, or_the_same_as=x)
            if not out.flags.aligned:
                return self._reference.average(x, partition, pieces, out)
        target = self._pool.empty(partition.size) if out is None else out
        fragments = np.array([fragment for fragment, _ in pieces], np.uint32)
        table, _kept = _table(received)
        values = len(x) + sum(map(len, received))
        self._call("average", values, *_aligned(x), *shape, len(received), fragments, table, target)
        return target

    def encode(self, x: Vector, wire: Wire) -> Bytes:
        """Write a vector in its form on the wire."""
        if wire == "float32":
            return self._reference.encode(x, wire)
        check_wire(wire)
        length = check_vectors(x)
        out = self._pool.empty_bytes(wire_bytes(length, wire))
        self._call("encode", length, *_aligned(x), length, WIRES.index(wire), out)
        return out

    def decode(self, data: Bytes, wire: Wire, length: int) -> Vector:
        """Read a vector from its form."""
        if wire == "float32":
            return self._reference.decode(data, wire, length)
        check_bytes(data, wire, length)
        out = self._pool.empty(length)
        self._call("decode", length, data, length, WIRES.index(wire), out)
        return out

    def rounded(self, x: Vector, wire: Wire) -> Vector:
        """Round a vector to what the receivers of a form read."""
        return x if wire == "float32" else self.decode(self.encode(x, wire), wire, len(x))

    def finite(self, x: Vector) -> bool:
        """Tell whether every value is finite."""
        length = check_vectors(x)
        return bool(self._call("finite", length, *_aligned(x), length))

    def _call(self, operation: str, values: int, *arguments: Any) -> int:
        """Call a function of the library; arrays stand for their addresses."""
        threads = self._threads if values >= self._threaded_from else 1
        passed = (_address(each) if isinstance(each, np.ndarray) else each for each in arguments)
        function = getattr(self._library, f"fdk_{operation}")
        return check(function(*passed, self._isa, threads))

    def _lengths(self, partition: Partition, shape: _Shape) -> Callable[[int], int]:
        """Tell the lengths of fragments without the list of all rotations."""

        def length(fragment: int) -> int:
            if not 0 <= fragment < partition.fragments:
                return partition.length(fragment)  # which says what is wrong
            return _length(shape, operator.index(fragment))

        return length


def _shape(partition: Partition) -> _Shape | None:
    """Describe a partition in numbers, if the library knows its kind and can count so far."""
    if type(partition) is not Rotation:
        return None
    group = partition.fragments * partition.granularity
    if group >= _GROUP_BELOW or partition.size // group >= _GROUPS_BELOW:
        return None
    return partition.size, partition.fragments, partition.granularity, partition.key


@lru_cache(maxsize=4096)
def _length(shape: _Shape, fragment: int) -> int:
    return int(load().fdk_fragment(*shape, fragment))


def _aligned(*vectors: Vector) -> tuple[Vector, ...]:
    """Refuse what is not of float32, and copy what lies at an odd address, as bytes may."""
    for each in vectors:
        if each.dtype != np.float32:
            raise TypeError(f"compiled kernels take vectors of float32, got {each.dtype}")
    return tuple(each if each.flags.aligned else each.copy() for each in vectors)


def _table(vectors: Sequence[Vector]) -> tuple[NDArray[np.uintp], tuple[Vector, ...]]:
    """List addresses, and what must be kept for them to be valid."""
    kept = _aligned(*vectors)
    return np.array([_address(each) for each in kept], np.uintp), kept


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _choose_isa(usable: int, wanted: str | None) -> int:
    here = {name: number for name, number in ISAS.items() if usable >> number & 1}
    if not wanted:
        return max(here.values())
    if wanted not in here:
        raise ConfigurationError(
            f"the kernels cannot be run with the instruction set {wanted!r} here (from {ISA} or "
            f"the call); {suggest(wanted, here)}"
        )
    return here[wanted]


def _count_threads(wanted: str | int | None) -> int:
    try:
        threads = int(wanted or 1) if wanted != 0 else 0
    except ValueError:
        threads = 0
    if not 1 <= threads <= _MOST_THREADS:
        raise ConfigurationError(
            f"the kernels need 1 to {_MOST_THREADS} threads, got {wanted!r} (from {THREADS} or "
            "the call)"
        )
    return threads
