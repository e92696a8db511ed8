"""Where sums go: one rooted tree of shortest paths for each chunk.

Chunk c is summed up at its *owner*. The other nodes hang below it on a tree of shortest paths, so
that each of n-1 links carries a chunk once up and once down: 2 (n-1) / n models per node on
average, the least that any all-reduce can do. Where several neighbors of a node are equally near to
the owner, the first one in the cyclic order that begins at the owner is its parent. On a topology
that looks the same from every node, such as a ring, a complete or an exponential graph, owners in
turn then load all nodes equally.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

OWNER: Final = -1
"""The parent of an owner."""

Edges: TypeAlias = frozenset[tuple[int, int]]


class Forest(NamedTuple):
    """The way of one chunk, in each part of the network that is connected.

    Attributes
    ----------
    parents : tuple of int
        Where each node sends its sum; :data:`OWNER` for those that are sent the last ones.
    children : tuple of tuple of int
        From whom it gets sums, ascending.
    """

    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=8)
def forests(nodes: int, edges: Edges, chunks: int) -> tuple[Forest, ...]:
    """Find the way of every chunk over the links that are up.

    Parameters
    ----------
    nodes : int
        How many nodes there are, n.
    edges : frozenset of (int, int)
        The links that are up.
    chunks : int
        How many chunks there are, K. Chunk c belongs to node c * n // K or, where that one is not
        connected, to one of the nodes that are, in turn.

    Examples
    --------
    >>> ring = frozenset({(0, 1), (1, 2), (2, 3), (0, 3)})
    >>> [forest.parents for forest in forests(4, ring, 2)]
    [(-1, 0, 1, 0), (3, 2, -1, 2)]
    """
    # Cached, so that all nodes of a process that have the same view share one.
    neighbors: list[list[int]] = [[] for _ in range(nodes)]
    for a, b in edges:
        neighbors[a].append(b)
        neighbors[b].append(a)
    components = list(_components(neighbors))
    found = []
    for chunk in range(chunks):
        parents = [OWNER] * nodes
        wanted = chunk * nodes // chunks
        for component in components:
            owner = wanted if wanted in component else component[chunk % len(component)]
            _hang(parents, owner, neighbors)
        children: list[list[int]] = [[] for _ in range(nodes)]
        for node, parent in enumerate(parents):
            if parent != OWNER:
                children[parent].append(node)
        found.append(Forest(tuple(parents), tuple(map(tuple, children))))
    return tuple(found)


def _components(neighbors: list[list[int]]) -> Iterable[list[int]]:
    """List the nodes of each connected part, ascending."""
    seen: set[int] = set()
    for start in range(len(neighbors)):
        if start not in seen:
            part = [start]
            seen.add(start)
            for node in part:
                new = [peer for peer in neighbors[node] if peer not in seen]
                part.extend(new)
                seen.update(new)
            yield sorted(part)


def _hang(parents: list[int], owner: int, neighbors: list[list[int]]) -> None:
    """Search from an owner, breadth first."""
    nodes = len(parents)
    reached = {owner}
    layer = [owner]
    while layer:
        # A node is found by the first of its parents in cyclic order from the owner.
        layer.sort(key=lambda node: (node - owner) % nodes)
        following = []
        for node in layer:
            for peer in neighbors[node]:
                if peer not in reached:
                    reached.add(peer)
                    parents[peer] = node
                    following.append(peer)
        layer = following
