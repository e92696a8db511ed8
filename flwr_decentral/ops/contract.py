"""What a backend of vector arithmetic must do.

Vectors are one-dimensional, C-contiguous float32. Every operation returns a new vector (or writes
to ``out``) and leaves its inputs alone. The *order of every sum* is part of the contract, so that
all backends give the same bits: :mod:`flwr_decentral.ops.reference` is the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_decentral.core.fragments import Partition
from flwr_decentral.core.wire import Wire

Vector: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]


class Piece(NamedTuple):
    """One received fragment.

    Attributes
    ----------
    fragment : int
        Which fragment of the partition it is.
    payload : ndarray of float32, shape (partition.length(fragment),)
        Its values, in payload order.
    """

    fragment: int
    payload: Vector


class Ops(Protocol):
    """Vector arithmetic."""

    name: str

    def update(self, x: Vector, before: Vector, after: Vector) -> Vector:
        """Apply what training did: ``after`` where x equals before, else ``x + (after - before)``.

        The two differ in floating point. Each coordinate is decided by itself. The result may be
        ``after`` itself.

        Parameters
        ----------
        x : ndarray of float32, shape (D,)
            The current model.
        before, after : ndarray of float32, shape (D,)
            What training started from and what it returned.
        """
        ...

    def combine(
        self, vectors: Sequence[Vector], weights: Sequence[float], out: Vector | None = None
    ) -> Vector:
        """Sum ``weights[k] * vectors[k]``, from the first to the last.

        Each weight is rounded to float32, each product is rounded, and then added: no fused
        multiply-add.

        Parameters
        ----------
        vectors : sequence of ndarray of float32, shape (D,)
            At least one.
        weights : sequence of float
            As many.
        out : ndarray of float32, shape (D,), optional
            Where to put the result; none of the vectors but the first may overlap it.
        """
        ...

    def pairwise(self, x: Vector, mine: Vector, theirs: Vector, weight: float) -> Vector:
        """Move toward a peer by what it was apart: ``x + weight * (theirs - mine)``.

        The difference is that of the two vectors which were exchanged, so the two ends of an
        exchange move by exact opposites, whatever has become of x meanwhile. The weight is rounded
        to float32; so are the difference, the product and the sum: no fused multiply-add.

        Parameters
        ----------
        x : ndarray of float32, shape (D,)
            The current model; may be ``mine``.
        mine, theirs : ndarray of float32, shape (D,)
            What was sent and what came back.
        weight : float
            How far to go: 0.5 is to the middle.
        """
        ...

    def mix(self, x: Vector, y: Vector, share: float) -> tuple[Vector, Vector]:
        """Move two vectors toward each other: ``x + d`` and ``y - d``, d = ``share * (y - x)``.

        The share is rounded to float32; so are the difference, the product, the sum and the
        difference: no fused multiply-add.

        Parameters
        ----------
        x, y : ndarray of float32, shape (D,)
            What is mixed.
        share : float
            How far each goes: at 0.5 both become their average, up to rounding.
        """
        ...

    def pack(self, x: Vector, partition: Partition, fragment: int) -> Vector:
        """Copy one fragment out of a vector."""
        ...

    def pack_all(self, x: Vector, partition: Partition) -> list[Vector]:
        """Copy every fragment out of a vector."""
        ...

    def assemble(self, partition: Partition, payloads: Sequence[Vector]) -> Vector:
        """Put all fragments together again: the inverse of :meth:`pack_all`.

        Parameters
        ----------
        partition : Partition
            The partition that the fragments were cut by.
        payloads : sequence of ndarray of float32, shape (partition.length(k),)
            One for each fragment k, in their order.

        Raises
        ------
        ValueError
            If they are not all fragments of the partition.
        """
        ...

    def average(
        self, x: Vector, partition: Partition, pieces: Sequence[Piece], out: Vector | None = None
    ) -> Vector:
        """Average a vector with an inbox of fragments, each coordinate by its own count.

        Coordinate p becomes ``(x[p] + v_1[p] + v_2[p] + ...) * (1 / (1 + count))`` over the pieces
        that hold p, added in the order of ``pieces``, the reciprocal rounded to float32.
        Coordinates that no piece holds keep their bits.

        Parameters
        ----------
        x : ndarray of float32, shape (D,)
            The model.
        partition : Partition
            The partition that the pieces were cut by.
        pieces : sequence of Piece
            What was received, in ascending (sender, fragment).
        out : ndarray of float32, shape (D,), optional
            Where to put the result; may be ``x``.
        """
        ...

    def encode(self, x: Vector, wire: Wire) -> Bytes:
        """Write a vector in its form on the wire; see :func:`flwr_decentral.ops.codecs.encode`."""
        ...

    def decode(self, data: Bytes, wire: Wire, length: int) -> Vector:
        """Read a vector from its form; see :func:`flwr_decentral.ops.codecs.decode`."""
        ...

    def rounded(self, x: Vector, wire: Wire) -> Vector:
        """Round a vector to what the receivers of a form read, once and for all.

        For float32 it is ``x`` itself. Values that were rounded before stay as they are.
        """
        ...

    def finite(self, x: Vector) -> bool:
        """Tell whether every value is finite."""
        ...
