"""What a backend of vector arithmetic must do.

Vectors are one-dimensional, C-contiguous float32. Every operation returns a new vector (or writes
to ``out``) and leaves its inputs alone. The *order of every sum* is part of the contract, so that
all backends give the same bits: :mod:`flwr_decentral.ops.reference` is the truth. Only which NaN it
is that an operation results in is left open, because processors differ in it; what is copied keeps
every bit.

What does not fit is refused before anything is written, by :mod:`flwr_decentral.ops.checks`.
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

    def describe(self) -> str:
        """Say in a few words what does the arithmetic, for ``flwr-decentral doctor``."""
        ...

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
            Where to put the result: the first of the vectors, or what overlaps none of them.
        """
        ...

    def sums_without(self, vectors: Sequence[Vector], left_out: Sequence[int]) -> list[Vector]:
        """Sum all vectors but one, for each of several that are left out.

        Parameters
        ----------
        vectors : sequence of ndarray of float32, shape (D,)
            At least two.
        left_out : sequence of int
            Which to leave out, ascending.

        Returns
        -------
        list of ndarray of float32, shape (D,)
            For each that is left out what :meth:`combine` makes of the others, with weights 1.
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
        """Do :meth:`mix`, and then :meth:`pairwise` to both.

        Parameters
        ----------
        x, y : ndarray of float32, shape (D,)
            What is mixed and moved.
        mine, theirs : ndarray of float32, shape (D,)
            What was sent and what came back.
        share : float or None
            How far to mix; None is not to mix at all, which keeps the sign of a zero.
        weights : tuple of float
            How far x goes, and how far y.
        """
        ...

    def mix_update(
        self, x: Vector, y: Vector, before: Vector, after: Vector, *, share: float | None
    ) -> tuple[Vector, Vector]:
        """Do :meth:`mix`, and then :meth:`update` to both.

        Parameters
        ----------
        x, y : ndarray of float32, shape (D,)
            What is mixed and updated.
        before, after : ndarray of float32, shape (D,)
            What training started from and what it returned.
        share : float or None
            How far to mix; None is not to mix at all, which keeps the sign of a zero.
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
            Where to put the result: ``x``, or what overlaps none of the inputs.
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
