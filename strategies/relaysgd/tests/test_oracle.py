"""The machines against two versions of the paper's equations that send no message."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import SECOND, Layout, Seeds, Tree
from flwr_decentral.core.topology import build
from flwr_decentral.core.trees import double_binary_trees, spanning_tree
from flwr_decentral.ops import choose
from flwr_decentral.sim.engine import Engine
from flwr_decentral.sim.plan import Plan
from flwr_decentral.sim.scenario import Network, Scenario
from flwr_decentral.sim.trainer import FunctionTrainer
from flwr_decentral.testing import Cluster, Faults
from flwr_decentral_relaysgd import RelaySGD

GRAPHS = {
    "chain": build("chain", 5),
    "star": build("star", 6),
    "binary-tree": build("binary-tree", 11),
    "random": nx.convert_node_labels_to_integers(nx.random_labeled_tree(9, seed=8)),
    "pair": build("chain", 2),
}
graphs = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
modes = pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
variants = pytest.mark.parametrize("variant", ["model", "grad"])


@graphs
@modes
@variants
def test_machines_solve_the_equations(exact, academic, graph, mode, variant):
    targets = np.random.default_rng(3).normal(size=(len(graph), 7))
    initial = np.random.default_rng(4).normal(size=7)

    def train(node, number, model):
        return model - 0.5 / number * (model - targets[node])

    run = exact(RelaySGD(mode=mode, variant=variant), graph, train, 15, initial=initial)
    expected = academic(
        graph, train, 15, initial=initial, overlap=mode == "overlapped", grad=variant == "grad"
    )
    np.testing.assert_allclose(run.models, expected, rtol=0, atol=1e-13)


def whiteboard(tree, x, train, rounds, variant, overlap):
    """Write RelaySGD down for one machine, in float32; sums are in the order of nodes."""
    n, one = len(tree), np.float32(1)
    x, first, before = [x.copy() for _ in range(n)], x, {}
    for t in range(1, rounds + 1):
        y = [train(i, t, x[i]) for i in range(n)]
        if variant == "grad":
            y = [y[i] - x[i] for i in range(n)]
        now = {}
        for i in range(n):
            for j in tree.neighbors[i]:
                heard = {i: (one, y[i])}
                heard |= {k: before[k, i] for k in tree.neighbors[i] if k != j and (k, i) in before}
                total = None
                for k in sorted(heard):
                    total = heard[k][1] if total is None else total + heard[k][1]
                now[i, j] = sum(int(heard[k][0]) for k in heard), total
        used = before if overlap else now
        after = []
        for i in range(n):
            terms = {i: (1, y[i])}
            terms |= {k: used[k, i] for k in tree.neighbors[i] if (k, i) in used}
            total, weight = x[i] if variant == "grad" else None, np.float32(1 / n)
            for k in sorted(terms):
                term = weight * terms[k][1]
                total = term if total is None else total + term
            rest = n - sum(terms[k][0] for k in terms)
            if rest and variant == "model":
                total = total + np.float32(rest / n) * first
            after.append(total)
        x, before = after, now
    return np.stack(x)


def problem(nodes):
    targets = np.random.default_rng(6).normal(size=(nodes, 19)).astype(np.float32)

    def train(node, number, model, on=slice(None)):
        return model - np.float32(0.3 / number) * (model - targets[node, on])

    return np.random.default_rng(5).normal(size=19).astype(np.float32), train


def cluster(algorithm, graph, rounds, **options):
    initial, train = problem(len(graph))
    options = {"topology": graph, "initial": initial, "train": train, "rounds": rounds, **options}
    return Cluster(algorithm, **options).run()


@graphs
@modes
@variants
def test_lockstep_run_equals_the_whiteboard_to_the_bit(graph, mode, variant):
    run = cluster(RelaySGD(mode=mode, variant=variant), graph, 12)
    initial, train = problem(len(graph))
    expected = whiteboard(Tree.of(graph), initial, train, 12, variant, mode == "overlapped")
    np.testing.assert_array_equal(run.models, expected)
    assert set(run.counters) <= {"kappa", "absent-contribution"}


@modes
@pytest.mark.parametrize("spec", ["ring", "torus", "complete"])
def test_any_topology_is_relayed_along_a_spanning_tree(mode, spec):
    graph = build(spec, 9)
    run = cluster(RelaySGD(mode=mode, tree="spanning"), graph, 12)
    tree = spanning_tree(graph)
    initial, train = problem(9)
    expected = whiteboard(tree, initial, train, 12, "model", mode == "overlapped")
    np.testing.assert_array_equal(run.models, expected)
    used = {(min(sent.src, sent.dst), max(sent.src, sent.dst)) for sent in run.sent}
    assert used == {(min(edge), max(edge)) for edge in tree.edges}


@modes
@variants
@pytest.mark.parametrize("nodes", [3, 8])
def test_double_trees_are_two_whiteboards(mode, variant, nodes):
    algorithm = RelaySGD(mode=mode, variant=variant, tree="double-binary")
    run = cluster(algorithm, build("double-binary-trees", nodes), 12)
    initial, train = problem(nodes)
    for first, tree in enumerate(double_binary_trees(nodes)):
        half = slice(first, None, 2)
        expected = whiteboard(
            tree,
            initial[half],
            lambda node, number, model, half=half: train(node, number, model, half),
            12,
            variant,
            mode == "overlapped",
        )
        np.testing.assert_array_equal(run.models[:, half], expected)


@modes
@pytest.mark.parametrize(
    "faults",
    [
        Faults(slow={2: 5.0}),
        Faults(delay=(0, 3 * SECOND)),
        Faults(duplicate=0.3, echo=SECOND),
    ],
    ids=["slow", "delay", "duplicate"],
)
def test_lateness_and_duplicates_change_no_number(mode, faults):
    calm, harried = (
        cluster(RelaySGD(mode=mode), GRAPHS["binary-tree"], 12, faults=each)
        for each in (Faults(), faults)
    )
    np.testing.assert_array_equal(harried.models, calm.models)
    assert "missing-sum" not in harried.counters


@pytest.mark.parametrize("mode", ["lockstep", "overlapped", "latest"])
def test_virtual_time_changes_no_number_and_reports_kappa(mode):
    graph, rounds = GRAPHS["binary-tree"], 12
    initial, train = problem(len(graph))
    initial.flags.writeable = False
    algorithm, seeds = RelaySGD(mode=mode), Seeds(1)
    network = Network(uplink=1e6, latency=0.01)
    plan = Plan(
        algorithm=algorithm,
        topology=graph,
        layout=Layout.of({"x": initial}),
        initial=initial,
        conditions=Scenario(network=network).resolve(len(graph), seeds),
        seeds=seeds,
        ops=choose(),
        rounds=rounds,
    )
    engine = Engine(plan, FunctionTrainer(lambda task, x: train(task.node, task.round, x)))
    engine.run()
    np.testing.assert_array_equal(
        np.stack(engine.models()), cluster(algorithm, graph, rounds).models
    )
    tally = engine.tallies["kappa"]
    assert tally.total / tally.count == pytest.approx(algorithm.kappa(graph))
