"""Sums that are lost, and nodes that come and go: the average stays one of those who are there."""

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    SECOND,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    Started,
    TimerFired,
    Train,
    TrainDone,
)
from flwr_decentral.core.topology import build
from flwr_decentral.testing import Cluster, Faults, Outage, Split, make_site
from flwr_decentral.testing.problems import Quadratics
from flwr_decentral_relaysgd import RelaySGD

MODES = ("lockstep", "overlapped", "latest")
modes = pytest.mark.parametrize("mode", MODES)
CHAIN = nx.path_graph(5)
TARGETS = np.array([[1, 0], [5, 2], [-3, 4], [0, -8], [7, 7]], np.float32)


def pull(node, _round, model):
    return model + np.float32(0.5) * (TARGETS[node] - model)


def cluster(graph=CHAIN, rounds=70, faults=None, train=pull, **parameters):
    return Cluster(
        RelaySGD(**({"patience": 5.0} | parameters)),
        topology=graph,
        initial=np.zeros(2, np.float32),
        train=train,
        rounds=rounds,
        faults=faults or Faults(),
    )


def run(**options):
    done = cluster(**options).run()
    assert not done.stalled
    return done


def means(*groups):
    """Expect each node at the mean of its group's targets."""
    expected = {node: TARGETS[list(group)].mean(axis=0) for group in groups for node in group}
    return np.array([expected[node] for node in sorted(expected)])


def spread(exact, missing, drop, nodes=6, rounds=190):
    problem = Quadratics(nodes=nodes, size=4, rate=0.5, curvature=(0.5, 1.0))

    def train(node, _number, x):
        gradient = problem.hessians[node] @ (x - problem.optimum) + problem.pulls[node]
        return x - problem.rate * gradient

    graph = build("binary-tree", nodes)
    done = exact(RelaySGD(missing=missing), graph, train, rounds, size=4, drop=drop)
    return problem.error(done.last)


@pytest.mark.slow
def test_only_the_last_sum_in_place_of_a_lost_one_leaves_no_bias(exact):
    drop = 0.2
    assert spread(exact, "stale-fill", 0.0) < 1e-20
    assert spread(exact, "stale-fill", drop) < 1e-20
    assert 1e-6 < spread(exact, "last-average", drop) < 1
    assert 1e-4 < spread(exact, "counts", drop) < 1
    assert 1e-4 < spread(exact, "own", drop) < 1
    assert spread(exact, "initial", drop) > 1


def test_lost_updates_are_lost_for_good(exact):
    def train(node, number, model):
        return model + 1 if number <= 5 else model.copy()

    graph = build("binary-tree", 8)
    kept, robbed = (
        exact(RelaySGD(variant="grad"), graph, train, 20, drop=drop).last for drop in (0.0, 0.3)
    )
    np.testing.assert_allclose(kept, 5, rtol=1e-14)
    assert (robbed < 4.9).all()


@modes
def test_loss_costs_age_and_is_counted(mode):
    done = run(mode=mode, faults=Faults(drop=0.2))
    # The models still move while their sums are of different ages, but around the right place.
    np.testing.assert_allclose(done.models, means(range(5)), atol=2e-3)
    ages = done.counters["staleness"]
    assert ages.total >= ages.count > 0
    if mode != "latest":
        missing = done.counters["missing-sum"].count
        assert missing >= ages.count
        assert missing >= done.injected["dropped"] - done.counters["stale-message"].count - 8


@modes
def test_a_node_that_leaves_takes_its_edges_and_n_with_it(mode):
    for gone, groups in {4: [(0, 1, 2, 3)], 2: [(0, 1), (3, 4)]}.items():
        done = run(mode=mode, faults=Faults(outages=(Outage(gone, 20 * SECOND),)))
        live = [node for node in range(5) if node != gone]
        np.testing.assert_allclose(done.models[live], means(*groups), atol=1e-5)
        last = {(sent.src, sent.dst): sent.message for sent in done.sent}
        size = {node: len(group) for group in groups for node in group}
        for (source, to), message in last.items():
            if gone not in (source, to):
                there = message.header["members"]
                assert there + last[to, source].header["members"] == size[source]
                assert message.header["count"] == there


@pytest.mark.slow
@modes
def test_parts_train_by_themselves_and_meet_again(mode):
    split = Split(10 * SECOND, 60 * SECOND, frozenset({0, 1}))
    whole = cluster(mode=mode, rounds=120, faults=Faults(partitions=(split,)))
    whole.run(until=59 * SECOND)
    np.testing.assert_allclose(whole.models, means((0, 1), (2, 3, 4)), atol=1e-4)
    whole.run()
    assert not whole.stalled
    np.testing.assert_allclose(whole.models, means(range(5)), atol=1e-4)


@pytest.mark.slow
@modes
@pytest.mark.parametrize("late", [4, 2])
def test_a_newcomer_takes_over_the_average_and_throws_nobody_back(mode, late):
    def train(_node, _round, model):
        return model + np.float32(0.2) * (10 - model)

    joins = 60 * SECOND + SECOND // 3
    run = cluster(
        mode=mode, train=train, rounds=100, faults=Faults(outages=(Outage(late, 0, joins),))
    )
    run.run(until=joins)
    others = [node for node in range(5) if node != late]
    lowest = run.models[others].min()
    assert lowest > 9.9
    assert run.models[late].max() == 0
    for second in range(61, 90):
        run.run(until=second * SECOND + SECOND // 2)
        assert run.models[others].min() > lowest - 1e-3
        if second >= 64:
            assert run.models[late].min() > 9.5
    run.run()
    assert not run.stalled


@modes
def test_a_node_that_returns_takes_over_the_average_too(mode):
    def train(_node, number, model):
        return model + np.float32(0.2) * ((10 if number > 8 else -10) - model)

    away = Outage(4, 8 * SECOND, 60 * SECOND + SECOND // 3)
    run = cluster(mode=mode, train=train, rounds=100, faults=Faults(outages=(away,)))
    run.run(until=60 * SECOND)
    assert run.models[:4].min() > 9.85
    assert run.models[4].max() < 0
    for second in range(61, 80):
        run.run(until=second * SECOND + SECOND // 2)
        assert run.models[:4].min() > 9.85
        if second >= 64:
            assert run.models[4].min() > 9.5


@pytest.mark.slow
def test_without_waiting_slow_nodes_count_as_much_as_fast_ones():
    done = run(mode="latest", rounds=400, faults=Faults(slow={4: 5.0, 1: 2.5}))
    np.testing.assert_allclose(done.models, means(range(5)), atol=1e-5)
    assert done.counters["staleness"].total > 0


def test_without_waiting_each_round_begins_with_another_neighbor():
    """An uplink that takes one sum a round, and then drops the others, starves nobody."""
    site = make_site(topology=nx.star_graph(3), initial=np.zeros(2, np.float32), node=0)
    machine = RelaySGD(mode="latest").machine(site)
    machine.step(Started(at=0, up=(1, 2, 3)))
    firsts = []
    for number in range(1, 7):
        after = np.full(2, number, np.float32)
        done = TrainDone(at=number, round=number, before=machine.model, after=after)
        told = [each.to for each in machine.step(done) if isinstance(each, Send)]
        assert sorted(told) == [1, 2, 3]
        firsts.append(told[0])
    assert sorted(firsts) == [1, 1, 2, 2, 3, 3]


def test_a_slow_node_is_not_taken_for_a_newcomer():
    done = run(rounds=60, patience=0.5, faults=Faults(slow={4: 4.0}))
    # It is left behind each round, and still pulls the others toward its target.
    assert done.counters["skipped-round"].count > 20
    np.testing.assert_allclose(done.models[:4], np.tile(means(range(5))[0], (4, 1)), atol=1.0)
    without = TARGETS[:4].mean(axis=0)
    assert np.abs(done.models[:4] - without).min() > 0.5


# What a node makes of single messages


class Middle:
    """Node 1 of a chain of four."""

    def __init__(self, **parameters):
        site = make_site(topology=nx.path_graph(4), initial=np.zeros(2, np.float32), node=1)
        self.machine = RelaySGD(**parameters).machine(site)
        self.step(Started(at=0, up=(0, 2)))

    def step(self, event):
        return self.machine.step(event)

    def train(self, number, *values):
        after = np.array(values, np.float32)
        return self.step(TrainDone(at=0, round=number, before=self.machine.model, after=after))

    def hear(self, source, step, *values, kind="sum", **header):
        message = Message(
            kind=kind,
            step=step,
            payload=np.array(values or (0, 0), np.float32),
            header={"tree": 0, "count": 1, "members": 1 if source == 0 else 2, **header},
        )
        return self.step(Received(at=0, source=source, message=message))


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def told(commands):
    return {
        send.to: (send.message.header["count"], *send.message.payload.tolist())
        for send in of(Send, commands)
    }


def test_a_neighbor_is_told_what_all_others_have_told():
    node = Middle()
    assert told(node.train(1, 4, 8)) == {0: (1, 4, 8), 2: (1, 4, 8)}
    assert node.machine.waits_for == (0, 2)
    node.hear(0, 1, 1, 2)
    commands = node.hear(2, 1, 3, 6)
    assert of(Train, commands)[0].round == 2
    np.testing.assert_array_equal(node.machine.model, [2, 4])  # a fourth: node 3 is on its way
    assert told(node.train(2, 4, 8)) == {0: (2, 7, 14), 2: (2, 5, 10)}


def test_a_sum_that_comes_late_is_kept_for_the_next_round():
    node = Middle()
    node.train(1, 4, 8)
    node.hear(0, 1, 1, 2)
    node.hear(2, 2, 9, 9, count=2)  # its step 1 is lost
    assert node.machine.round == 2
    assert not of(Report, node.hear(2, 1, 3, 6))
    assert told(node.train(2, 4, 8)) == {0: (2, 7, 14), 2: (2, 5, 10)}
    (report,) = of(Report, node.hear(2, 1, 3, 6))
    assert report.name == "stale-message"


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("stale-fill", [(4 + 1 + 3) / 4, (8 + 2 + 6) / 4]),
        ("last-average", [(4 + 1 + 2 * 2) / 4, (8 + 2 + 2 * 4) / 4]),
        ("counts", [5 / 2, 10 / 2]),
        ("initial", [5 / 4, 10 / 4]),
        ("own", [(4 * 3 + 1) / 4, (8 * 3 + 2) / 4]),
    ],
)
def test_what_stands_in_for_a_lost_sum(missing, expected):
    node = Middle(missing=missing)
    for number in (1, 2):
        node.train(number, 4, 8)
        node.hear(0, number, 1, 2)
        if number == 1:
            node.hear(2, 1, 3, 6, count=2)
            np.testing.assert_array_equal(node.machine.model, [2, 4])
    assert node.machine.waits_for == (2,)
    commands = node.step(TimerFired(at=0, name="patience"))
    reports = {report.name: report for report in of(Report, commands)}
    np.testing.assert_allclose(node.machine.model, expected, rtol=1e-7)
    assert reports["missing-sum"].count == 1
    if missing == "stale-fill":
        assert (reports["staleness"].count, reports["staleness"].total) == (1, 1.0)
        assert "absent-contribution" not in reports
    else:
        assert reports["absent-contribution"].count == 2
    # Nor is it relayed any longer, unless it stands in.
    assert told(node.train(3, 0, 0))[0] == ((3, 3, 6) if missing == "stale-fill" else (1, 0, 0))


def test_a_neighbor_that_goes_down_is_out_of_the_sums_at_once():
    node = Middle()
    node.train(1, 4, 8)
    node.hear(0, 1, 1, 2)
    node.hear(2, 1, 3, 6, count=2)
    node.step(PeerDown(at=0, peer=2))
    assert told(node.train(2, 4, 8)) == {0: (1, 4, 8)}
    node.hear(0, 2, 2, 0)
    np.testing.assert_array_equal(node.machine.model, [3, 4])  # a half: two members are left
    (send,) = of(Send, node.step(PeerUp(at=0, peer=2)))
    assert (send.message.kind, send.message.step) == ("step", 3)
    assert told(node.train(3, 4, 8)) == {0: (1, 4, 8), 2: (2, 6, 8)}


def test_members_that_are_gone_far_away_are_not_waited_for():
    node = Middle()
    node.train(1, 4, 8)
    node.hear(0, 1, 1, 2)
    node.hear(2, 1, 4, 2, count=1, members=1)  # node 3 is gone, says node 2
    np.testing.assert_allclose(node.machine.model, [3, 4], rtol=1e-6)
    sends = of(Send, node.train(2, 4, 8))
    assert [send.message.header["members"] for send in sends] == [2, 2]


@pytest.mark.parametrize(
    "bad",
    [
        {"values": (1, 2, 3)},
        {"count": 3},
        {"count": 0},
        {"count": 1.5},
        {"members": 3},
        {"members": 0},
        {"tree": 1},
        {"tree": -1},
        {"tree": 0.5},
        {"kind": "model"},
    ],
    ids=str,
)
@modes
def test_what_is_no_sum_is_refused_and_not_waited_for(mode, bad):
    node = Middle(mode=mode)
    node.train(1, 4, 8)
    number = node.machine.round
    if mode == "overlapped":
        node.train(1, 4, 8)
    values = bad.get("values", (1, 1))
    rest = {key: value for key, value in bad.items() if key != "values"}
    (report,) = of(Report, node.hear(2, number, *values, **rest))
    assert (report.name, report.nbytes) == ("bad-message", 64 + 4 * len(values))
    assert 2 not in node.machine.waits_for
    assert not node.machine.held


def test_only_neighbors_on_the_tree_are_listened_to():
    site = make_site(topology=nx.cycle_graph(4), initial=np.zeros(2, np.float32), node=2)
    machine = RelaySGD(tree="spanning").machine(site)
    commands = machine.step(Started(at=0, up=(1, 3)))
    commands += machine.step(
        TrainDone(at=0, round=1, before=machine.model, after=np.ones(2, np.float32))
    )
    # The tree is 0 with 1 and 3, and 1 with 2.
    assert [send.to for send in of(Send, commands)] == [1]
    assert machine.waits_for == (1,)
    message = Message(
        kind="sum",
        step=1,
        payload=np.ones(2, np.float32),
        header={"tree": 0, "count": 1, "members": 1},
    )
    (report,) = of(Report, machine.step(Received(at=0, source=3, message=message)))
    assert report.name == "bad-message"
    assert not machine.step(PeerUp(at=0, peer=3))
