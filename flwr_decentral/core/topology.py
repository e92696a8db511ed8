"""Topologies: who may talk to whom, as a simple connected undirected graph on nodes 0 to n-1.

A topology is named by a *spec*, which is what a user writes in a run config:

=========================  ======================================================================
``ring``                   a family by its name, with its defaults
``torus(rows=4)``          a family with arguments, all of them optional
``file:topology.json``     a file of edges, see :mod:`flwr_decentral.core.graphfile`; a
                           :class:`pathlib.Path` means the same
a :class:`networkx.Graph`  any graph on the nodes 0 to n-1; its attributes do not count
=========================  ======================================================================

Whatever it came from, :func:`build` returns a frozen :class:`networkx.Graph` whose nodes and
edges are in ascending order, so that equal topologies are equal in every process. It keeps its
spec (or the name of the graph it was made of) under ``graph.graph["name"]``; a spec, n and the run
seed build it again. Random families are drawn anew until they are connected, each time from the
next seed of a purpose of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Final, TypeAlias

import networkx as nx

from .errors import ConfigurationError, suggest
from .graphfile import Edge, read
from .seeds import RUN, Seeds
from .trees import binary_tree, double_binary_trees

Spec: TypeAlias = "str | Path | nx.Graph[int]"

_TRIES: Final = 100
_DIAMETER_UP_TO: Final = 512
_FILE_PREFIX: Final = "file:"
_SPEC: Final = re.compile(r"\s*([^\s()=,]+)\s*(?:\(([^()]*)\))?\s*")
_ARGUMENT: Final = re.compile(r"\s*([^\s=]+)\s*=\s*([^\s=]+)\s*")


def build(spec: Spec, nodes: int, seed: int = 0) -> nx.Graph[int]:
    """Build a topology from its spec.

    Parameters
    ----------
    spec : str, pathlib.Path or networkx.Graph
        A family with arguments, a file, or a graph. See the table above and :func:`names`.
    nodes : int
        The number of nodes, n.
    seed : int (default: 0)
        The run seed, for the random families.

    Returns
    -------
    networkx.Graph
        Frozen, on the nodes 0 to n-1, simple, and connected unless the spec is ``empty``.

    Raises
    ------
    ConfigurationError
        If the spec cannot be read, or describes no such graph on n nodes.

    Examples
    --------
    >>> graph = build("torus(rows=2)", nodes=6)
    >>> sorted(graph[0])
    [1, 2, 3]
    >>> graph.graph["name"]
    'torus(rows=2)'
    """
    if nodes < 1:
        raise ConfigurationError(f"a topology needs at least one node, got nodes={nodes}")
    if isinstance(spec, str) and not spec.strip().startswith(_FILE_PREFIX):
        return _from_family(spec, nodes, seed)
    edges: Iterable[Any]
    if isinstance(spec, nx.Graph):
        name, source, edges = str(spec.graph.get("name", "")), "the given graph", spec.edges
        _check_graph(spec, nodes)
    elif isinstance(spec, str | Path):
        path = Path(str(spec).strip().removeprefix(_FILE_PREFIX).strip())
        name, source = f"{_FILE_PREFIX}{path}", f"topology file {path}"
        edges = read(path, nodes)
    else:
        raise ConfigurationError(
            f"a topology is a name, a path or a networkx.Graph, got {type(spec).__name__}"
        )
    try:
        graph = _graph(nodes, _checked(edges, nodes))
    except ValueError as error:
        raise ConfigurationError(f"{source}: {error}") from error
    _check_connected(graph, source)
    return _finished(graph, name)


def names() -> dict[str, str]:
    """List the families with their arguments, and what each of them is.

    Examples
    --------
    >>> names()["torus(rows, columns)"]
    'a grid that wraps around; by default as square as n allows'
    """
    return {family.usage(name): family.summary for name, family in _FAMILIES.items()}


def describe(graph: nx.Graph[int]) -> str:
    """Describe a topology in one line.

    Parameters
    ----------
    graph : networkx.Graph
        A topology. Its diameter is left out above 512 nodes, where it takes long to find.

    Examples
    --------
    >>> describe(build("chain", nodes=5))
    'chain: 5 nodes, 4 edges, degree 1 to 2, diameter 4'
    """
    degrees = [degree for _, degree in graph.degree]
    low, high = min(degrees), max(degrees)
    parts = [
        _count(len(graph), "node"),
        _count(graph.number_of_edges(), "edge"),
        f"degree {low}" if low == high else f"degree {low} to {high}",
    ]
    if not nx.is_connected(graph):
        parts.append("not connected")
    elif len(graph) <= _DIAMETER_UP_TO:
        # Bounds spare all but a few of the n searches.
        parts.append(f"diameter {nx.diameter(graph, usebounds=True)}")
    return f"{graph.graph.get('name') or 'graph'}: {', '.join(parts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How to make the graphs of one name; a random family takes a seed as well."""

    summary: str
    make: Callable[..., nx.Graph[int]]
    arguments: Mapping[str, type[int] | type[float]] = field(default_factory=dict)
    random: bool = False
    connected: bool = True

    def usage(self, name: str) -> str:
        return f"{name}({', '.join(self.arguments)})" if self.arguments else name


def _from_family(spec: str, nodes: int, seed: int) -> nx.Graph[int]:
    name, arguments = _parse(spec)
    family = _FAMILIES[name]
    listed = ", ".join(f"{key}={value}" for key, value in arguments.items())
    canonical = f"{name}({listed})" if listed else name
    if not family.random:
        graph = family.make(nodes, **arguments)
        if family.connected:
            _check_connected(graph, canonical)
        return _finished(graph, canonical)
    seeds = Seeds(seed)
    for attempt in range(_TRIES):
        graph = family.make(nodes, seed=seeds.number(RUN, "topology", attempt), **arguments)
        if nx.is_connected(graph):
            return _finished(graph, canonical)
    raise ConfigurationError(
        f"none of {_TRIES} draws of {canonical} on {nodes} nodes was connected; "
        f"raise {next(iter(family.arguments))} so that there are more edges"
    )


def _parse(spec: str) -> tuple[str, dict[str, int | float]]:
    """Split ``name(key=value, ...)``."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ConfigurationError(
            f"topology {spec!r} is not of the form name or name(key=value, ...); "
            f"{suggest(spec.partition('(')[0].strip(), _FAMILIES)}"
        )
    name, listed = match[1], (match[2] or "").strip()
    if name not in _FAMILIES:
        raise ConfigurationError(f"unknown topology {name!r}; {suggest(name, _FAMILIES)}")
    kinds = _FAMILIES[name].arguments
    arguments: dict[str, int | float] = {}
    for item in listed.split(",") if listed else ():
        pair = _ARGUMENT.fullmatch(item)
        if pair is None:
            raise ConfigurationError(
                f"argument {item.strip()!r} of topology {name!r} is not of the form key=value; "
                f"{suggest(item.strip(), kinds)}"
            )
        key, text = pair[1], pair[2]
        if key not in kinds:
            raise ConfigurationError(
                f"topology {name!r} has no argument {key!r}; {suggest(key, kinds)}"
            )
        if key in arguments:
            raise ConfigurationError(f"argument {key!r} of topology {name!r} is given twice")
        try:
            arguments[key] = kinds[key](text)
        except ValueError:
            what = "an integer" if kinds[key] is int else "a number"
            raise ConfigurationError(
                f"argument {key!r} of topology {name!r} must be {what}, got {text!r}"
            ) from None
    return name, arguments


def _ring(n: int) -> nx.Graph[int]:
    return nx.cycle_graph(n) if n > 2 else nx.path_graph(n)


def _star(n: int) -> nx.Graph[int]:
    return nx.star_graph(n - 1)


def _grid(n: int, rows: int | None = None, columns: int | None = None) -> nx.Graph[int]:
    rows, columns = _sides(n, rows, columns)
    return _row_by_row(nx.path_graph(rows), nx.path_graph(columns))


def _torus(n: int, rows: int | None = None, columns: int | None = None) -> nx.Graph[int]:
    rows, columns = _sides(n, rows, columns)
    return _row_by_row(_ring(rows), _ring(columns))


def _sides(n: int, rows: int | None, columns: int | None) -> tuple[int, int]:
    """Complete the sides of a rectangle of n nodes."""
    if rows is None and columns is None:
        rows = next(side for side in range(math.isqrt(n), 0, -1) if n % side == 0)
    given = rows if rows is not None else columns
    if given is None or given < 1 or n % given:
        raise ConfigurationError(
            f"{n} nodes do not fill a rectangle with a side of {given}; sides that fit: "
            f"{', '.join(str(side) for side in range(1, n + 1) if n % side == 0)}"
        )
    if rows is None:
        return n // given, given
    if columns is not None and rows * columns != n:
        raise ConfigurationError(
            f"{rows} rows of {columns} are {rows * columns} nodes, the run has {n}; "
            "leave one of the two out"
        )
    return rows, n // rows


def _row_by_row(down: nx.Graph[int], across: nx.Graph[int]) -> nx.Graph[int]:
    """Multiply two graphs and number the nodes along the rows."""
    columns = len(across)
    product = nx.cartesian_product(down, across)
    return nx.relabel_nodes(product, {(r, c): r * columns + c for r, c in product})


def _hypercube(n: int) -> nx.Graph[int]:
    if n & (n - 1):
        below = 1 << (n.bit_length() - 1)
        raise ConfigurationError(
            f"a hypercube has a power of two of nodes, such as {below} or {2 * below}, got {n}"
        )
    return _graph(n, ((i, i ^ 1 << k) for i in range(n) for k in range(n.bit_length() - 1)))


def _exponential(n: int) -> nx.Graph[int]:
    offsets = [1 << k for k in range((n - 1).bit_length())]
    return nx.circulant_graph(n, offsets)


def _binary_tree(n: int) -> nx.Graph[int]:
    return _graph(n, binary_tree(n).edges)


def _double_binary_trees(n: int) -> nx.Graph[int]:
    one, other = double_binary_trees(n)
    return _graph(n, [*one.edges, *other.edges])


def _davis(n: int) -> nx.Graph[int]:
    graph = nx.convert_node_labels_to_integers(nx.davis_southern_women_graph())
    if n != len(graph):
        raise ConfigurationError(
            f"davis-southern-women is one graph, of exactly {len(graph)} nodes, got {n}"
        )
    return graph


def _random_regular(n: int, seed: int, degree: int | None = None) -> nx.Graph[int]:
    # The default is never odd where n is, so it always exists.
    degree = min(4, n - 1) if degree is None else degree
    if not min(1, n - 1) <= degree <= n - 1 or n * degree % 2:
        fitting = [d for d in range(min(1, n - 1), min(n, 9)) if n * d % 2 == 0]
        raise ConfigurationError(
            f"no graph on {n} nodes has degree {degree} everywhere: it is 1 to n-1 = {n - 1}, and "
            f"even where n is odd; try {' or '.join(map(str, fitting[-2:]))}"
        )
    if 2 * degree > n - 1:
        # Pairing stubs at random gets stuck where few pairs are left out; its complement does not.
        return nx.complement(nx.random_regular_graph(n - 1 - degree, n, seed=seed))
    return nx.random_regular_graph(degree, n, seed=seed)


def _erdos_renyi(n: int, seed: int, p: float | None = None) -> nx.Graph[int]:
    # Twice the threshold of connectivity.
    p = min(1.0, 2 * math.log(max(n, 2)) / n) if p is None else p
    # A p that 1 - p does not show would make the generator divide by zero.
    if not 0.0 <= 1.0 - p < 1.0:
        raise ConfigurationError(f"p of erdos-renyi is a probability above 0, got {p}")
    return nx.fast_gnp_random_graph(n, p, seed=seed)


def _small_world(
    n: int, seed: int, neighbors: int | None = None, rewire: float = 0.1
) -> nx.Graph[int]:
    if not 0.0 <= rewire <= 1.0:
        raise ConfigurationError(f"rewire of small-world is a probability, got {rewire}")
    if neighbors is None:
        if n <= 5:
            return nx.complete_graph(n)
        neighbors = 4
    if neighbors < 2 or neighbors % 2 or neighbors > n - 1:
        raise ConfigurationError(
            f"neighbors of small-world is even, at least 2 and at most n-1 = {n - 1}, "
            f"got {neighbors}"
        )
    return nx.watts_strogatz_graph(n, neighbors, rewire, seed=seed)


_SIDES: Final = {"rows": int, "columns": int}
_FAMILIES: Final[Mapping[str, _Family]] = {
    "ring": _Family(make=_ring, summary="each node with the two beside it"),
    "chain": _Family(make=nx.path_graph, summary="a ring that is cut open"),
    "star": _Family(make=_star, summary="node 0 with every other"),
    "complete": _Family(make=nx.complete_graph, summary="each node with every other"),
    "grid": _Family(
        make=_grid,
        arguments=_SIDES,
        summary="rows and columns, numbered along the rows; by default as square as n allows",
    ),
    "torus": _Family(
        make=_torus,
        arguments=_SIDES,
        summary="a grid that wraps around; by default as square as n allows",
    ),
    "hypercube": _Family(
        make=_hypercube, summary="numbers that differ in one bit; n is a power of two"
    ),
    "exponential": _Family(make=_exponential, summary="i with i ± 1, 2, 4, ... (mod n)"),
    "random-regular": _Family(
        make=_random_regular,
        arguments={"degree": int},
        random=True,
        summary="a random graph of one degree, by default 4 (or n-1)",
    ),
    "erdos-renyi": _Family(
        make=_erdos_renyi,
        arguments={"p": float},
        random=True,
        summary="each pair with probability p, by default 2 ln(n) / n",
    ),
    "small-world": _Family(
        make=_small_world,
        arguments={"neighbors": int, "rewire": float},
        random=True,
        summary="a ring of 4 nearest neighbors, each edge rewired with probability 0.1",
    ),
    "binary-tree": _Family(
        make=_binary_tree, summary="0 with 1, and each w from 1 on with 2w and 2w+1"
    ),
    "double-binary-trees": _Family(
        make=_double_binary_trees, summary="the binary tree and its mirror image, i as n-1-i"
    ),
    "davis-southern-women": _Family(
        make=_davis, summary="the social network of Davis et al. (1941); n is 32"
    ),
    "empty": _Family(make=nx.empty_graph, connected=False, summary="no edges: nobody communicates"),
}


def _check_graph(graph: nx.Graph[Any], nodes: int) -> None:
    if graph.is_directed():
        raise ConfigurationError(
            "the given graph is directed, but links go both ways; see graph.to_undirected()"
        )
    if graph.is_multigraph():
        raise ConfigurationError("the given graph is a multigraph; make it simple: nx.Graph(graph)")
    if len(graph) != nodes:
        raise ConfigurationError(
            f"the given graph has {_count(len(graph), 'node')}, the run has {nodes}"
        )
    if set(graph) != set(range(nodes)):
        raise ConfigurationError(
            f"the nodes of the given graph must be the integers 0 to {nodes - 1}; "
            "see networkx.convert_node_labels_to_integers"
        )


def _checked(pairs: Iterable[Any], nodes: int) -> Iterable[Edge]:
    """Let only pairs of two different nodes pass."""
    for pair in pairs:
        if len(pair) != 2 or not all(_is_number(end) for end in pair):
            raise ValueError(f"an edge is a pair of node numbers, got {pair!r}")
        a, b = int(pair[0]), int(pair[1])
        if not (0 <= a < nodes and 0 <= b < nodes):
            raise ValueError(f"edge ({a}, {b}) leaves the nodes 0 to {nodes - 1} of the run")
        if a == b:
            raise ValueError(f"node {a} has an edge to itself; remove it")
        yield a, b


def _is_number(end: Any) -> bool:
    return isinstance(end, Integral) and not isinstance(end, bool)


def _check_connected(graph: nx.Graph[int], source: str) -> None:
    reached = nx.node_connected_component(graph, 0)
    if len(reached) < len(graph):
        apart = [node for node in graph if node not in reached]
        shown = ", ".join(map(str, apart[:5])) + (", ..." if len(apart) > 5 else "")
        raise ConfigurationError(
            f"{source} is not connected: no path leads from node 0 to {shown}; add edges, or use "
            "'empty' if nobody is to communicate"
        )


def _graph(nodes: int, edges: Iterable[Edge]) -> nx.Graph[int]:
    graph = nx.empty_graph(nodes)
    graph.add_edges_from(edges)
    return graph


def _finished(graph: nx.Graph[int], name: str) -> nx.Graph[int]:
    """Copy the bare graph in ascending order, name it and freeze it."""
    result = _graph(len(graph), sorted((a, b) if a < b else (b, a) for a, b in graph.edges))
    result.graph["name"] = name
    return nx.freeze(result)
