import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_decentral.core import ConfigurationError, Tree
from flwr_decentral.core.topology import build
from flwr_decentral.core.trees import (
    binary_tree,
    double_binary_trees,
    spanning_forest,
    spanning_tree,
)


@st.composite
def any_trees(draw):
    nodes = draw(st.integers(1, 30))
    parents = [draw(st.integers(0, v - 1)) for v in range(1, nodes)]
    order = draw(st.permutations(range(nodes)))
    graph = nx.empty_graph(nodes)
    graph.add_edges_from((order[v + 1], order[parent]) for v, parent in enumerate(parents))
    return graph


@st.composite
def connected_graphs(draw):
    graph = draw(any_trees())
    node = st.integers(0, len(graph) - 1)
    for a, b in draw(st.lists(st.tuples(node, node), max_size=20)):
        if a != b:
            graph.add_edge(a, b)
    return graph


def hops(graph):
    lengths = dict(nx.all_pairs_shortest_path_length(graph))
    n = len(graph)
    return np.array([[lengths[i][j] for j in range(n)] for i in range(n)])


some = settings(max_examples=60, deadline=None)


@pytest.mark.slow
@given(any_trees(), st.data())
@some
def test_a_tree_knows_its_distances_whatever_it_hangs_at(graph, data):
    root = data.draw(st.integers(0, len(graph) - 1))
    tree, tau = Tree.of(graph, root), hops(graph)
    assert tree.root == root
    assert {frozenset(edge) for edge in tree.edges} == {frozenset(edge) for edge in graph.edges}
    assert tree.neighbors == tuple(tuple(sorted(graph[node])) for node in range(len(graph)))
    np.testing.assert_array_equal(tree.distances(), tau)
    assert tree.eccentricities == tuple(tau.max(axis=1))
    assert tree.diameter == tau.max()
    assert tree.degree == max(degree for _, degree in graph.degree)
    assert tree.mean_distance == pytest.approx(tau.mean(), rel=1e-14)
    for overlap in (False, True):
        lags = tau if overlap else np.maximum(tau - 1, 0)
        np.testing.assert_array_equal(tree.lags(overlap=overlap), lags)
        assert tree.kappa(overlap=overlap) == pytest.approx(1 + lags.mean(), rel=1e-14)


@pytest.mark.slow
@given(any_trees())
@some
def test_nodes_behind_an_edge(graph):
    tree = Tree.of(graph)
    for a, b in graph.edges:
        cut = nx.Graph(graph)
        cut.remove_edge(a, b)
        assert tree.behind(a, b) == len(nx.node_connected_component(cut, b))
        assert tree.behind(b, a) == len(nx.node_connected_component(cut, a))


def test_no_node_is_behind_what_is_no_edge():
    with pytest.raises(ValueError, match="no edge joins 0 and 2"):
        Tree.of(nx.path_graph(3)).behind(0, 2)


# Each figure is the sum of the lags over all pairs, divided by n^2, plus one.
KAPPA = {
    "chain": {4: 1.5, 8: 2.75, 16: 5.375, 32: 10.69, 64: 21.34},
    "binary-tree": {4: 1.375, 8: 2.156, 16: 3.320, 32: 4.783, 64: 6.454},
    "star": {4: 1.375, 8: 1.656, 16: 1.820, 32: 1.908, 64: 1.954},
}


@pytest.mark.parametrize(("name", "nodes"), [(name, n) for name in KAPPA for n in KAPPA[name]])
def test_kappa_of_the_usual_trees(name, nodes):
    tree = Tree.of(build(name, nodes))
    assert tree.kappa() == pytest.approx(KAPPA[name][nodes], abs=5e-3 if nodes > 16 else 6e-4)


@pytest.mark.parametrize(
    ("name", "kappa"), [("chain", 6.313), ("binary-tree", 4.258), ("star", 2.758)]
)
def test_kappa_where_messages_are_used_a_step_later(name, kappa):
    assert Tree.of(build(name, 16)).kappa(overlap=True) == pytest.approx(kappa, abs=6e-4)


def test_kappa_is_what_one_update_of_all_nodes_comes_down_to():
    tree = binary_tree(6)
    lags = tree.lags()
    # All models are 0 before step 0, and all nodes add 1 in step 0 only.
    x, y = np.zeros(6), [np.ones(6)]
    for t in range(400):
        heard = [[y[t - lag][j] if lag <= t else 0 for j, lag in enumerate(row)] for row in lags]
        x = np.mean(heard, axis=1)
        y.append(x)
    np.testing.assert_allclose(x, 1 / tree.kappa(), rtol=1e-9)


@pytest.mark.parametrize(("nodes", "diameter"), [(4, 2), (8, 4), (16, 6), (32, 8), (64, 10)])
def test_binary_tree_is_shallow(nodes, diameter):
    tree = binary_tree(nodes)
    assert tree.diameter == diameter
    assert {frozenset(e) for e in tree.edges} == {
        frozenset(e) for e in build("binary-tree", nodes).edges
    }
    assert tree == Tree.of(build("binary-tree", nodes))


@pytest.mark.parametrize("nodes", range(1, 66))
def test_double_binary_trees_share_the_load(nodes):
    one, other = double_binary_trees(nodes)
    for a, b in one.edges:
        assert other.behind(nodes - 1 - a, nodes - 1 - b) == one.behind(a, b)
    degrees = [len(a) + len(b) for a, b in zip(one.neighbors, other.neighbors, strict=True)]
    assert max(degrees) <= 4
    assert min(degrees) >= min(2, 2 * (nodes - 1))
    assert one.kappa() == pytest.approx(other.kappa(), rel=1e-15)
    union = {tuple(sorted(edge)) for tree in (one, other) for edge in tree.edges}
    assert union == set(build("double-binary-trees", nodes).edges)


@pytest.mark.slow
@given(connected_graphs())
@some
def test_spanning_tree_has_the_least_mean_distance_of_all_roots(graph):
    tree = spanning_tree(graph)
    assert all(graph.has_edge(*edge) for edge in tree.edges)
    candidates = [spanning_tree(graph, root) for root in graph]
    rank = [(each.mean_distance, each.diameter, root) for root, each in enumerate(candidates)]
    assert (tree.mean_distance, tree.diameter, tree.root) == min(rank)
    for root, each in enumerate(candidates):
        assert each.root == root
        lengths = nx.single_source_shortest_path_length(graph, root)
        assert each.distances()[root].tolist() == [lengths[v] for v in range(len(graph))]


@pytest.mark.slow
@given(connected_graphs(), st.data())
@some
def test_paths_of_a_spanning_tree_are_the_smallest_of_the_shortest(graph, data):
    root = data.draw(st.integers(0, len(graph) - 1))
    node = data.draw(st.integers(0, len(graph) - 1))
    tree, path = spanning_tree(graph, root), [node]
    while path[-1] != root:
        path.append(tree.parents[path[-1]])
    assert path[::-1] == min(nx.all_shortest_paths(graph, root, node))


def test_spanning_tree_of_a_tree_is_that_tree():
    graph = build("binary-tree", 13)
    assert set(map(frozenset, spanning_tree(graph).edges)) == set(map(frozenset, graph.edges))


def test_spanning_tree_of_a_complete_graph_is_a_star():
    tree = spanning_tree(nx.complete_graph(9))
    assert (tree.root, tree.degree, tree.diameter) == (0, 8, 2)


def test_spanning_tree_of_the_davis_graph():
    tree = spanning_tree(build("davis-southern-women", 32))
    assert len(tree.edges) == 31
    assert tree.diameter <= 2 * nx.radius(build("davis-southern-women", 32))


@pytest.mark.slow
@given(connected_graphs(), st.data())
@some
def test_a_forest_is_a_spanning_tree_of_each_part(graph, data):
    gone = data.draw(st.sets(st.sampled_from(sorted(graph.edges)))) if graph.edges else set()
    rest = nx.Graph(graph)
    rest.remove_edges_from(gone)
    forest = spanning_forest(rest)
    assert len(forest) == len(graph)
    for part in map(sorted, nx.connected_components(rest)):
        numbers = {node: i for i, node in enumerate(part)}
        alone = spanning_tree(nx.relabel_nodes(rest.subgraph(part), numbers))
        tree = forest[part[0]]
        assert all(forest[node] == tree for node in part)
        assert tree.present == tuple(part)
        assert (len(tree), tree.root) == (len(part), part[alone.root])
        assert tree.kappa() == alone.kappa()
        assert tree.diameter == alone.diameter
        tau = tree.distances()
        np.testing.assert_array_equal(tau[np.ix_(part, part)], alone.distances())
        assert (np.delete(tau[part], part, axis=1) == -1).all()
        for node in part:
            assert [numbers[peer] for peer in tree.neighbors[node]] == list(
                alone.neighbors[numbers[node]]
            )
            assert tree.eccentricities[node] == alone.eccentricities[numbers[node]]
            for peer in tree.neighbors[node]:
                assert tree.behind(node, peer) == alone.behind(numbers[node], numbers[peer])


def test_a_tree_may_leave_nodes_out():
    tree = spanning_forest(nx.Graph([(1, 3), (3, 4), (0, 2)]))[4]
    assert tree == Tree((-2, -1, -2, 1, 3))
    assert (len(tree), tree.present, tree.sizes) == (3, (1, 3, 4), (0, 3, 0, 2, 1))
    assert tree.neighbors == ((), (3,), (), (1, 4), (3,))
    assert tree.eccentricities == (-1, 2, -1, 1, 2)
    assert tree.kappa() == pytest.approx(Tree.of(nx.path_graph(3)).kappa())


def test_the_forest_of_a_connected_graph_is_its_spanning_tree():
    for spec, nodes in {"torus": 12, "complete": 7, "binary-tree": 9, "chain": 1}.items():
        graph = build(spec, nodes)
        assert set(spanning_forest(graph)) == {spanning_tree(graph)}


def test_trees_compare_by_value():
    assert Tree.of(nx.path_graph(3)) == Tree((-1, 0, 1))
    assert Tree.of(nx.path_graph(3)) != Tree.of(nx.path_graph(3), root=1)
    assert len({Tree((-1, 0)), Tree((-1, 0))}) == 1


def test_a_cycle_is_named():
    graph = build("binary-tree", 8)
    graph = nx.Graph(graph)
    graph.add_edge(4, 7)
    with pytest.raises(ConfigurationError, match=r"no tree: 4 - 3 - 2 - 1 - \.\.\. - 6 - 5 is"):
        Tree.of(nx.cycle_graph(9))
    with pytest.raises(ConfigurationError, match=r"no tree: 4 - 2 - 1 - 3 - 7 is a cycle"):
        Tree.of(graph)


def test_what_is_not_connected_is_no_tree():
    for make in (Tree.of, spanning_tree):
        with pytest.raises(ConfigurationError, match="connected|no path"):
            make(nx.empty_graph(3))
    with pytest.raises(ConfigurationError, match="0 to 1"):
        Tree.of(nx.Graph([("a", "b")]))
