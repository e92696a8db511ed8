"""The numpy backend, which says what is right.

The blocks of a rotation partition are rows of a matrix, so a fragment is a gather of rows and all
arithmetic is on whole runs of ``granularity`` values. What is left over after the last whole group
is handled by index lists, which are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_decentral.core.fragments import Contiguous, Interleaved, Partition, Rotation
from flwr_decentral.core.wire import Wire

from . import codecs
from .contract import Bytes, Piece, Vector


class _Plan(NamedTuple):
    """Where a fragment lies: whole blocks of the matrix part, then single coordinates."""

    blocks: NDArray[np.int64]
    tail: NDArray[np.int64]


@lru_cache(maxsize=4096)
def _rotation_plan(partition: Rotation, fragment: int) -> _Plan:
    whole = partition.size // partition.granularity
    blocks = partition.blocks(fragment)
    indices = partition.indices(fragment)
    inside = blocks[blocks < whole]
    return _Plan(inside, indices[len(inside) * partition.granularity :])


class Reference:
    """Vector arithmetic in numpy. See :class:`~flwr_decentral.ops.contract.Ops`."""

    name = "reference"

    def update(self, x: Vector, before: Vector, after: Vector) -> Vector:
        """Apply what training did."""
        _check_lengths(x, before, after)
        if x is before:
            return after
        moved = after - before
        moved += x
        np.copyto(moved, after, where=x == before)
        return moved

    def combine(
        self, vectors: Sequence[Vector], weights: Sequence[float], out: Vector | None = None
    ) -> Vector:
        """Sum weighted vectors, from the first to the last."""
        if not vectors or len(vectors) != len(weights):
            raise ValueError(f"{len(vectors)} vectors and {len(weights)} weights do not combine")
        _check_lengths(*vectors, *([] if out is None else [out]))
        total = np.multiply(vectors[0], np.float32(weights[0]), out=out)
        product = np.empty_like(total) if len(vectors) > 1 else total
        for vector, weight in zip(vectors[1:], weights[1:], strict=True):
            total += np.multiply(vector, np.float32(weight), out=product)
        return total

    def pairwise(self, x: Vector, mine: Vector, theirs: Vector, weight: float) -> Vector:
        """Move toward a peer by what it was apart."""
        _check_lengths(x, mine, theirs)
        moved = theirs - mine
        moved *= np.float32(weight)
        moved += x
        return moved

    def mix(self, x: Vector, y: Vector, share: float) -> tuple[Vector, Vector]:
        """Move two vectors toward each other."""
        _check_lengths(x, y)
        step = y - x
        step *= np.float32(share)
        rest = y - step
        step += x
        return step, rest

    def pack(self, x: Vector, partition: Partition, fragment: int) -> Vector:
        """Copy one fragment out of a vector."""
        _check_size(x, partition)
        if not isinstance(partition, Rotation):
            payload = x[_where(partition, fragment)]
            return payload if payload.base is None else payload.copy()
        plan = _rotation_plan(partition, fragment)
        payload = np.empty(partition.length(fragment), np.float32)
        cut = len(plan.blocks) * partition.granularity
        rows = _matrix(payload[:cut], partition)
        # Every index is valid; clipping spares numpy a copy that it makes to raise cleanly.
        _matrix(x, partition).take(plan.blocks, axis=0, out=rows, mode="clip")
        payload[cut:] = x[plan.tail]
        return payload

    def pack_all(self, x: Vector, partition: Partition) -> list[Vector]:
        """Copy every fragment out of a vector."""
        return [self.pack(x, partition, fragment) for fragment in range(partition.fragments)]

    def assemble(self, partition: Partition, payloads: Sequence[Vector]) -> Vector:
        """Put all fragments together again."""
        lengths = [partition.length(fragment) for fragment in range(partition.fragments)]
        if [len(payload) for payload in payloads] != lengths:
            raise ValueError(
                f"the fragments have {lengths} values, got {[len(each) for each in payloads]}"
            )
        x = np.empty(partition.size, np.float32)
        for fragment, payload in enumerate(payloads):
            self._unpack(x, partition, fragment, payload)
        return x

    def average(
        self, x: Vector, partition: Partition, pieces: Sequence[Piece], out: Vector | None = None
    ) -> Vector:
        """Average a vector with an inbox of fragments, each coordinate by its own count."""
        _check_size(x, partition)
        if out is not None:
            _check_size(out, partition)
        by_fragment: dict[int, list[Vector]] = {}
        for fragment, payload in pieces:
            expected = partition.length(fragment)
            if len(payload) != expected:
                raise ValueError(
                    f"fragment {fragment} has {expected} values here, a peer sent {len(payload)}"
                )
            by_fragment.setdefault(fragment, []).append(payload)
        if out is None:
            out = x.copy()
        elif out is not x:
            out[:] = x
        for fragment, payloads in by_fragment.items():
            total = self.pack(out, partition, fragment)
            for payload in payloads:
                total += payload
            total *= np.float32(1) / np.float32(1 + len(payloads))
            self._unpack(out, partition, fragment, total)
        return out

    def encode(self, x: Vector, wire: Wire) -> Bytes:
        """Write a vector in its form on the wire."""
        return codecs.encode(x, wire)

    def decode(self, data: Bytes, wire: Wire, length: int) -> Vector:
        """Read a vector from its form on the wire."""
        return codecs.decode(data, wire, length)

    def rounded(self, x: Vector, wire: Wire) -> Vector:
        """Round a vector to what its receivers will read."""
        return codecs.rounded(x, wire)

    def finite(self, x: Vector) -> bool:
        """Tell whether every value is finite."""
        # A sum is finite only if all its terms are; the converse fails by overflow alone.
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.add.reduce(x)
        return bool(np.isfinite(total)) or bool(np.isfinite(x).all())

    def _unpack(self, x: Vector, partition: Partition, fragment: int, payload: Vector) -> None:
        if not isinstance(partition, Rotation):
            x[_where(partition, fragment)] = payload
            return
        plan = _rotation_plan(partition, fragment)
        cut = len(plan.blocks) * partition.granularity
        _matrix(x, partition)[plan.blocks] = _matrix(payload[:cut], partition)
        x[plan.tail] = payload[cut:]


def _where(partition: Partition, fragment: int) -> NDArray[np.int64] | slice:
    if isinstance(partition, Interleaved) and 0 <= fragment < partition.fragments:
        return slice(fragment, None, partition.fragments)
    if isinstance(partition, Contiguous):
        return partition.span(fragment)
    return partition.indices(fragment)


def _check_lengths(*vectors: Vector) -> None:
    # numpy would stretch a vector of length one.
    lengths = {vector.shape for vector in vectors}
    if len(lengths) > 1:
        raise ValueError(f"vectors of shapes {sorted(lengths)} do not go together")


def _check_size(x: Vector, partition: Partition) -> None:
    if x.shape != (partition.size,) or not x.flags.c_contiguous:
        raise ValueError(
            f"the partition is of {partition.size} contiguous values, got shape {x.shape} and "
            f"strides {x.strides}"
        )


def _matrix(x: Vector, partition: Rotation) -> NDArray[np.float32]:
    """View the whole blocks of a vector as rows."""
    whole = len(x) // partition.granularity
    return x[: whole * partition.granularity].reshape(whole, partition.granularity)
