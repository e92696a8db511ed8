"""Read the edges of a topology from a file.

=======================================  ========================================================
``.json``                                ``{"edges": [[0, 1], ...]}``, a list of edges alone,
                                         ``{"adjacency": [[0, 1], [1, 0]]}`` or a matrix alone
``.toml``                                ``edges = [[0, 1], ...]`` or ``adjacency = [...]``
``.adjlist``                             on each line a node and its neighbors
``.edges .edgelist .txt .csv .tsv``      on each line an edge
=======================================  ========================================================

In the last two, ``#`` begins a comment, and blanks, commas or semicolons separate the numbers: what
networkx writes is of these forms. An edge may be listed once or in both directions.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from .errors import ConfigurationError, suggest

Edge: TypeAlias = tuple[int, int]


def read(path: Path, nodes: int) -> list[Edge]:
    """Read a list of edges, without a check that they make a simple graph on ``nodes`` nodes.

    Raises
    ------
    ConfigurationError
        If there is no such file, or it is not of the form that its suffix promises.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigurationError(
            f"topology file {path} has none of the suffixes {', '.join(_READERS)}"
        )
    try:
        return reader(path.read_text(encoding="utf-8"), nodes)
    except OSError as error:
        raise ConfigurationError(
            f"topology file {path.absolute()} cannot be read ({error.strerror}). It has to be in "
            "the app bundle, into which Flower packs *.py, *.toml, *.md, *.yaml, *.yml, *.json and "
            "*.jsonl files only, and of these only what `fab-include` under [tool.flwr.app] lists, "
            "where the app sets it"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"topology file {path}: {error}") from error


def _read_json(text: str, nodes: int) -> list[Edge]:
    content = json.loads(text)
    if isinstance(content, dict):
        return _read_table(content, nodes)
    # Two pairs on two nodes are the same graph as edges and as a matrix.
    square = isinstance(content, list) and len(content) == nodes != 2
    if square and all(isinstance(row, list) and len(row) == nodes for row in content):
        return _read_table({"adjacency": content}, nodes)
    return _read_table({"edges": content}, nodes)


def _read_toml(text: str, nodes: int) -> list[Edge]:
    return _read_table(tomllib.loads(text), nodes)


def _read_table(table: Mapping[str, Any], nodes: int) -> list[Edge]:
    for key in table:
        if key not in ("edges", "adjacency"):
            raise ValueError(f"unknown key {key!r}; {suggest(key, ('edges', 'adjacency'))}")
    if len(table) != 1:
        raise ValueError("give either edges or adjacency")
    rows = next(iter(table.values()))
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{next(iter(table))} must be a list of lists")
    return _from_matrix(rows, nodes) if "adjacency" in table else rows


def _from_matrix(rows: list[list[Any]], nodes: int) -> list[Edge]:
    if len(rows) != nodes or any(len(row) != nodes for row in rows):
        raise ValueError(f"the adjacency matrix must have {nodes} rows of {nodes} entries")
    edges = []
    for i, row in enumerate(rows):
        for j, entry in enumerate(row):
            if entry not in (0, 1):
                raise ValueError(f"entry ({i}, {j}) must be 0 or 1, got {entry!r}; no weights")
            if entry != rows[j][i]:
                raise ValueError(f"entries ({i}, {j}) and ({j}, {i}) differ; links go both ways")
            if entry:
                edges.append((i, j))
    return edges


def _read_edge_list(text: str, nodes: int) -> list[Edge]:
    del nodes
    edges: list[Edge] = []
    for number, ends in _lines(text):
        if len(ends) != 2:
            raise ValueError(f"line {number} must name two nodes, got {ends}")
        edges.append((ends[0], ends[1]))
    return edges


def _read_adjacency_list(text: str, nodes: int) -> list[Edge]:
    del nodes
    return [(first, other) for _, (first, *rest) in _lines(text) for other in rest]


def _lines(text: str) -> Iterable[tuple[int, list[int]]]:
    """Read the numbers on each line that is neither empty nor a comment."""
    for number, line in enumerate(text.splitlines(), start=1):
        fields = re.split(r"[\s,;]+", line.partition("#")[0].strip(" \t,;"))
        # networkx.write_edgelist ends each line with the edge's attributes.
        fields = [field for field in fields if field not in ("", "{}")]
        try:
            ends = [int(field) for field in fields]
        except ValueError:
            raise ValueError(f"line {number} must hold node numbers only, got {line!r}") from None
        if ends:
            yield number, ends


_READERS: Final[Mapping[str, Callable[[str, int], list[Edge]]]] = {
    ".json": _read_json,
    ".toml": _read_toml,
    ".adjlist": _read_adjacency_list,
    **dict.fromkeys((".edges", ".edgelist", ".txt", ".csv", ".tsv"), _read_edge_list),
}
