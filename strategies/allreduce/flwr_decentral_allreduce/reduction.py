"""What a node has of a round: its own model, the sums of others, and the means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeAlias

from flwr_decentral.core import Contiguous, Site, Vector
from flwr_decentral.core.state import Part

Sums: TypeAlias = dict[tuple[int, int], tuple[int, Vector | None]]
"""(number of models, their sum) by (chunk, child); no sum where there is no model."""


class Reduction(Part):
    """Add up chunks, and keep their means.

    Parameters
    ----------
    site : Site
        Where it runs.
    partition : Contiguous
        The chunks.

    Attributes
    ----------
    own : ndarray of float32, shape (layout.size,), optional
        What this node adds to the sums.
    sums, ahead : dict
        What came for this round and for the next.
    means : dict of int to (int, ndarray)
        (number of models, their mean) by chunk.
    sent : set of int
        The chunks whose sum is out.
    """

    STATE: ClassVar[tuple[str, ...]] = ("own", "sums", "ahead", "means", "sent")

    def __init__(self, site: Site, partition: Contiguous) -> None:
        self.site, self.partition = site, partition
        self.own: Vector | None = None
        self.sums: Sums = {}
        self.ahead: Sums = {}
        self.means: dict[int, tuple[int, Vector]] = {}
        self.sent: set[int] = set()

    @property
    def missing(self) -> list[int]:
        """The chunks without a mean, ascending."""
        return [c for c in range(self.partition.fragments) if c not in self.means]

    @property
    def complete(self) -> bool:
        """Whether all chunks have their means."""
        return len(self.means) == self.partition.fragments

    @property
    def present(self) -> int:
        """How many models are in the mean of every chunk."""
        return min(count for count, _ in self.means.values())

    def awaited(self, chunk: int, children: Iterable[int]) -> list[int]:
        """List the children whose sum is still to come."""
        return [child for child in children if (chunk, child) not in self.sums]

    def total(self, chunk: int, children: Iterable[int]) -> tuple[int, Vector | None]:
        """Add up this node's values and its children's sums, in ascending order of nodes.

        Returns
        -------
        int, ndarray or None
            How many models are in the sum, and the sum if there are any.
        """
        terms = {child: self.sums[chunk, child] for child in children}
        if self.own is not None:
            terms[self.site.node] = 1, self.site.ops.pack(self.own, self.partition, chunk)
        vectors = [vector for _, (_, vector) in sorted(terms.items()) if vector is not None]
        count = sum(count for count, _ in terms.values())
        if len(vectors) < 2:
            return count, vectors[0] if vectors else None
        return count, self.site.ops.combine(vectors, [1.0] * len(vectors))

    def mean(self, chunk: int, children: Iterable[int], model: Vector) -> tuple[int, Vector]:
        """Average the models of all nodes, as the owner; without any, keep what the model has."""
        count, total = self.total(chunk, children)
        if total is None:
            return 0, self.site.ops.pack(model, self.partition, chunk)
        return count, total if count == 1 else self.site.ops.combine([total], [1 / count])

    def learn(self, chunk: int, count: int, mean: Vector, children: Sequence[int]) -> None:
        """Keep a mean, in place of the sums that are in it."""
        self.means[chunk] = count, mean
        for child in children:
            self.sums.pop((chunk, child), None)

    def model(self) -> Vector:
        """Put all means together."""
        chunks = range(self.partition.fragments)
        return self.site.ops.assemble(self.partition, [self.means[c][1] for c in chunks])

    def turn(self, *, missed: bool = False) -> None:
        """Begin another round: the next one or, where some were missed, a later one."""
        self.own = None
        self.sums, self.ahead = {} if missed else self.ahead, {}
        self.means, self.sent = {}, set()

    def forget_sums(self) -> None:
        """Begin the exchange anew, with what was trained and with the means that are there."""
        self.sums, self.ahead, self.sent = {}, {}, set()
