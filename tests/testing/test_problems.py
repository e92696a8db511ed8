import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import ConfigurationError, Layout
from flwr_decentral.testing import Cluster
from flwr_decentral.testing.problems import Digits, Quadratics, Targets
from flwr_decentral.testing.toys import Lockstep


def test_quadratics_are_as_specified():
    problem = Quadratics(nodes=16)
    eigenvalues = np.linalg.eigvalsh(problem.hessians)
    assert np.allclose(eigenvalues[:, [0, -1]], [0.1, 1.0])
    assert np.allclose(problem.pulls.sum(axis=0), 0)
    assert np.square(problem.pulls).sum(axis=1).mean() == pytest.approx(1.0)
    assert np.linalg.norm(problem.optimum) == pytest.approx(10.0)


def test_quadratics_descend_along_their_gradient():
    problem = Quadratics(nodes=3, rate=0.01)
    x = np.ones(10, np.float32)

    def value(i, x):
        return 0.5 * (x - problem.optimum) @ problem.hessians[i] @ (x - problem.optimum) + (
            problem.pulls[i] @ x
        )

    for i in range(3):
        numeric = [(value(i, x + 1e-5 * e) - value(i, x - 1e-5 * e)) / 2e-5 for e in np.eye(10)]
        assert np.allclose(problem.train(i, 1, x), x - 0.01 * np.array(numeric), atol=1e-5)


def test_all_reduce_solves_quadratics():
    problem = Quadratics(nodes=4, rate=0.4)
    x = problem.initial
    for round in range(400):
        x = np.mean([problem.train(i, round, x) for i in range(4)], axis=0, dtype=np.float32)
    assert problem.error(x[None]) < 1e-9


def test_a_single_node_has_nobody_to_disagree_with():
    assert not Quadratics(nodes=1).pulls.any()


def test_targets_pull():
    problem = Targets(nodes=2)
    assert problem.initial.shape == (37,)
    assert Layout.of(problem.tensors).size == 37
    there = problem.points[1].copy()
    assert np.allclose(problem.train(1, 3, there), there, atol=1e-6)
    assert problem.train(0, 1, np.zeros(1, np.float32)).shape == (1,)


@pytest.mark.slow
def test_digits_are_split_as_specified():
    problem = Digits(nodes=10)
    assert len(problem.initial) == 2410
    assert Layout.of(problem.tensors).size == 2410
    shares = problem._shares
    assert sum(len(labels) for _, labels in shares) == 1437
    assert len(problem._test[1]) == 360
    assert max(len(set(labels)) for _, labels in shares) <= 4
    assert np.mean([len(set(labels)) for _, labels in shares]) < 3.5
    assert set(np.concatenate([labels for _, labels in shares])) == set(range(10))


@pytest.mark.slow
def test_digits_that_are_not_dealt_out_go_round_by_label():
    problem = Digits(nodes=20, shards=1, dealt=False)
    labels = [problem._shares[node][1] for node in range(20)]
    assert np.concatenate(labels).tolist() == sorted(np.concatenate(labels).tolist())
    assert sum(len(np.unique(each)) for each in labels) <= 29
    two = Digits(nodes=4, shards=2, dealt=False)
    labels = np.concatenate([two._shares[node][1] for node in range(4)])
    assert labels.tolist() == sorted(labels.tolist())


@pytest.mark.slow
def test_digits_repeat_and_do_not_depend_on_order():
    one, two = Digits(nodes=3, steps=2), Digits(nodes=3, steps=2)
    forward = [one.train(i, 1, one.initial) for i in range(3)]
    backward = [two.train(i, 1, two.initial) for i in reversed(range(3))]
    assert all(np.array_equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))
    assert not np.array_equal(one.train(0, 2, one.initial), forward[0])
    assert not np.array_equal(Digits(nodes=3, seed=1).initial, one.initial)
    assert forward[0].dtype == np.float32


@pytest.mark.slow
def test_digits_descend_along_the_gradient_of_cross_entropy():
    problem = Digits(nodes=1, steps=1, batch=400, rate=0.05)
    images, labels = problem._shares[0]

    def loss(vector):
        w1, b1 = vector[:2048].reshape(64, 32), vector[2048:2080]
        w2, b2 = vector[2080:2400].reshape(32, 10), vector[2400:]
        logits = np.maximum(images @ w1 + b1, 0) @ w2 + b2
        logits -= logits.max(axis=1, keepdims=True)
        return float(
            np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels])
        )

    start = problem.initial.astype(np.float64)
    after = problem.train(0, 1, problem.initial).astype(np.float64)
    step = after - start
    slope = (loss(start + 1e-3 * step) - loss(start - 1e-3 * step)) / 2e-3
    assert slope == pytest.approx(-np.square(step).sum() / 0.05, rel=0.2)


@pytest.mark.slow
def test_digits_can_be_learned_by_gossip():
    problem = Digits(nodes=4, shards=5, rate=0.2)
    cluster = Cluster(
        Lockstep(),
        topology=nx.complete_graph(4),
        initial=problem.tensors,
        train=problem.train,
        rounds=40,
    ).run()
    accuracies = [problem.accuracy(model) for model in cluster.models]
    assert problem.accuracy(problem.initial) < 0.3
    assert min(accuracies) > 0.85


@pytest.mark.slow
def test_digits_refuse_more_shards_than_examples():
    with pytest.raises(ConfigurationError, match="cannot have"):
        Digits(nodes=1000)
