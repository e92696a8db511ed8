"""The trees: whom each chunk goes to, and what that costs every node."""

from collections import Counter
from math import log2

import networkx as nx
import pytest

from flwr_decentral.core.topology import build
from flwr_decentral_allreduce.routes import OWNER, forests


def edges(graph):
    return frozenset((min(e), max(e)) for e in graph.edges)


def sends(graph, chunks):
    """Count the chunks that each node sends in a round: one up, and one down for each child."""
    load = Counter(dict.fromkeys(graph, 0))
    for forest in forests(len(graph), edges(graph), chunks):
        for node in graph:
            load[node] += (forest.parents[node] != OWNER) + len(forest.children[node])
    return [load[node] for node in sorted(graph)]


@pytest.mark.parametrize("spec", ["ring", "complete", "exponential"])
@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_alike_nodes_send_alike_and_the_least_that_is_possible(spec, n):
    # 2 (n-1) chunks of D/n each.
    assert sends(build(spec, n), n) == [2 * (n - 1)] * n


@pytest.mark.parametrize("spec", ["star", "chain", "torus", "binary-tree", "erdos-renyi"])
@pytest.mark.parametrize("chunks", [1, 5, 12])
def test_the_sum_over_all_nodes_is_the_least_on_every_graph(spec, chunks):
    n = 12
    assert sum(sends(build(spec, n), chunks)) == 2 * (n - 1) * chunks


def test_on_a_tree_each_node_sends_a_model_over_each_of_its_links():
    for spec in ("star", "chain", "binary-tree"):
        graph = build(spec, 9)
        assert sends(graph, 9) == [9 * graph.degree[node] for node in range(9)]


@pytest.mark.parametrize("spec", ["ring", "torus", "davis-southern-women", "small-world"])
def test_ways_are_shortest_paths_to_the_owner(spec):
    graph = build(spec, 32)
    for chunk, forest in enumerate(forests(32, edges(graph), 32)):
        assert forest.parents[chunk] == OWNER
        hops = nx.single_source_shortest_path_length(graph, chunk)
        for node, parent in enumerate(forest.parents):
            if node != chunk:
                assert graph.has_edge(node, parent)
                assert hops[parent] == hops[node] - 1
                assert node in forest.children[parent]


def test_hops_on_a_ring_and_a_complete_graph():
    for spec, farthest in (("ring", 8), ("complete", 1), ("hypercube", log2(16))):
        graph = build(spec, 16)
        for chunk in range(16):
            hops = nx.single_source_shortest_path_length(graph, chunk)
            assert max(hops.values()) == farthest


def test_fewer_chunks_than_nodes_are_owned_by_nodes_far_apart():
    owners = [forest.parents.index(OWNER) for forest in forests(12, edges(build("ring", 12)), 3)]
    assert owners == [0, 4, 8]


def test_what_is_cut_off_has_owners_of_its_own():
    graph = nx.cycle_graph(6)
    graph.remove_edges_from([(0, 1), (3, 4)])
    for chunk, forest in enumerate(forests(6, edges(graph), 6)):
        owners = [node for node in graph if forest.parents[node] == OWNER]
        assert len(owners) == 2
        assert chunk in owners
        assert [owner in (1, 2, 3) for owner in owners].count(True) == 1
    # Those of the other part are dealt out in turn.
    first = [forest.parents.index(OWNER) for forest in forests(6, edges(graph), 6)]
    assert len(set(first)) > 2


def test_a_node_without_links_owns_everything():
    assert [forest.parents for forest in forests(1, frozenset(), 2)] == [(OWNER,), (OWNER,)]


def test_equal_views_share_what_is_worked_out():
    one, other = edges(build("ring", 9)), edges(build("ring", 9))
    assert forests(9, one, 9) is forests(9, other, 9)
