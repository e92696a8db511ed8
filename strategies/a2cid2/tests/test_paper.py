"""The invariants of A2CiD2, on machines whose messages a test delivers when it likes.

What is claimed exactly is checked with float64 arithmetic, which the machines do not notice.
"""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    SECOND,
    ConfigurationError,
    Layout,
    Received,
    Seeds,
    Send,
    Site,
    Started,
    Stopped,
    Train,
    TrainDone,
)
from flwr_decentral.core.topology import build
from flwr_decentral.ops import Reference
from flwr_decentral_a2cid2 import A2CiD2

RING = nx.freeze(nx.cycle_graph(16))


class Float64(Reference):
    """The reference arithmetic without its rounding to float32."""

    def pairwise(self, x, mine, theirs, weight):
        return x + weight * (theirs - mine)

    def mix(self, x, y, share):
        return x + share * (y - x), y - share * (y - x)


class Laboratory:
    """Machines on a graph. One round takes a second; the first one has ended at once for all."""

    def __init__(self, graph, starts, algorithm=None, ops=None):
        algorithm = algorithm or A2CiD2(calibrate=False)
        ops = ops or Float64()
        starts = np.asarray(starts, np.float64 if isinstance(ops, Float64) else np.float32)
        layout = Layout.of({"x": np.zeros(starts.shape[1], np.float32)})
        self.graph, self.now = graph, SECOND
        self.mail, self.training = [], {}
        self.machines = [
            algorithm.machine(
                Site(
                    node=node,
                    topology=graph,
                    layout=layout,
                    initial=np.zeros_like(starts[0]),
                    seeds=Seeds(0).of(node),
                    ops=ops,
                )
            )
            for node in graph
        ]
        for node in graph:
            self.step(node, Started(at=0, up=tuple(sorted(graph[node]))))
        for node in graph:
            self.train(node, starts[node].copy())

    @property
    def x(self):
        return np.stack([machine.model for machine in self.machines])

    @property
    def y(self):
        return np.stack([machine.momentum for machine in self.machines])

    def step(self, node, event):
        for command in self.machines[node].step(event):
            if isinstance(command, Send):
                self.mail.append((node, command.to, command.message))
            elif isinstance(command, Train):
                self.training[node] = command

    def train(self, node, after=None, *, update=0.0):
        """End the training of a node."""
        command = self.training[node]
        after = command.model + update if after is None else after
        event = TrainDone(at=self.now, round=command.round, before=command.model, after=after)
        self.step(node, event)

    def invite(self, node, peer):
        machine = self.machines[node]
        for send in machine.pairing.begin({peer}, at=self.now, step=machine.round):
            if isinstance(send, Send):
                self.mail.append((node, peer, send.message))

    def deliver(self, place=0):
        source, node, message = self.mail.pop(place)
        self.step(node, Received(at=self.now, source=source, message=message))

    def exchange(self, node, peer):
        self.invite(node, peer)
        while self.mail:
            self.deliver()

    def wait(self, rounds):
        self.now += round(rounds * SECOND)

    def flush(self):
        """Bring all nodes to the same time."""
        for node in self.graph:
            self.step(node, Stopped(at=self.now, reason="to compare"))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def turmoil(laboratory, steps=400, seed=1, updates=True):
    """Train, invite, and deliver in any order and at any time; yield the update of each step."""
    dice = np.random.default_rng(seed)
    edges = [*laboratory.graph.edges, *[(b, a) for a, b in laboratory.graph.edges]]
    for _ in range(steps):
        laboratory.wait(dice.exponential() / 20)
        action, update = dice.integers(4), 0.0
        if action == 0 and updates:
            update = dice.normal(size=laboratory.x.shape[1])
            laboratory.train(int(dice.integers(len(laboratory.machines))), update=update)
        elif action == 1:
            laboratory.invite(*edges[dice.integers(len(edges))])
        elif laboratory.mail:
            laboratory.deliver(int(dice.integers(len(laboratory.mail))))
        yield update
    while laboratory.mail:
        laboratory.wait(0.01)
        laboratory.deliver()


def test_a1_the_sum_of_models_and_momenta_changes_by_training_alone():
    laboratory = Laboratory(RING, normal(16, 3), A2CiD2())
    start = laboratory.x.sum(axis=0) + laboratory.y.sum(axis=0)
    moved, reports = np.zeros(3), 0
    for update in turmoil(laboratory, 2000):
        moved += 2 * update
        reports += any(machine.pairing.offer for machine in laboratory.machines)
    end = laboratory.x.sum(axis=0) + laboratory.y.sum(axis=0)
    np.testing.assert_allclose(end, start + moved, rtol=0, atol=1e-11)
    assert reports > 500  # there have been updates between an offer and its answer


def test_a1_every_single_exchange_without_latency_keeps_the_sum():
    laboratory = Laboratory(RING, normal(16, 3), A2CiD2())
    dice, start = np.random.default_rng(2), (2 * laboratory.x).sum(axis=0)
    for _ in range(500):
        node = int(dice.integers(16))
        laboratory.wait(dice.exponential() / 8)
        laboratory.exchange(node, (node + 1) % 16)
        total = (laboratory.x + laboratory.y).sum(axis=0)
        np.testing.assert_allclose(total, start, rtol=0, atol=1e-12)


def test_a2_at_a_common_time_both_sums_are_that_of_all_updates():
    laboratory, dice = Laboratory(RING, normal(16, 3)), np.random.default_rng(4)
    expected, drift = laboratory.x.sum(axis=0), 0.0
    for second in range(2, 30):
        for time in np.sort(dice.uniform(size=12)):
            laboratory.now = round((second - 1 + time) * SECOND)
            node = int(dice.integers(16))
            laboratory.exchange(node, (node + 1) % 16)
            drift = max(drift, np.abs(laboratory.x.sum(axis=0) - expected).max())
        laboratory.now = second * SECOND
        for node in range(16):
            update = dice.normal(size=3)
            expected = expected + update
            laboratory.train(node, update=update)
        np.testing.assert_allclose(laboratory.x.sum(axis=0), expected, rtol=0, atol=1e-11)
        np.testing.assert_allclose(laboratory.y.sum(axis=0), expected, rtol=0, atol=1e-11)
        assert np.abs(laboratory.x - laboratory.y).max() > 1e-3
    assert drift > 1e-3  # between, the nodes stand at different times


def test_a3_without_flow_and_with_half_steps_it_is_gossip_to_the_bit():
    starts, ops = normal(16, 5), Reference()
    gossip = Laboratory(RING, starts, A2CiD2(momentum=False), ops)
    plain = Laboratory(RING, starts, A2CiD2(), ops)
    for machine in plain.machines:
        machine.eta, machine.alpha = 0.0, 0.5
    for each in (gossip, plain):
        for _ in turmoil(each, 1000, updates=False):
            pass
        each.flush()
    assert gossip.machines[0].momentum is None
    np.testing.assert_array_equal(plain.x, gossip.x)
    np.testing.assert_array_equal(plain.y, gossip.x)
    assert np.abs(gossip.x - starts).max() > 0.1


@pytest.mark.parametrize("parts", [(0.3, 0.4), (0.0, 0.7), (0.1,) * 7])
def test_a4_flowing_in_parts_is_flowing_at_once(parts):
    def flowed(*times):
        laboratory = Laboratory(RING, normal(16, 3))
        machine = laboratory.machines[0]
        machine.momentum = normal(3, seed=9)
        for time in times:
            laboratory.wait(time)
            machine.advance(laboratory.now)
        return machine

    np.testing.assert_allclose(flowed(*parts).model, flowed(sum(parts)).model, rtol=1e-12)
    np.testing.assert_allclose(flowed(*parts).momentum, flowed(sum(parts)).momentum, rtol=1e-12)


def test_a4_model_and_momentum_meet_after_a_long_time_and_never_pass():
    laboratory = Laboratory(RING, normal(16, 3))
    machine = laboratory.machines[0]
    x, y = machine.model, normal(3, seed=9)
    machine.momentum = y
    for rounds in (1, 1, 5, 1000):
        before = np.abs(machine.momentum - machine.model)
        laboratory.wait(rounds)
        machine.advance(laboratory.now)
        assert (np.abs(machine.momentum - machine.model) < before).all()
        assert ((machine.momentum - machine.model) * (y - x) >= 0).all()
    np.testing.assert_allclose(machine.model, (x + y) / 2, rtol=1e-12)
    np.testing.assert_allclose(machine.momentum, (x + y) / 2, rtol=1e-12)


@pytest.mark.parametrize("momentum", [True, False])
def test_a5_consensus_is_a_fixed_point_to_the_bit(momentum):
    common = np.tile(normal(5), (16, 1)).astype(np.float32)
    laboratory = Laboratory(RING, common, A2CiD2(momentum=momentum), Reference())
    for _ in turmoil(laboratory, 1000, updates=False):
        pass
    laboratory.flush()
    np.testing.assert_array_equal(laboratory.x, common)


def test_a6_golden_event():
    laboratory = Laboratory(RING, np.zeros((16, 1)))
    one, other = laboratory.machines[:2]
    assert one.eta == pytest.approx(0.1424738268, abs=1e-10)
    assert one.alpha == pytest.approx(1.8716888049, abs=1e-10)
    one.model, one.momentum = np.array([1.0]), np.array([0.25])
    other.model, other.momentum = np.array([-0.5]), np.array([2.0])

    laboratory.wait(0.7)
    for machine in (one, other):
        machine.advance(laboratory.now)
    flowed = [one.model, one.momentum, other.model, other.momentum]
    expected = [0.9321888387, 0.3178111613, -0.2739627958, 1.7739627958]
    np.testing.assert_allclose(np.ravel(flowed), expected, rtol=0, atol=1e-10)

    laboratory.exchange(0, 1)
    ended = [one.model, one.momentum, other.model, other.momentum]
    expected = [0.3291130215, -1.9397293502, 0.3291130215, 4.0315033073]
    np.testing.assert_allclose(np.ravel(ended), expected, rtol=0, atol=1e-10)
    assert np.sum(ended) == pytest.approx(2.75, abs=1e-12)


@pytest.mark.parametrize(
    ("spec", "n", "eta", "alpha"),
    [
        ("ring", 64, 0.0350, 7.2624),
        ("star", 16, 0.377, 0.707),
        ("chain", 16, 0.0694, 3.60),
        ("complete", 8, 8 / 14, 0.5),
    ],
)
@pytest.mark.parametrize("rate", [1.0, 2.0, 0.25])
def test_a7_a8_constants_of_the_topology_and_the_rate(spec, n, eta, alpha, rate):
    laboratory = Laboratory(build(spec, n), np.zeros((n, 1)), A2CiD2(rate=rate))
    for machine in laboratory.machines:
        assert machine.eta == pytest.approx(eta * rate, rel=2e-3)
        assert machine.alpha == pytest.approx(alpha, rel=2e-3)


def test_nominal_rate_of_a_node_is_its_share_of_the_exchanges():
    laboratory = Laboratory(build("star", 5), np.zeros((5, 1)), A2CiD2(rate=2.0))
    # Each of four leaves invites the center at 1, and is invited at 1/4.
    assert [machine.nominal for machine in laboratory.machines] == [5, 1.25, 1.25, 1.25, 1.25]
    ring = Laboratory(RING, np.zeros((16, 1)), A2CiD2(rate=3.0))
    assert {machine.nominal for machine in ring.machines} == {3.0}


@pytest.mark.parametrize("per_round", [0, 1, 2])
def test_eta_follows_the_achieved_rate(per_round):
    laboratory = Laboratory(nx.path_graph(2), normal(2, 1), A2CiD2(rate=2.0))
    for _ in range(400):
        for _ in range(per_round):
            laboratory.exchange(0, 1)
        laboratory.wait(1)
        for node in (0, 1):
            laboratory.train(node)
    for machine in laboratory.machines:
        assert machine.speed == pytest.approx(per_round / 2, abs=0.01)


def test_eta_stays_if_it_is_not_calibrated():
    laboratory = Laboratory(nx.path_graph(2), normal(2, 1), A2CiD2(calibrate=False))
    for _ in range(20):
        laboratory.wait(1)
        laboratory.train(0)
    assert laboratory.machines[0].speed == 1.0


def test_training_moves_model_and_momentum_alike():
    laboratory = Laboratory(RING, normal(16, 3))
    machine = laboratory.machines[3]
    machine.momentum = normal(3, seed=5)
    x, y, u = machine.model, machine.momentum, normal(3, seed=6)
    laboratory.train(3, update=u)
    np.testing.assert_allclose(machine.model, x + u, rtol=1e-12)
    np.testing.assert_allclose(machine.momentum, y + u, rtol=1e-12)


def test_exchanges_do_not_wait_for_training_and_it_does_not_undo_them():
    laboratory = Laboratory(RING, normal(16, 3), A2CiD2(momentum=False))
    started = laboratory.training[0].model
    x, other = laboratory.x[0], laboratory.x[1]
    for _ in range(3):
        laboratory.wait(0.1)
        laboratory.exchange(1, 0)
    np.testing.assert_allclose(laboratory.x[0], (x + other) / 2, rtol=1e-12)
    assert laboratory.training[0].model is started
    laboratory.train(0, update=1.0)
    np.testing.assert_allclose(laboratory.x[0], (x + other) / 2 + 1.0, rtol=1e-12)


def test_where_nothing_was_exchanged_the_trained_model_is_taken_as_it_is():
    laboratory = Laboratory(RING, normal(16, 3), ops=Reference())
    after = laboratory.x[0] * np.float32(1e-9) + np.float32(3)
    laboratory.wait(1)
    laboratory.train(0, after.copy())
    np.testing.assert_array_equal(laboratory.x[0], after)
    np.testing.assert_array_equal(laboratory.y[0], after)


def test_at_most_one_offer_is_out():
    laboratory = Laboratory(nx.freeze(nx.star_graph(3)), normal(4, 2))
    for leaf in (1, 2, 3):
        laboratory.invite(leaf, 0)
    for _ in range(3):
        laboratory.deliver()
    kinds = [message.kind for _, _, message in laboratory.mail]
    assert sorted(kinds) == ["busy", "busy", "offer"]


@pytest.mark.parametrize("n", [1, 4])
def test_without_links_it_falls_back_to_gossip(n):
    empty = build("empty", n)
    laboratory = Laboratory(empty, normal(n, 2))
    assert laboratory.machines[0].momentum is None
    laboratory.wait(1)
    laboratory.train(0, update=1.0)
    warnings = A2CiD2().check(empty, laboratory.machines[0].site.layout)
    assert len(warnings) == (n > 1)
    assert all("falls back to gossip" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("spec", "n", "warned"),
    [
        ("complete", 8, True),
        ("complete", 2, True),
        ("exponential", 8, False),
        ("ring", 4, False),
        ("ring", 3, True),
        ("star", 16, False),
    ],
)
def test_check_warns_where_nothing_is_gained(spec, n, warned):
    layout = Layout.of({"x": np.zeros(1, np.float32)})
    warnings = A2CiD2().check(build(spec, n), layout)
    assert len(warnings) == warned
    assert all("gains nothing" in warning for warning in warnings)
    assert not A2CiD2(momentum=False).check(build(spec, n), layout)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rate": 0.0},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"patience": 0.0},
        {"pacing": "posson"},
    ],
)
def test_impossible_parameters_are_refused(parameters):
    with pytest.raises(ConfigurationError):
        A2CiD2(**parameters)
