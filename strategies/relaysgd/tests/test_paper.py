"""The invariants of RelaySum, on machines that do their arithmetic in float64.

With y_j(t) what node j contributes in step t, and steps counted from 0 as in the paper, a node's
sum in step t must be that of y_j(t - lag_ij), each exactly once. The tests count rounds from 1.
"""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import ConfigurationError, Tree
from flwr_decentral.core.topology import build
from flwr_decentral.core.trees import double_binary_trees
from flwr_decentral.ops import Reference
from flwr_decentral.testing import make_site
from flwr_decentral_relaysgd import RelaySGD

TREES = {
    "chain": build("chain", 5),
    "star": build("star", 5),
    "binary-tree": build("binary-tree", 7),
    "random": nx.convert_node_labels_to_integers(nx.random_labeled_tree(9, seed=3)),
    "one": build("chain", 1),
    "pair": build("chain", 2),
}
trees = pytest.mark.parametrize("graph", TREES.values(), ids=TREES.keys())
modes = pytest.mark.parametrize("mode", ["lockstep", "overlapped", "latest"])


def rest(_node, _number, model):
    return model.copy()


@trees
@modes
def test_r1_every_contribution_is_in_a_sum_exactly_once_as_late_as_it_is_far(exact, graph, mode):
    n = len(graph)
    lags = Tree.of(graph).lags(overlap=mode != "lockstep")
    rounds = int(lags.max()) + 4

    def mark(node, number, _model):
        y = np.zeros((rounds + 1, n))
        y[number, node] = 1
        return y.reshape(-1)

    run = exact(RelaySGD(mode=mode), graph, mark, rounds, size=n * (rounds + 1))
    for number in range(1, rounds + 1):
        sums = n * run.models[number].reshape(n, rounds + 1, n)
        for i in range(n):
            expected = np.zeros((rounds + 1, n))
            for j in range(n):
                if number - lags[i, j] >= 1:
                    expected[number - lags[i, j], j] = 1
            np.testing.assert_allclose(sums[i], expected, rtol=1e-15)
    for _, _, message in run.sent:
        if message.payload is not None:
            assert set(np.unique(message.payload)) <= {0, 1}
            assert message.payload.sum() == message.header["count"]
            assert np.count_nonzero(message.payload.reshape(rounds + 1, n).sum(axis=0) > 1) == 0


@trees
@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
def test_r2_counts_grow_until_they_are_full(exact, graph, mode):
    tree, n = Tree.of(graph), len(graph)
    lags = tree.lags(overlap=mode == "overlapped")
    for rounds in range(1, int(lags.max()) + 3):
        run = exact(RelaySGD(mode=mode), graph, rest, rounds)
        absent = [sum((lags[i] > t).sum() for t in range(rounds)) for i in range(n)]
        assert [report["absent-contribution"] for report in run.reports] == absent
    counts = {}
    for source, to, message in run.sent:
        if message.payload is not None:
            counts.setdefault((source, to), []).append(message.header["count"])
            assert message.header["members"] == tree.behind(to, source)
    for (source, to), grown in counts.items():
        assert grown == sorted(grown)
        assert grown[0] == 1
        assert grown[-1] == tree.behind(to, source)
    first = exact(RelaySGD(mode=mode), graph, rest, 1)
    initial = [1 + len(tree.neighbors[i]) if mode == "lockstep" else 1 for i in range(n)]
    assert [n - report["absent-contribution"] for report in first.reports] == initial


@trees
@pytest.mark.parametrize(
    ("mode", "missing"),
    [
        ("latest", "stale-fill"),
        ("overlapped", "stale-fill"),
        *(
            ("lockstep", rule)
            for rule in ("stale-fill", "last-average", "counts", "initial", "own")
        ),
    ],
)
def test_r3_equal_models_stay_equal_from_the_first_step_on(exact, graph, mode, missing):
    x = np.random.default_rng(1).normal(size=5)
    run = exact(RelaySGD(mode=mode, missing=missing), graph, rest, 8, initial=x)
    expected = np.tile(x, (9, len(graph), 1))
    # Sums of up to n terms, of which each rounds once.
    np.testing.assert_allclose(run.models, expected, rtol=len(graph) * 1e-15)


@trees
@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
def test_r4_updates_reach_all_nodes_in_full(exact, graph, mode):
    n, tree = len(graph), Tree.of(graph)
    updates = np.random.default_rng(2).integers(-9, 9, size=(4, n, 3)) * n

    def train(node, number, model):
        return model + updates[number - 1, node] if number <= 4 else model.copy()

    algorithm = RelaySGD(variant="grad", mode=mode)
    rounds = 4 + int(tree.lags(overlap=mode == "overlapped").max())
    run = exact(algorithm, graph, train, rounds, initial=np.ones(3))
    total = 1 + updates.sum(axis=(0, 1)) / n
    np.testing.assert_allclose(run.last, np.tile(total, (n, 1)), rtol=0, atol=1e-10)
    if tree.lags().max() > 0:
        early = exact(algorithm, graph, train, rounds - 1, initial=np.ones(3))
        assert np.abs(early.last - total).max() > 1e-3


@pytest.mark.slow
@trees
@modes
def test_r5_one_update_comes_to_the_same_everywhere_and_is_slowed_by_kappa(exact, graph, mode):
    n, tree = len(graph), Tree.of(graph)
    first, later = 1, tree.diameter + 3

    # Coordinate 0 is moved by all nodes at once, coordinate 1 + j by node j alone.
    def train(node, number, model):
        model = model.copy()
        if number == first:
            model[0] += 2
        elif number == later:
            model[1 + node] -= 3
        return model

    run = exact(RelaySGD(mode=mode), graph, train, 200, initial=np.ones(1 + n))
    kappa = tree.kappa(overlap=mode != "lockstep")
    expected = [1 + 2 / kappa, *[1 - 3 / (n * kappa)] * n]
    np.testing.assert_allclose(run.last, np.tile(expected, (n, 1)), rtol=0, atol=1e-6)
    assert all(report["kappa"] == kappa for report in run.reports)


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 12])
@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
@pytest.mark.parametrize("variant", ["model", "grad"])
def test_r6_double_trees_are_two_runs_side_by_side(exact, nodes, mode, variant):
    initial = np.random.default_rng(4).normal(size=9).astype(np.float32)
    targets = np.random.default_rng(5).normal(size=(nodes, 9)).astype(np.float32)
    options = {"variant": variant, "mode": mode}

    def descend(on):
        def train(node, _number, model):
            return model - np.float32(0.3) * (model - targets[node, on])

        return train

    together = exact(
        RelaySGD(tree="double-binary", **options),
        build("double-binary-trees", nodes),
        descend(slice(None)),
        12,
        initial=initial,
        ops=Reference(),
    )
    for first, tree in enumerate(double_binary_trees(nodes)):
        graph = nx.empty_graph(nodes)
        graph.add_edges_from(tree.edges)
        half = slice(first, None, 2)
        alone = exact(
            RelaySGD(**options), graph, descend(half), 12, initial=initial[half], ops=Reference()
        )
        np.testing.assert_array_equal(together.models[:, :, half], alone.models)
        sent = [m.payload for _, _, m in together.sent if m.header.get("tree") == first]
        for payload, (_, _, message) in zip(sent, alone.sent, strict=True):
            np.testing.assert_array_equal(payload, message.payload)


@pytest.mark.parametrize("nodes", [4, 7, 16, 33])
def test_double_trees_send_two_models_a_step_at_most(exact, nodes):
    graph, size, rounds = build("double-binary-trees", nodes), 6, 5
    run = exact(RelaySGD(tree="double-binary"), graph, rest, rounds, size=size)
    sent = [sum(len(m.payload) for source, _, m in run.sent if source == i) for i in range(nodes)]
    assert max(sent) == 2 * size * rounds
    single = exact(RelaySGD(), build("binary-tree", nodes), rest, rounds, size=size)
    sent = [
        sum(len(m.payload) for source, _, m in single.sent if source == i) for i in range(nodes)
    ]
    assert max(sent) == 3 * size * rounds


@pytest.mark.parametrize("variant", ["model", "grad"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_r7_one_and_two_nodes_average_at_once(exact, variant, nodes):
    targets = np.array([[1.0, 2.0], [-3.0, 5.0]])

    def train(node, _number, model):
        return model - 0.3 * (model - targets[node])

    run = exact(RelaySGD(variant=variant), build("chain", nodes), train, 9, size=2)
    x = np.zeros(2)
    for models in run.models[1:]:
        x = np.mean([train(node, 0, x) for node in range(nodes)], axis=0)
        np.testing.assert_allclose(models, np.tile(x, (nodes, 1)), rtol=1e-14)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (
            {},
            [
                (1, 2.333333, 2),
                (3.444444, 4.111111, 3.777778),
                (5.518519, 6.111111, 5.296296),
                (7.469136, 7.975309, 7.283951),
                (9.246914, 9.909465, 9.259259),
            ],
        ),
        ({"missing": "initial"}, [(1, 2.333333, 2), (3.444444, 4.111111, 3.777778)]),
        (
            {"missing": "own"},
            [(1.333333, 2.333333, 3.333333), (3.555556, 4.666667, 4.222222)],
        ),
        ({"missing": "counts"}, [(1.5, 2.333333, 3), (3.611111, 4.611111, 4.111111)]),
        (
            {"variant": "grad"},
            [(1, 2.333333, 2)] + [tuple(7 / 3 * k + np.array([1, 7 / 3, 2])) for k in range(1, 5)],
        ),
    ],
    ids=["model", "initial", "own", "counts", "grad"],
)
def test_r8_golden_trace_of_a_chain_of_three(exact, parameters, expected):
    def train(node, _number, model):
        return model + (1, 2, 4)[node]

    run = exact(RelaySGD(**parameters), build("chain", 3), train, len(expected))
    np.testing.assert_allclose(run.models[1:, :, 0], expected, rtol=0, atol=6e-7)


@modes
def test_rate_scale_is_a_factor_on_the_rate(exact, mode):
    graph = build("binary-tree", 10)
    targets = np.random.default_rng(6).normal(size=(10, 3))
    kappa = Tree.of(graph).kappa(overlap=mode != "lockstep")

    def descend(rate):
        return lambda node, _number, model: model - rate * (model - targets[node])

    scaled = exact(RelaySGD(mode=mode, rate_scale="kappa"), graph, descend(0.02), 30, size=3)
    plain = exact(RelaySGD(mode=mode), graph, descend(0.02 * kappa), 30, size=3)
    np.testing.assert_allclose(scaled.models, plain.models, rtol=0, atol=1e-13)
    assert np.abs(plain.last).max() > 0.1


def test_latest_at_an_equal_pace_is_overlapped(exact):
    graph = TREES["random"]
    targets = np.random.default_rng(7).normal(size=(9, 4))

    def train(node, _number, model):
        return model - 0.3 * (model - targets[node])

    runs = [
        exact(RelaySGD(mode=mode), graph, train, 25, size=4) for mode in ("latest", "overlapped")
    ]
    np.testing.assert_array_equal(runs[0].models, runs[1].models)


# What is refused, and what is said


def layout(size=8):
    return make_site(topology=build("chain", 2), initial=np.zeros(size, np.float32)).layout


@pytest.mark.parametrize("spec", ["ring", "complete", "torus", "double-binary-trees"])
def test_a_cyclic_topology_is_refused_with_the_cure(spec):
    with pytest.raises(ConfigurationError, match=r"is a cycle.*tree='spanning'") as caught:
        RelaySGD().check(build(spec, 9), layout())
    assert "binary-tree" in str(caught.value)
    assert RelaySGD(tree="spanning").check(build(spec, 9), layout())


def test_a_topology_without_both_trees_is_refused_with_the_cure():
    both = RelaySGD(tree="double-binary")
    with pytest.raises(ConfigurationError, match=r"lacks the links .*'double-binary-trees'"):
        both.check(build("binary-tree", 9), layout())
    for spec in ("double-binary-trees", "complete"):
        both.check(build(spec, 9), layout())
    with pytest.raises(ConfigurationError, match="two trees share"):
        both.check(build("complete", 3), layout(1))


@pytest.mark.parametrize("kind", ["given", "spanning", "double-binary"])
def test_a_topology_that_is_not_connected_is_refused(kind):
    with pytest.raises(ConfigurationError):
        RelaySGD(tree=kind).check(build("empty", 3), layout())


def test_an_algorithm_brings_the_topology_that_it_needs():
    assert RelaySGD.default_topology == RelaySGD().default_topology == "binary-tree"
    assert RelaySGD(tree="double-binary").default_topology == "double-binary-trees"
    assert RelaySGD.capabilities.needs_tree
    assert not RelaySGD(tree="spanning").capabilities.needs_tree
    assert RelaySGD().capabilities.synchronous
    assert not RelaySGD(mode="latest").capabilities.synchronous
    for kind in ("given", "double-binary"):
        algorithm = RelaySGD(tree=kind)
        algorithm.check(build(algorithm.default_topology, 12), layout())


def test_check_says_what_lateness_costs():
    (warning,) = RelaySGD().check(build("chain", 16), layout())
    assert "kappa = 5.375" in warning
    (warning,) = RelaySGD(mode="overlapped").check(build("chain", 16), layout())
    assert "kappa = 6.312" in warning
    assert not RelaySGD(rate_scale="kappa").check(build("chain", 16), layout())
    assert not RelaySGD(variant="grad").check(build("chain", 16), layout())
    assert not RelaySGD().check(build("chain", 2), layout())


def test_check_says_what_a_spanning_tree_is():
    first, second = RelaySGD(tree="spanning", rate_scale="kappa").check(
        build("complete", 12), layout()
    )
    assert "11 of 66 links" in first
    assert "node 0; 2 hops" in first
    assert "sends 11 models" in second


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"variant": "models"}, "did you mean 'model'"),
        ({"tree": "star"}, "known: double-binary, given, spanning"),
        ({"mode": "async"}, "known: latest, lockstep, overlapped"),
        ({"missing": "stale"}, "did you mean 'stale-fill'"),
        ({"rate_scale": "n"}, "known: kappa, none"),
        ({"patience": -1.0}, "patience"),
        ({"patience": float("nan")}, "patience"),
        ({"variant": "grad", "rate_scale": "kappa"}, "too much"),
        ({"variant": "grad", "missing": "counts"}, "a missing update is zero"),
        ({"variant": "grad", "mode": "latest"}, "must count once"),
        ({"mode": "latest", "missing": "own"}, "leave it out"),
    ],
)
def test_impossible_parameters_are_refused(parameters, message):
    with pytest.raises(ConfigurationError, match=message):
        RelaySGD(**parameters)
