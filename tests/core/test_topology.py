import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import ConfigurationError, topology
from flwr_decentral.core.topology import build, describe, names

ANY_SIZE = (
    "ring",
    "chain",
    "star",
    "complete",
    "grid",
    "torus",
    "exponential",
    "random-regular",
    "erdos-renyi",
    "small-world",
    "binary-tree",
    "double-binary-trees",
)


def edges(graph):
    return list(graph.edges)


# The shape of every family


@pytest.mark.parametrize("name", ANY_SIZE)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 32, 60])
def test_every_family_is_simple_connected_frozen_and_ascending(name, nodes):
    graph = build(name, nodes)
    assert type(graph) is nx.Graph
    assert nx.is_frozen(graph)
    assert list(graph) == list(range(nodes))
    assert all(type(node) is int for node in graph)
    assert nx.number_of_selfloops(graph) == 0
    assert nx.is_connected(graph)
    assert edges(graph) == sorted((min(edge), max(edge)) for edge in graph.edges)
    assert graph.graph["name"] == name


@pytest.mark.parametrize("name", [*ANY_SIZE, "hypercube"])
def test_one_and_two_nodes_are_a_point_and_a_pair(name):
    assert edges(build(name, 1)) == []
    assert edges(build(name, 2)) == [(0, 1)]


@pytest.mark.parametrize(
    ("spec", "nodes", "expected"),
    [
        ("ring", 3, [(0, 1), (0, 2), (1, 2)]),
        ("ring", 4, [(0, 1), (0, 3), (1, 2), (2, 3)]),
        ("chain", 4, [(0, 1), (1, 2), (2, 3)]),
        ("star", 4, [(0, 1), (0, 2), (0, 3)]),
        ("complete", 3, [(0, 1), (0, 2), (1, 2)]),
        ("grid", 6, [(0, 1), (0, 3), (1, 2), (1, 4), (2, 5), (3, 4), (4, 5)]),
        ("grid(rows=1)", 3, [(0, 1), (1, 2)]),
        ("grid(columns=2)", 4, [(0, 1), (0, 2), (1, 3), (2, 3)]),
        ("torus", 4, [(0, 1), (0, 2), (1, 3), (2, 3)]),
        (
            "torus(rows=2, columns=3)",
            6,
            [(0, 1), (0, 2), (0, 3), (1, 2), (1, 4), (2, 5), (3, 4), (3, 5), (4, 5)],
        ),
        ("hypercube", 4, [(0, 1), (0, 2), (1, 3), (2, 3)]),
        ("binary-tree", 7, [(0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6)]),
        ("empty", 3, []),
    ],
)
def test_small_graphs_edge_by_edge(spec, nodes, expected):
    assert edges(build(spec, nodes)) == expected


@pytest.mark.parametrize("nodes", [4, 8, 16, 32, 64])
def test_the_binary_tree_has_the_diameters_of_the_relaysgd_code(nodes):
    graph = build("binary-tree", nodes)
    assert nx.is_tree(graph)
    assert nx.diameter(graph) == 2 * (nodes.bit_length() - 2)
    assert max(degree for _, degree in graph.degree) == 3


@pytest.mark.parametrize("nodes", [8, 13, 100])
def test_exponential_links_i_with_i_plus_and_minus_powers_of_two(nodes):
    offsets = [2**k for k in range(20) if 2**k < nodes]
    expected = {tuple(sorted((i, (i + o) % nodes))) for i in range(nodes) for o in offsets}
    assert set(build("exponential", nodes).edges) == expected


def test_hypercube_links_numbers_that_differ_in_one_bit():
    graph = build("hypercube", 32)
    assert all(
        graph.has_edge(i, j) == ((i ^ j).bit_count() == 1) for i in range(32) for j in range(i)
    )


def test_torus_and_grid_are_as_square_as_the_number_of_nodes_allows():
    assert edges(build("torus", 12)) == edges(build("torus(rows=3, columns=4)", 12))
    assert edges(build("grid", 60)) == edges(build("grid(rows=6)", 60))
    assert edges(build("torus", 7)) == edges(build("ring", 7))
    assert edges(build("grid", 7)) == edges(build("chain", 7))


def test_davis_southern_women_is_the_bipartite_graph_of_18_women_and_14_events():
    graph = build("davis-southern-women", 32)
    assert graph.number_of_edges() == 89
    women, _ = nx.bipartite.sets(graph)
    assert sorted(map(len, nx.bipartite.sets(graph))) == [14, 18]
    assert women == set(range(18))


# Random families


@pytest.mark.parametrize("degree", [2, 3, 4, 10, 14, 15])
def test_random_regular_has_one_degree(degree):
    assert {d for _, d in build(f"random-regular(degree={degree})", 16).degree} == {degree}


@pytest.mark.parametrize("nodes", range(1, 12))
def test_random_regular_always_has_a_default_degree(nodes):
    assert {d for _, d in build("random-regular", nodes).degree} == {min(4, nodes - 1)}


def test_small_world_keeps_the_number_of_edges_and_is_a_lattice_without_rewiring():
    assert build("small-world(neighbors=6)", 40).number_of_edges() == 120
    lattice = build("small-world(rewire=0)", 10)
    assert set(lattice.edges) == set(build(nx.circulant_graph(10, [1, 2]), 10).edges)
    assert edges(build("small-world", 40)) != edges(build("small-world(rewire=0)", 40))


def test_erdos_renyi_has_about_p_of_all_edges():
    pairs = 200 * 199 / 2
    for spec, p in [("erdos-renyi(p=0.3)", 0.3), ("erdos-renyi", 2 * math.log(200) / 200)]:
        deviation = math.sqrt(pairs * p * (1 - p))
        assert abs(build(spec, 200).number_of_edges() - pairs * p) < 4 * deviation
    assert edges(build("erdos-renyi(p=1)", 9)) == edges(build("complete", 9))


@pytest.mark.parametrize("name", ["random-regular", "erdos-renyi", "small-world"])
def test_random_families_depend_on_the_seed_and_on_nothing_else(name):
    first = build(name, 24, seed=1)
    nx.gnp_random_graph(10, 0.5, seed=3)
    assert edges(build(name, 24, seed=1)) == edges(first)
    assert edges(build(name, 24, seed=2)) != edges(first)


@pytest.mark.parametrize(
    ("spec", "digest"),
    [
        ("random-regular", "966e4221db82cc52"),
        ("random-regular(degree=40)", "a3204f671e23fc8d"),
        ("erdos-renyi", "b4ae8afb773d4ddd"),
        ("small-world", "b3cbf48dc95a80f1"),
    ],
)
def test_golden_random_graphs(spec, digest):
    # The same from networkx 3.2 to 3.6; a change there changes what a seed means here.
    listing = str(edges(build(spec, 64, seed=5))).encode()
    assert hashlib.blake2b(listing, digest_size=8).hexdigest() == digest


@given(st.integers(0, 2**64))
@settings(max_examples=25, deadline=None)
def test_random_families_are_drawn_until_they_are_connected(seed):
    # One draw alone is connected with a probability of about 0.47, 0.7 and 0.35.
    for spec in ("random-regular(degree=2)", "erdos-renyi(p=0.25)", "small-world(neighbors=2)"):
        assert nx.is_connected(build(spec, 12, seed=seed))


def test_drawing_is_bounded_and_says_what_to_do():
    with pytest.raises(ConfigurationError, match=r"none of 100 draws of erdos-renyi\(p=0.01\)"):
        build("erdos-renyi(p=0.01)", 40)
    with pytest.raises(ConfigurationError, match="raise degree so that there are more edges"):
        build("random-regular(degree=1)", 6)


@pytest.mark.slow
def test_topologies_are_the_same_in_another_process():
    specs = ["random-regular", "erdos-renyi", "small-world", "davis-southern-women", "torus"]
    code = (
        "from flwr_decentral.core.topology import build\n"
        f"print([list(build(spec, 32, seed=5).edges) for spec in {specs}])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == str([edges(build(spec, 32, seed=5)) for spec in specs])


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["ring", "exponential", "random-regular", "erdos-renyi", "torus"])
def test_four_thousand_nodes_work(spec):
    graph = build(spec, 4096)
    assert len(graph) == 4096
    assert "diameter" not in describe(graph)


# Specs


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        (" ring ", "ring"),
        ("ring()", "ring"),
        ("torus( rows = 4,columns=2 )", "torus(rows=4, columns=2)"),
        ("random-regular(degree=3)", "random-regular(degree=3)"),
        ("small-world(rewire=1e-1)", "small-world(rewire=0.1)"),
    ],
)
def test_the_name_is_a_spec_that_builds_the_same_graph(spec, canonical):
    graph = build(spec, 8, seed=3)
    assert graph.graph["name"] == canonical
    again = build(graph.graph["name"], 8, seed=3)
    assert edges(again) == edges(graph)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rign", r"unknown topology 'rign'; did you mean 'ring'\? known: binary-tree, "),
        ("", "not of the form name"),
        ("()", "not of the form name"),
        ("torus(rows=2", r"not of the form name .* did you mean 'torus'\?"),
        ("torus(rows=2) ring", "not of the form name"),
        ("ring(degree=2)", "'ring' has no argument 'degree'; known: none"),
        ("torus(row=2)", r"has no argument 'row'; did you mean 'rows'\? known: columns, rows"),
        ("torus(2)", "'2' of topology 'torus' is not of the form key=value; known: columns, rows"),
        ("torus(rows=2,)", "'' of topology 'torus' is not of the form key=value"),
        ("torus(rows=2, rows=4)", "'rows' of topology 'torus' is given twice"),
        ("torus(rows=two)", "'rows' of topology 'torus' must be an integer, got 'two'"),
        ("torus(rows=2.0)", "must be an integer, got '2.0'"),
        ("erdos-renyi(p=half)", "'p' of topology 'erdos-renyi' must be a number, got 'half'"),
        ("torus(rows=3)", "8 nodes do not fill .* side of 3; sides that fit: 1, 2, 4, 8"),
        ("grid(columns=0)", "side of 0; sides that fit"),
        ("grid(rows=-2)", "side of -2; sides that fit"),
        ("grid(rows=2, columns=2)", "2 rows of 2 are 4 nodes, the run has 8"),
        ("random-regular(degree=8)", "degree 8 everywhere: it is 1 to n-1 = 7"),
        ("random-regular(degree=0)", "degree 0 everywhere: it is 1 to n-1 = 7"),
        ("erdos-renyi(p=0)", "probability above 0, got 0.0"),
        ("erdos-renyi(p=1e-300)", "probability above 0, got 1e-300"),
        ("erdos-renyi(p=1.5)", "probability above 0, got 1.5"),
        ("erdos-renyi(p=nan)", "probability above 0, got nan"),
        ("small-world(neighbors=3)", "even, at least 2 and at most n-1 = 7, got 3"),
        ("small-world(neighbors=8)", "at most n-1 = 7, got 8"),
        ("small-world(rewire=2)", "rewire of small-world is a probability, got 2.0"),
        ("davis-southern-women", "exactly 32 nodes, got 8"),
    ],
)
def test_a_bad_spec_is_refused_with_what_would_do(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        build(spec, 8)


def test_numbers_of_nodes_that_do_not_fit():
    with pytest.raises(ConfigurationError, match="power of two of nodes, such as 8 or 16, got 12"):
        build("hypercube", 12)
    with pytest.raises(ConfigurationError, match=r"even where n is odd; try 6 or 8"):
        build("random-regular(degree=3)", 9)
    for nodes in (0, -1):
        with pytest.raises(ConfigurationError, match="at least one node"):
            build("ring", nodes)


def test_every_family_is_listed_with_its_arguments():
    listed = names()
    assert {usage.partition("(")[0] for usage in listed} == {
        *ANY_SIZE,
        "hypercube",
        "davis-southern-women",
        "empty",
    }
    assert "small-world(neighbors, rewire)" in listed
    assert all(summary and "\n" not in summary for summary in listed.values())


# Graphs


def test_a_graph_is_copied_bare_sorted_and_frozen():
    given_graph = nx.Graph([(2, 1), (1, 0)], name="mine")
    given_graph.add_edge(2, 0, weight=5)
    graph = build(given_graph, 3)
    assert list(graph) == [0, 1, 2]
    assert list(graph.edges(data=True)) == [(0, 1, {}), (0, 2, {}), (1, 2, {})]
    assert graph.graph["name"] == "mine"
    assert nx.is_frozen(graph)
    assert not nx.is_frozen(given_graph)
    given_graph.remove_edge(0, 1)
    assert graph.has_edge(0, 1)


def test_numpy_labels_become_plain_integers():
    graph = nx.relabel_nodes(nx.path_graph(3), {i: np.int64(i) for i in range(3)})
    built = build(graph, 3)
    assert all(type(node) is int for edge in built.edges for node in edge)


def test_a_graph_without_a_name_is_called_graph():
    assert describe(build(nx.path_graph(3), 3)).startswith("graph: 3 nodes")


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (nx.DiGraph([(0, 1), (1, 2)]), "directed"),
        (nx.MultiGraph([(0, 1), (1, 2)]), "multigraph"),
        (nx.Graph([(0, 1), (1, 2), (2, 2)]), "the given graph: node 2 has an edge to itself"),
        (nx.Graph([(0, 1)]), "has 2 nodes, the run has 3"),
        (nx.Graph([(1, 2), (2, 3)]), "must be the integers 0 to 2"),
        (nx.Graph([("a", "b"), ("b", "c")]), "convert_node_labels_to_integers"),
        (nx.empty_graph(3), "no path leads from node 0 to 1, 2; .* 'empty'"),
        (7, "a name, a path or a networkx.Graph, got int"),
    ],
)
def test_a_bad_graph_is_refused(graph, message):
    with pytest.raises(ConfigurationError, match=message):
        build(graph, 3)


def test_a_disconnected_graph_names_the_nodes_that_are_apart():
    graph = nx.empty_graph(12)
    graph.add_edge(0, 3)
    with pytest.raises(ConfigurationError, match=r"from node 0 to 1, 2, 4, 5, 6, \.\.\.;"):
        build(graph, 12)


# Files

SQUARE = [(0, 1), (0, 3), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.json", '{"edges": [[0, 1], [1, 2], [2, 3], [3, 0]]}'),
        ("a.json", "[[0, 1], [1, 2], [2, 3], [3, 0], [0, 3]]"),
        ("a.json", "[[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]"),
        ("a.JSON", '{"adjacency": [[0,1,0,1], [1,0,1,0], [0,1,0,1], [1,0,1,0]]}'),
        ("a.toml", "edges = [[0, 1], [1, 2], [2, 3], [3, 0]]"),
        ("a.toml", "adjacency = [[0,1,0,1], [1,0,1,0], [0,1,0,1], [1,0,1,0]]"),
        ("a.adjlist", "# a comment\n0 1 3\n1 2\n2 3\n3\n"),
        ("a.edges", "0 1\n1 2\n\n2 3 # another\n3 0\n"),
        ("a.edgelist", "0 1 {}\n1 2 {}\n2 3 {}\n3 0 {}\n"),
        ("a.csv", "0,1\n1, 2\n2,3\r\n3,0\n"),
        ("a.tsv", "0\t1\n1\t2\n2\t3\n3\t0\n"),
        ("a.txt", "0;1\n1;2\n2;3\n3;0\n"),
    ],
)
def test_files_in_every_form(tmp_path, file, text):
    path = tmp_path / file
    path.write_text(text)
    by_path, by_spec = build(path, 4), build(f"file:{path}", 4)
    assert edges(by_path) == edges(by_spec) == SQUARE
    assert by_path.graph["name"] == by_spec.graph["name"] == f"file:{path}"
    assert edges(build(by_path.graph["name"], 4)) == SQUARE


@pytest.mark.slow
def test_what_networkx_writes_can_be_read(tmp_path):
    graph = build("random-regular", 16)
    nx.write_edgelist(graph, tmp_path / "a.edgelist")
    nx.write_adjlist(graph, tmp_path / "a.adjlist")
    matrix = nx.to_numpy_array(graph, dtype=int).tolist()
    (tmp_path / "a.json").write_text(json.dumps(matrix))
    for file in ("a.edgelist", "a.adjlist", "a.json"):
        assert edges(build(tmp_path / file, 16)) == edges(graph)


@pytest.mark.parametrize("text", ["[[0, 1]]", "[[0, 1], [1, 0]]", "[[0, 1], [0, 1]]"])
def test_bare_pairs_on_two_nodes(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert edges(build(path, 2)) == [(0, 1)]


def test_a_bare_matrix_of_one_node(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[[0]]")
    assert edges(build(path, 1)) == []


def test_a_missing_file_points_to_the_app_bundle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        build("file:graphs/mine.json", 4)
    message = str(caught.value)
    assert str(Path.cwd() / "graphs" / "mine.json") in message
    assert "app bundle" in message
    assert "`fab-include`" in message
    assert "*.json" in message


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.json", "{", "Expecting property name"),
        ("a.json", "7", "edges must be a list of lists"),
        ("a.json", '{"edges": [[0, 1]], "n": 4}', "unknown key 'n'; known: adjacency, edges"),
        ("a.json", '{"edge": [[0, 1]]}', r"unknown key 'edge'; did you mean 'edges'\?"),
        ("a.json", '{"edges": [], "adjacency": []}', "either edges or adjacency"),
        ("a.json", "{}", "either edges or adjacency"),
        ("a.json", '{"edges": [[0, 1, 2]]}', r"a pair of node numbers, got \[0, 1, 2\]"),
        ("a.json", '{"edges": [["0", "1"]]}', "a pair of node numbers"),
        ("a.json", '{"edges": [[0, true]]}', "a pair of node numbers"),
        ("a.json", '{"edges": [[0, 0.5]]}', "a pair of node numbers"),
        ("a.json", '{"edges": [[0, 4]]}', r"edge \(0, 4\) leaves the nodes 0 to 3"),
        ("a.json", '{"edges": [[0, -1]]}', r"edge \(0, -1\) leaves"),
        ("a.json", '{"edges": [[2, 2]]}', "node 2 has an edge to itself"),
        ("a.json", '{"edges": [[0, 1], [2, 3]]}', "no path leads from node 0 to 2, 3"),
        ("a.json", '{"adjacency": [[0, 1], [1, 0]]}', "4 rows of 4 entries"),
        ("a.toml", "adjacency = [[0,1,1,1],[1,0,0,0],[1,0,0,0],[0,0,0,0]]", "links go both ways"),
        ("a.toml", "adjacency = [[0,2,0,0],[2,0,0,0],[0,0,0,0],[0,0,0,0]]", "no weights"),
        ("a.toml", "edges = [[0, 1]", "Unclosed array|not valid|Expected"),
        (
            "a.csv",
            "source,target\n0,1\n",
            "line 1 must hold node numbers only, got 'source,target'",
        ),
        ("a.edges", "0 1\n1 2 0.5\n", "line 2 must hold node numbers only"),
        ("a.edges", "0 1\n1 2 3\n", r"line 2 must name two nodes, got \[1, 2, 3\]"),
        ("a.yaml", "", "none of the suffixes .json, .toml"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, file, text, message):
    path = tmp_path / file
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        build(path, 4)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="utf-8"):
        build(path, 4)


# Descriptions


@pytest.mark.parametrize(
    ("spec", "nodes", "expected"),
    [
        ("ring", 16, "ring: 16 nodes, 16 edges, degree 2, diameter 8"),
        ("ring", 1, "ring: 1 node, 0 edges, degree 0, diameter 0"),
        ("star", 2, "star: 2 nodes, 1 edge, degree 1, diameter 1"),
        ("torus(rows=2)", 8, "torus(rows=2): 8 nodes, 12 edges, degree 3, diameter 3"),
        ("empty", 4, "empty: 4 nodes, 0 edges, degree 0, not connected"),
        ("ring", 513, "ring: 513 nodes, 513 edges, degree 2"),
    ],
)
def test_describe(spec, nodes, expected):
    assert describe(build(spec, nodes)) == expected


@given(st.integers(1, 40), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_describe_finds_the_diameter(nodes, seed):
    graph = build("erdos-renyi", nodes, seed)
    assert describe(graph).endswith(f", diameter {nx.diameter(graph)}")


def test_the_module_is_reached_from_core():
    assert topology.build is build
