"""The arithmetic of one node: what it tells each neighbor, and what it makes of what it hears.

A model consists of one *part* for each tree: the model itself, or its even and its odd coordinates.
Sums are held in a dict by (neighbor, tree), which belongs to the machine, as all state does.

All sums are taken in ascending order of node indices, the node's own part in its sorted place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard

from flwr_decentral.core import Interleaved, Message, Site, TrainDone, Tree, Vector
from flwr_decentral.core.lockstep import NOTHING
from flwr_decentral.core.wire import Wire

SUM: Final = "sum"
"""The kind of a message that carries a sum."""

Key: TypeAlias = tuple[int, int]
"""(neighbor, tree): an edge of one of the trees, as seen from this node."""

Parts: TypeAlias = tuple[Vector, ...]
"""A vector in one piece for each tree."""


class Sum(NamedTuple):
    """What came over an edge of a tree.

    Attributes
    ----------
    step : int
        The step of its sender.
    contributions : int
        How many are in it, 1 or more.
    members : int
        How many nodes there are behind the edge, as far as is known.
    content : ndarray of float32, shape (length of the part,)
        Their sum.
    """

    step: int
    contributions: int
    members: int
    content: Vector


Sums: TypeAlias = dict[Key, tuple[Any, ...]]
"""Sums by (neighbor, tree), each in the form of a plain tuple."""


class Outcome(NamedTuple):
    """An average.

    Attributes
    ----------
    model : ndarray of float32, shape (D,)
        What it comes to.
    absent : int
        Contributions that were not in it, over all trees.
    """

    model: Vector
    absent: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Relay:
    """Add up what one node relays; without any state.

    Attributes
    ----------
    site : Site
        Where it runs.
    trees : tuple of Tree
        What to relay along.
    partition : Interleaved, optional
        Which coordinates belong to which tree, if there are several.
    missing : str
        What fills the place of missing contributions; ``"zero"`` if updates are relayed.
    overlap : bool
        Sums are used a step after they were sent.
    scaled : bool
        Multiply what training adds by kappa.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which sums travel. Each hop rounds anew.
    epoch : int (default: 0)
        The number of the tree, which messages carry unless it is 0.
    """

    site: Site
    trees: tuple[Tree, ...]
    partition: Interleaved | None
    missing: str
    overlap: bool
    scaled: bool
    wire: Wire
    epoch: int = 0

    def along(self, tree: Tree, epoch: int) -> Relay:
        """Relay along another tree."""
        return replace(self, trees=(tree,), epoch=epoch)

    @property
    def kappa(self) -> float:
        """By how much averages are slower than the models that they are of."""
        return 1.0 if self.of_updates else self.trees[0].kappa(overlap=self.overlap)

    @property
    def keeps(self) -> bool:
        """Whether the last sum of an edge is used again while none newer is there."""
        return self.missing == "stale-fill"

    @property
    def of_updates(self) -> bool:
        """Whether updates are relayed in place of models."""
        return self.missing == "zero"

    @property
    def eccentricity(self) -> int:
        """How many hops away the farthest node is, in any of the trees."""
        return max(tree.eccentricities[self.site.node] for tree in self.trees)

    def slots(self, peer: int) -> tuple[int, ...]:
        """List the trees in which another node is a neighbor."""
        node = self.site.node
        return tuple(t for t, tree in enumerate(self.trees) if peer in tree.neighbors[node])

    def contribution(self, model: Vector, event: TrainDone) -> Parts:
        """Say what training contributes: the trained model y, or the update u."""
        ops, scale = self.site.ops, self.kappa if self.scaled else 1.0
        if self.of_updates:
            return self.cut(ops.combine([event.after, event.before], [1.0, -1.0]))
        if scale == 1.0:
            return self.cut(ops.update(model, event.before, event.after))
        # Exactly zero where training changed nothing.
        step = ops.combine([event.after, event.before], [scale, -scale])
        return self.cut(ops.combine([model, step], [1.0, 1.0]))

    def cut(self, vector: Vector) -> Parts:
        """Cut a vector into its parts."""
        if self.partition is None:
            return (vector,)
        return tuple(self.site.ops.pack_all(vector, self.partition))

    def join(self, parts: Parts) -> Vector:
        """Make a vector of its parts."""
        if self.partition is None:
            return parts[0]
        return self.site.ops.assemble(self.partition, parts)

    def messages(
        self,
        peers: Sequence[int],
        step: int,
        own: Parts | None,
        held: Sums,
        up: AbstractSet[int],
    ) -> Iterator[tuple[int, Message]]:
        """Write what neighbors are told, in each tree in which they are such.

        Parameters
        ----------
        peers : sequence of int
            The neighbors, in the order in which they are told.
        step : int
            The step that the messages are of.
        own : tuple of ndarray, optional
            What this node contributes.
        held : dict
            The sums of all neighbors; what one itself has told is left out of what it is told.
        up : set of int
            The neighbors that can be reached.

        Yields
        ------
        tuple of int and Message
            To whom, and what.
        """
        collected = [self._collect(t, own, held) for t in range(len(self.trees))]
        sums = [
            self._sums(vectors, sorted(peer for peer in peers if t in self.slots(peer)))
            for t, (_, vectors) in enumerate(collected)
        ]
        stamp = {"epoch": self.epoch} if self.epoch else {}
        for peer in peers:
            for t in self.slots(peer):
                content = sums[t][peer]
                if content is None:
                    yield peer, Message(kind=NOTHING, step=step, header={"tree": t, **stamp})
                    continue
                told = Sum(*held[peer, t]).contributions if (peer, t) in held else 0
                numbers = {
                    "tree": t,
                    "count": collected[t][0] - told,
                    "members": self._members(t, held, up, peer),
                }
                yield (
                    peer,
                    Message(
                        kind=SUM,
                        step=step,
                        payload=self.site.ops.rounded(content, self.wire),
                        header={**numbers, **stamp},
                        wire=self.wire,
                    ),
                )

    def read(self, source: int, message: Message) -> tuple[int, Sum] | None:
        """Take (tree, sum) out of a message; None if it does not fit."""
        t, payload = self.slot_of(message), message.payload
        count, members = (message.header.get(name) for name in ("count", "members"))
        if message.kind != SUM or payload is None or t is None or t not in self.slots(source):
            return None
        length = self.site.layout.size if self.partition is None else self.partition.length(t)
        behind = self.trees[t].behind(self.site.node, source)
        if len(payload) != length or not (_is_count(count, behind) and _is_count(members, behind)):
            return None
        return t, Sum(message.step, count, members, payload)

    def slot_of(self, message: Message) -> int | None:
        """Tell which tree a message is about; None if it does not say."""
        t = message.header.get("tree")
        return t if isinstance(t, int) and 0 <= t < len(self.trees) else None

    def average(
        self,
        model: Vector,
        own: Parts,
        held: Sums,
        up: AbstractSet[int],
        reference: Vector,
        *,
        counted: bool = True,
    ) -> Outcome:
        """Average what this node contributes with what it has heard.

        Parameters
        ----------
        model : ndarray of float32, shape (D,)
            The model before this step.
        own : tuple of ndarray
            What training contributed.
        held : dict
            What to average with.
        up : set of int
            The neighbors that can be reached.
        reference : ndarray of float32, shape (D,)
            What to fill up with.
        counted : bool (default: True)
            Whether ``own`` is part of it; otherwise it is the result only where nothing was heard.
        """
        parts, absent = [], 0
        base = self.cut(model) if self.of_updates else ()
        fill: Parts | None = None
        for t in range(len(self.trees)):
            count, vectors = self._collect(t, own if counted else None, held)
            members = self._members(t, held, up)
            rest = max(members - count, 0)
            absent += rest
            nodes, terms = list(vectors), list(vectors.values())
            if not terms:
                parts.append(own[t])
                continue
            if self.of_updates:
                terms, weights = [base[t], *terms], [1.0] + [1 / members] * len(terms)
            elif self.missing == "counts" or not counted:
                weights = [1 / count] * len(terms)
            else:
                weights = [1 / members] * len(terms)
                if rest and self.missing == "own":
                    weights[nodes.index(self.site.node)] = (1 + rest) / members
                elif rest:
                    fill = fill or self.cut(reference)
                    terms, weights = [*terms, fill[t]], [*weights, rest / members]
            parts.append(self.site.ops.combine(terms, weights))
        return Outcome(self.join(tuple(parts)), absent)

    def _collect(self, t: int, own: Parts | None, held: Sums) -> tuple[int, dict[int, Vector]]:
        """Count and list what is to be added up in a tree, by node, ascending."""
        sums = {peer: Sum(*each) for (peer, tree), each in held.items() if tree == t}
        vectors = {peer: each.content for peer, each in sums.items()}
        count = sum(each.contributions for each in sums.values())
        if own is not None:
            vectors[self.site.node] = own[t]
            count += 1
        return count, dict(sorted(vectors.items()))

    def _members(self, t: int, held: Sums, up: AbstractSet[int], without: int | None = None) -> int:
        """Count the nodes that a sum is to be of: this one, and those behind edges that work."""
        node, tree = self.site.node, self.trees[t]
        return 1 + sum(
            Sum(*held[peer, t]).members if (peer, t) in held else tree.behind(node, peer)
            for peer in tree.neighbors[node]
            if peer != without and peer in up
        )

    def _sums(
        self, vectors: Mapping[int, Vector], peers: Sequence[int]
    ) -> dict[int, Vector | None]:
        """For each of some neighbors, add up all vectors but its own; None if there are none."""
        ops, nodes, terms = self.site.ops, list(vectors), list(vectors.values())
        heard = [peer for peer in peers if peer in vectors]
        sums: dict[int, Vector | None] = dict.fromkeys(peers)
        if len(terms) > 2 and heard:
            sums.update(
                zip(heard, ops.sums_without(terms, [nodes.index(p) for p in heard]), strict=True)
            )
        elif len(terms) == 2:
            sums.update((peer, terms[1 - nodes.index(peer)]) for peer in heard)
        others = [peer for peer in peers if peer not in vectors]
        if terms and others:
            total = terms[0] if len(terms) == 1 else ops.combine(terms, [1.0] * len(terms))
            sums.update(dict.fromkeys(others, total))
        return sums


def _is_count(number: int | float | None, most: int) -> TypeGuard[int]:
    return isinstance(number, int) and 1 <= number <= most
