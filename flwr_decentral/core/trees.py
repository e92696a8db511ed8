"""Trees: the graphs on which a sum can be passed on without counting anything twice.

On a tree there is exactly one path between two nodes. If every node tells each neighbor the sum of
its own value and of what its *other* neighbors have told it, then each node learns the sum over all
nodes, every value exactly once. What that costs is time: the value of node j is as many steps old
at node i as there are hops between them. With tau_ij the number of hops,

    lag_ij = max(tau_ij - 1, 0)    if a step's messages are used in that step (neighbors: no lag),
    lag_ij = tau_ij                if they are used in the next one, while nodes train (overlapped).

An average of models that are late moves slower than they do: where all take a step u, it moves by
u / kappa, with

    kappa = 1 + (1 / n^2) * sum over i, j of lag_ij.

======================  ========================================================================
:class:`Tree`           a tree on the nodes 0 to n-1, with everything that costs O(n) worked out
:func:`binary_tree`     node 0 with 1, each w from 1 on with 2w and 2w+1
:func:`double_binary_trees`  that tree and its mirror image, i as n-1-i: no node is inner in both
:func:`spanning_tree`   shortest paths of any connected graph, from the best root
:func:`spanning_forest`  one for each part of a graph that has fallen apart
======================  ========================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from .errors import ConfigurationError

_ROOT = -1
_AWAY = -2
_MOST_SHOWN = 8


@dataclass(frozen=True)
class Tree:
    """A tree on the nodes 0 to n-1, or on some of them, hung up at a root.

    Trees compare by what is hung below what. The length of a tree is the number of nodes in it.

    Parameters
    ----------
    parents : tuple of int
        The parent of each node; -1 for the root, and -2 for nodes that are not in the tree.

    Examples
    --------
    >>> chain = Tree.of(nx.path_graph(4))
    >>> chain.neighbors[1], chain.behind(1, 2), chain.diameter
    ((0, 2), 2, 3)
    >>> chain.kappa()
    1.5
    """

    parents: tuple[int, ...]

    @classmethod
    def of(cls, graph: nx.Graph[int], root: int = 0) -> Tree:
        """Hang up a graph that is a tree.

        Raises
        ------
        ConfigurationError
            If it is none: not connected, or with a cycle, which is named.
        """
        tree = _shortest_paths(_ascending(graph), root)
        if len(tree) < len(graph):
            raise ConfigurationError("the graph is no tree: it is not connected")
        if graph.number_of_edges() >= len(graph):
            cycle = [str(node) for node in _cycle(graph, tree)]
            if len(cycle) > _MOST_SHOWN:
                cycle = [*cycle[:4], "...", *cycle[-2:]]
            raise ConfigurationError(f"the graph is no tree: {' - '.join(cycle)} is a cycle")
        return tree

    def __len__(self) -> int:
        return len(self.present)

    @property
    def root(self) -> int:
        """The node without a parent."""
        return self.parents.index(_ROOT)

    @cached_property
    def present(self) -> tuple[int, ...]:
        """The nodes that are in the tree, ascending."""
        return tuple(v for v, parent in enumerate(self.parents) if parent != _AWAY)

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Each edge once, as (parent, child), by child."""
        return tuple((parent, v) for v, parent in enumerate(self.parents) if parent >= 0)

    @cached_property
    def neighbors(self) -> tuple[tuple[int, ...], ...]:
        """The neighbors of each node, ascending."""
        found: list[list[int]] = [[] for _ in self.parents]
        for a, b in self.edges:
            found[a].append(b)
            found[b].append(a)
        return tuple(tuple(sorted(each)) for each in found)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many nodes hang at each node, itself included; 0 at those not in the tree."""
        sizes = [int(parent != _AWAY) for parent in self.parents]
        for v in reversed(self._downward):
            if self.parents[v] >= 0:
                sizes[self.parents[v]] += sizes[v]
        return tuple(sizes)

    def behind(self, node: int, neighbor: int) -> int:
        """Count the nodes that are reached from a node through one of its neighbors."""
        if self.parents[neighbor] == node:
            return self.sizes[neighbor]
        if self.parents[node] == neighbor:
            return len(self) - self.sizes[node]
        raise ValueError(f"no edge joins {node} and {neighbor}")

    @cached_property
    def eccentricities(self) -> tuple[int, ...]:
        """How far away the farthest node is from each, in hops; -1 for nodes not in the tree."""
        # The node farthest from any other is an end of a longest path, and one of the two ends of
        # a longest path is as far from a node as any.
        one = self._hops(self._downward[-1])
        other = self._hops(int(np.argmax(one)))
        return tuple(np.maximum(one, other).tolist())

    @property
    def diameter(self) -> int:
        """How far apart two nodes are at most, tau_max, in hops."""
        return max(self.eccentricities)

    @property
    def degree(self) -> int:
        """The greatest number of neighbors that a node has."""
        return max(map(len, self.neighbors))

    @cached_property
    def mean_distance(self) -> float:
        """The mean of tau_ij over all n^2 ordered pairs, in hops."""
        # An edge is on the path of each pair that it separates.
        pairs = sum(self.sizes[child] * (len(self) - self.sizes[child]) for _, child in self.edges)
        return 2 * pairs / len(self) ** 2

    def kappa(self, *, overlap: bool = False) -> float:
        """Compute by how much an average of late models is slower than they are.

        Parameters
        ----------
        overlap : bool (default: False)
            Messages are used one step after they were sent.

        Returns
        -------
        float
            kappa, the factor on a learning rate that makes up for it. 1 if nothing is late.
        """
        # All pairs but those of a node with itself are one hop less behind without overlap.
        return 1 + self.mean_distance - (0 if overlap else 1 - 1 / len(self))

    def distances(self) -> NDArray[np.int64]:
        """Count the hops tau_ij between all pairs, shape (n, n); -1 where no path leads."""
        return np.stack([self._hops(node) for node in range(len(self.parents))])

    def lags(self, *, overlap: bool = False) -> NDArray[np.int64]:
        """List by how many steps node i is behind on node j, shape (n, n)."""
        distances = self.distances()
        return distances if overlap else np.maximum(distances - 1, 0)

    @cached_property
    def _downward(self) -> tuple[int, ...]:
        """All nodes, each after its parent."""
        children: list[list[int]] = [[] for _ in self.parents]
        for parent, child in self.edges:
            children[parent].append(child)
        order = [self.root]
        for v in order:
            order.extend(children[v])
        return tuple(order)

    def _hops(self, start: int) -> NDArray[np.int64]:
        hops = np.full(len(self.parents), -1)
        hops[start] = 0
        order = [start]
        for v in order:
            for w in self.neighbors[v]:
                if hops[w] < 0:
                    hops[w] = hops[v] + 1
                    order.append(w)
        return hops


def binary_tree(nodes: int) -> Tree:
    """Make the binary tree of RelaySGD: node 0 with 1, and each w from 1 on with 2w and 2w+1.

    Examples
    --------
    >>> binary_tree(6).neighbors[1]
    (0, 2, 3)
    """
    return Tree((_ROOT, *(child // 2 for child in range(1, nodes))))


def double_binary_trees(nodes: int) -> tuple[Tree, Tree]:
    """Make the binary tree and its mirror image, in which node i is n-1-i.

    A node with two children in one has at most one in the other: over both, no node has more than
    four neighbors, counting one that it has in both twice.

    Examples
    --------
    >>> [tree.edges for tree in double_binary_trees(4)]
    [((0, 1), (1, 2), (1, 3)), ((2, 0), (2, 1), (3, 2))]
    """
    tree = binary_tree(nodes)
    mirrored = [parent if parent == _ROOT else nodes - 1 - parent for parent in tree.parents]
    return tree, Tree(tuple(reversed(mirrored)))


def spanning_tree(graph: nx.Graph[int], root: int | None = None) -> Tree:
    """Choose the tree of shortest paths from a root; of several, the lexicographically smallest.

    Parameters
    ----------
    graph : networkx.Graph
        Any connected graph on the nodes 0 to n-1.
    root : int, optional
        By default that of the tree with the least mean distance, which has the least kappa too; of
        several, that of the least diameter, and then the lowest. All n are tried.

    Raises
    ------
    ConfigurationError
        If the graph is not connected.

    Examples
    --------
    >>> spanning_tree(nx.cycle_graph(5)).edges
    ((0, 1), (1, 2), (4, 3), (0, 4))
    """
    neighbors = _ascending(graph)
    if not neighbors:
        raise ConfigurationError("a tree needs at least one node")
    first = 0 if root is None else root
    if len(_shortest_paths(neighbors, first)) < len(graph):
        raise ConfigurationError(
            f"no tree spans the topology: no path leads from node {first} to some other"
        )
    return _best(neighbors, range(len(graph)) if root is None else [root], len(graph))


def spanning_forest(graph: nx.Graph[int]) -> tuple[Tree, ...]:
    """Choose a spanning tree for each part of a graph, as :func:`spanning_tree` does for a whole.

    Parameters
    ----------
    graph : networkx.Graph
        Any graph on the nodes 0 to n-1.

    Returns
    -------
    tuple of Tree
        For each node the tree that it is in: the same one for all nodes in reach of one another.

    Examples
    --------
    >>> forest = spanning_forest(nx.Graph([(0, 1), (1, 3), (0, 3), (2, 4)]))
    >>> forest[0].edges, forest[2].edges, len(forest[4])
    (((0, 1), (0, 3)), ((2, 4),), 2)
    """
    neighbors = _ascending(graph)
    trees: dict[int, Tree] = {}
    for node in range(len(graph)):
        if node not in trees:
            part = _shortest_paths(neighbors, node).present
            trees |= dict.fromkeys(part, _best(neighbors, part, len(part)))
    return tuple(trees[node] for node in range(len(graph)))


def _best(neighbors: list[list[int]], roots: Sequence[int], size: int) -> Tree:
    """Choose among the trees of so many nodes that hang at some roots."""
    best: tuple[float, int, Tree] | None = None
    for root in roots:
        tree = _shortest_paths(neighbors, root, size)
        # The diameter is worked out for those trees only that it can decide about.
        distance = tree.mean_distance
        if best is None or distance < best[0] or (distance == best[0] and tree.diameter < best[1]):
            best = distance, tree.diameter, tree
    assert best is not None  # there is at least one root
    return best[2]


def _ascending(graph: nx.Graph[int]) -> list[list[int]]:
    if sorted(graph) != list(range(len(graph))):
        raise ConfigurationError(f"the nodes of a tree are 0 to {len(graph) - 1}")
    return [sorted(graph[node]) for node in range(len(graph))]


def _shortest_paths(neighbors: list[list[int]], root: int, size: int | None = None) -> Tree:
    """Search breadth first, until so many nodes are found; by default all that can be reached."""
    parents = [_AWAY] * len(neighbors)
    parents[root] = _ROOT
    order = [root]
    for v in order:
        for w in neighbors[v]:
            if parents[w] == _AWAY:
                parents[w] = v
                order.append(w)
        if len(order) == (size or len(neighbors)):
            break
    return Tree(tuple(parents))


def _cycle(graph: nx.Graph[int], tree: Tree) -> Iterable[int]:
    """Find the nodes of a cycle, from the first edge that the tree lacks."""
    edges = {frozenset(edge) for edge in tree.edges}
    a, b = next((a, b) for a, b in sorted(graph.edges) if frozenset((a, b)) not in edges)
    up = [a]
    while tree.parents[up[-1]] != _ROOT:
        up.append(tree.parents[up[-1]])
    down = [b]
    while down[-1] not in up:
        down.append(tree.parents[down[-1]])
    return [*up[: up.index(down[-1])], *reversed(down)]
