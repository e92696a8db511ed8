"""The numpy backend, which says what is right.

The blocks of a rotation partition are rows of a matrix, so a fragment is a gather of rows and all
arithmetic is on whole runs of ``granularity`` values. What is left over after the last whole group
is handled by index lists, which are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_decentral.core.fragments import Contiguous, Interleaved, Partition, Rotation
from flwr_decentral.core.wire import Wire

from . import codecs
from .checks import (
    check_left_out,
    check_out,
    check_partition,
    check_partitioned,
    check_payloads,
    check_pieces,
    check_vectors,
    check_weights,
)
from .contract import Bytes, Piece, Vector

_PART: Final = 2**18
"""Values whose answers fit into the cache."""


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

    def describe(self) -> str:
        """Say what does the arithmetic."""
        return f"numpy {np.__version__}"

    def update(self, x: Vector, before: Vector, after: Vector) -> Vector:
        """Apply what training did."""
        check_vectors(x, before, after)
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
        check_weights(vectors, weights)
        length = check_vectors(*vectors)
        if out is not None:
            check_out(out, length, apart_from=vectors[1:], or_the_same_as=vectors[0])
        total = np.multiply(vectors[0], np.float32(weights[0]), out=out)
        product = np.empty_like(total) if len(vectors) > 1 else total
        for vector, weight in zip(vectors[1:], weights[1:], strict=True):
            total += np.multiply(vector, np.float32(weight), out=product)
        return total

    def sums_without(self, vectors: Sequence[Vector], left_out: Sequence[int]) -> list[Vector]:
        """Sum all vectors but one, for each of several that are left out."""
        check_left_out(len(vectors), left_out)
        check_vectors(*vectors)
        ones = [1.0] * (len(vectors) - 1)
        return [self.combine([*vectors[:k], *vectors[k + 1 :]], ones) for k in left_out]

    def pairwise(self, x: Vector, mine: Vector, theirs: Vector, weight: float) -> Vector:
        """Move toward a peer by what it was apart."""
        check_vectors(x, mine, theirs)
        moved = theirs - mine
        moved *= np.float32(weight)
        moved += x
        return moved

    def mix(self, x: Vector, y: Vector, share: float) -> tuple[Vector, Vector]:
        """Move two vectors toward each other."""
        check_vectors(x, y)
        step = y - x
        step *= np.float32(share)
        rest = y - step
        step += x
        return step, rest

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
        check_vectors(x, y, mine, theirs)
        if share is not None:
            x, y = self.mix(x, y, share)
        near, far = weights
        return self.pairwise(x, mine, theirs, near), self.pairwise(y, mine, theirs, far)

    def mix_update(
        self, x: Vector, y: Vector, before: Vector, after: Vector, *, share: float | None
    ) -> tuple[Vector, Vector]:
        """Mix two vectors, and then apply to both what training did."""
        check_vectors(x, y, before, after)
        if share is not None:
            x, y = self.mix(x, y, share)
        return self.update(x, before, after), self.update(y, before, after)

    def pack(self, x: Vector, partition: Partition, fragment: int) -> Vector:
        """Copy one fragment out of a vector."""
        check_partitioned(x, partition)
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
        check_partitioned(x, partition)
        return [self.pack(x, partition, fragment) for fragment in range(partition.fragments)]

    def assemble(self, partition: Partition, payloads: Sequence[Vector]) -> Vector:
        """Put all fragments together again."""
        check_partition(partition)
        lengths = [partition.length(fragment) for fragment in range(partition.fragments)]
        check_payloads(payloads, lengths)
        x = np.empty(partition.size, np.float32)
        for fragment, payload in enumerate(payloads):
            self._unpack(x, partition, fragment, payload)
        return x

    def average(
        self, x: Vector, partition: Partition, pieces: Sequence[Piece], out: Vector | None = None
    ) -> Vector:
        """Average a vector with an inbox of fragments, each coordinate by its own count."""
        check_partitioned(x, partition)
        check_pieces(x, pieces, partition.length)
        if out is not None:
            received = [payload for _, payload in pieces]
            check_out(out, partition.size, apart_from=received, or_the_same_as=x)
        by_fragment: dict[int, list[Vector]] = {}
        for fragment, payload in pieces:
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
        length = check_vectors(x)
        if length <= _PART:
            return bool(np.isfinite(x).all())
        parts = (x[start : start + _PART] for start in range(0, length, _PART))
        return all(np.isfinite(part).all() for part in parts)

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


def _matrix(x: Vector, partition: Rotation) -> NDArray[np.float32]:
    """View the whole blocks of a vector as rows."""
    whole = len(x) // partition.granularity
    return x[: whole * partition.granularity].reshape(whole, partition.granularity)
