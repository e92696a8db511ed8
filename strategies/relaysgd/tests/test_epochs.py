"""Trees that are planned anew: whoever is in reach of whom, averages are theirs, exactly.

What a node contributes in a round is a vector with a one in a place of its own, so that each sum
shows what is in it. Expected trees are worked out from the topology alone.
"""

import random
from collections import Counter
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    SECOND,
    Layout,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Seeds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Train,
    TrainDone,
    Tree,
)
from flwr_decentral.core.linkstate import Claim
from flwr_decentral.core.topology import build
from flwr_decentral.core.trees import spanning_tree
from flwr_decentral.ops import choose
from flwr_decentral.sim.engine import Engine
from flwr_decentral.sim.plan import Plan
from flwr_decentral.sim.scenario import Compute, Network, Scenario
from flwr_decentral.sim.scenario import Outage as Away
from flwr_decentral.sim.trainer import FunctionTrainer
from flwr_decentral.testing import Cluster, Faults, Outage, Split, make_site
from flwr_decentral.testing.inspection import RestoringCluster
from flwr_decentral.testing.problems import Digits
from flwr_decentral_relaysgd import RelaySGD

MODES = ("lockstep", "overlapped", "latest")
modes = pytest.mark.parametrize("mode", MODES)
waiting = pytest.mark.parametrize("mode", MODES[:2])


class Marked(Cluster):
    """Look into each sum that is told, and tell when a tree has changed."""

    def __init__(self, graph, *, rounds, faults=None, train=None, **parameters):
        self.n, self.last = len(graph), rounds
        self.changed_at = Counter()
        super().__init__(
            RelaySGD(tree="spanning", **({"patience": 5.0} | parameters)),
            topology=graph,
            initial=np.zeros(self.n * (rounds + 1), np.float32),
            train=train or self.mark,
            rounds=rounds,
            faults=faults or Faults(),
        )

    def mark(self, node, number, _model):
        y = np.zeros((self.last + 1, self.n), np.float32)
        y[number, node] = 1
        return y.reshape(-1)

    def step(self, node, event):
        before = self.machines[node].epoch
        commands = super().step(node, event)
        if self.machines[node].epoch != before:
            self.changed_at[node] = self.now
        for send in of(Send, commands):
            message = send.message
            if message.payload is not None:
                marks, count = message.payload.reshape(-1, self.n), message.header["count"]
                assert set(np.unique(marks)) <= {0, 1}
                assert marks.sum() == count <= message.header["members"] < self.n
                assert marks.sum(axis=0).max() == 1, "a node is in a sum twice"
        return commands

    def sums(self, node, members):
        """Show what is in a node's model, by round and node."""
        return members * self.machines[node].model.reshape(-1, self.n)

    def expect_exact(self, *groups, lags=True):
        """Check that each node's model is the mean of its group's, as old as they are far away."""
        for group in groups:
            tree = tree_of(self.topology, group)
            lag = tree.lags(overlap=self.algorithm.mode != "lockstep")
            for a, node in enumerate(group):
                number = self.machines[node].round - 1
                expected = np.zeros((self.last + 1, self.n))
                for b, other in enumerate(group):
                    expected[number - lag[a, b], other] = 1
                found = self.sums(node, len(group))
                if not lags:
                    found, expected = found.sum(axis=0), expected.sum(axis=0)
                np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=f"node {node}")


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def tree_of(topology, group):
    """Make the spanning tree of some nodes, which are numbered anew."""
    part = nx.Graph(topology).subgraph(group)
    return spanning_tree(nx.relabel_nodes(part, {node: i for i, node in enumerate(sorted(group))}))


def without(graph, *gone):
    return sorted(set(graph) - set(gone))


def second(number):
    return round(number * SECOND)


def outages(*gone, start=6.4, end=None):
    spans = [Outage(node, second(start), end if end is None else second(end)) for node in gone]
    return Faults(outages=tuple(spans))


LEAVE = {
    "hub of a star": (nx.complete_graph(6), (0,)),
    "root of a chain": (nx.cycle_graph(7), (0,)),
    "inside a torus": (build("torus", 12), (5,)),
    "two at once": (build("torus", 12), (1, 6)),
    "two that are neighbors": (nx.complete_graph(6), (0, 1)),
    "a leaf": (nx.complete_graph(6), (5,)),
}
leave = pytest.mark.parametrize(("graph", "gone"), LEAVE.values(), ids=LEAVE)


@modes
@leave
def test_who_is_left_goes_on_as_one_network(graph, gone, mode):
    rest = without(graph, *gone)
    tree = tree_of(graph, rest)
    run = Marked(graph, mode=mode, rounds=26, faults=outages(*gone))
    run.run(until=second(6.9 + tree.diameter + 2))
    run.expect_exact(rest, lags=mode != "latest")
    # None takes longer than the news do, and the wait for more of them.
    if 0 in gone:
        assert set(run.changed_at) == set(rest)
    assert all(at < second(7) for at in run.changed_at.values())
    run.run()
    assert not run.stalled
    run.expect_exact(rest, lags=mode != "latest")


@pytest.mark.slow
@modes
@leave
def test_who_returns_is_a_part_again(graph, gone, mode):
    run = Marked(graph, mode=mode, rounds=40, faults=outages(*gone, end=16.3))
    run.run(until=second(16))
    run.expect_exact(without(graph, *gone), lags=False)
    run.run(until=second(27 if len(graph) > 7 else 25))
    run.expect_exact(sorted(graph), lags=mode != "latest")
    # The tree of the whole topology has the number 0 again.
    assert {machine.epoch for machine in run.machines} == {0}
    run.run()
    assert not run.stalled


@modes
def test_a_newcomer_in_the_middle(mode):
    graph = nx.complete_graph(5)
    run = Marked(graph, mode=mode, rounds=30, faults=outages(0, start=0, end=12.3))
    run.run(until=second(11.5))
    run.expect_exact([1, 2, 3, 4], lags=mode != "latest")
    run.run()
    assert not run.stalled
    run.expect_exact(sorted(graph), lags=False)


@pytest.mark.slow
@modes
def test_parts_go_on_and_become_one_again(mode):
    graph, half = build("torus", 12), frozenset({0, 1, 3, 4, 6, 7})
    halves = sorted(half), without(graph, *half)
    split = Split(second(5.4), second(20.4), half)
    run = Marked(graph, mode=mode, rounds=45, faults=Faults(partitions=(split,)))
    run.run(until=second(16))
    run.expect_exact(*halves, lags=mode != "latest")
    assert run.machines[0].epoch != run.machines[2].epoch
    run.run()
    assert not run.stalled
    run.expect_exact(sorted(graph), lags=mode != "latest")


def test_averages_are_exact_again_after_as_many_rounds_as_there_are_hops():
    graph, rest = nx.cycle_graph(9), list(range(1, 9))
    tree = tree_of(graph, rest)
    run = Marked(graph, rounds=30, faults=outages(0))
    run.run(until=second(6.9))
    started = {node: run.machines[node].round for node in rest}
    assert all(run.changed_at[node] for node in rest)
    for number in range(7, 7 + tree.diameter + 2):
        run.run(until=second(number + 0.9))
        for i, node in enumerate(rest):
            done = run.machines[node].round - started[node]
            heard = (tree.lags()[i] < done).sum()
            counted = (run.sums(node, len(rest)).sum(axis=0) > 1 - 1e-5).sum()
            # What cannot have arrived is filled with the node's own model.
            assert counted >= heard
            if done >= tree.eccentricities[i]:
                assert counted == len(rest)
    run.expect_exact(rest)


@pytest.mark.parametrize(
    ("mode", "missing"),
    [
        *((mode, "stale-fill") for mode in MODES),
        *(("lockstep", missing) for missing in ("last-average", "counts", "own")),
    ],
)
def test_models_come_to_the_mean_of_those_who_are_there(mode, missing):
    graph, targets = build("torus", 9), np.arange(9) ** 2

    def pull(node, _number, model):
        return model + np.float32(0.5) * (targets[node] - model)

    run = Cluster(
        RelaySGD(tree="spanning", patience=5.0, mode=mode, missing=missing),
        topology=graph,
        initial=np.zeros(2, np.float32),
        train=pull,
        rounds=70,
        faults=outages(4, 0),
    ).run()
    rest = without(graph, 4, 0)
    np.testing.assert_allclose(run.models[rest], targets[rest].mean(), atol=1e-3)


def test_a_new_tree_throws_nobody_back():
    graph = nx.complete_graph(6)

    def grow(_node, _number, model):
        return model + np.float32(0.3) * (10 - model)

    run = Cluster(
        RelaySGD(tree="spanning", patience=5.0),
        topology=graph,
        initial=np.zeros(1, np.float32),
        train=grow,
        rounds=40,
        faults=Faults(outages=(Outage(0, second(20.4), second(28.3)), Outage(1, second(24)))),
    )
    run.run(until=second(20))
    lowest = run.models.min()
    assert lowest > 9.5
    for number in range(21, 40):
        run.run(until=second(number))
        assert run.models[2:].min() > lowest


@modes
def test_a_new_tree_in_the_first_rounds_does_not_bring_the_initial_model_back(mode):
    def grow(_node, _number, model):
        return model + np.float32(0.3) * (10 - model)

    run = Cluster(
        RelaySGD(tree="spanning", patience=5.0, mode=mode),
        topology=nx.cycle_graph(9),
        initial=np.zeros(1, np.float32),
        train=grow,
        rounds=12,
        faults=outages(0, start=1.4),
    )
    run.run(until=second(1.9))
    assert all(machine.changes for machine in run.machines[1:])
    before = run.models[1:]
    assert before.min() > 0
    for number in range(2, 6):
        run.run(until=second(number + 0.9))
        assert (run.models[1:] > before).all()
        before = run.models[1:]


# What nodes tell each other


def kinds(run):
    return Counter(sent.message.kind for sent in run.sent)


@modes
def test_nothing_is_said_of_links_while_nothing_happens(mode):
    faults = Faults(drop=0.1, duplicate=0.2, reorder=True, corrupt=0.05, slow={1: 3.0})
    run = Marked(build("torus", 9), rounds=15, mode=mode, faults=faults)
    run.run()
    assert set(kinds(run)) <= {"sum", "nothing", "step"}
    assert not any("epoch" in sent.message.header for sent in run.sent)
    assert set(run.counters) & {"new-tree"} == set()


@pytest.mark.parametrize(
    ("graph", "parameters"),
    [
        (build("binary-tree", 7), {}),
        (build("binary-tree", 7), {"tree": "spanning"}),
        (build("double-binary-trees", 7), {"tree": "double-binary"}),
        (build("torus", 9), {"tree": "spanning", "variant": "grad"}),
    ],
    ids=["given", "no cycle", "double", "updates"],
)
def test_other_trees_are_fixed(graph, parameters):
    algorithm = RelaySGD(**{"patience": 5.0, **parameters})
    train, faults = (lambda _node, _number, model: model + 1), outages(1, end=9.6)
    run = Cluster(
        algorithm,
        topology=graph,
        initial=np.zeros(4, np.float32),
        train=train,
        rounds=20,
        faults=faults,
    ).run()
    assert not run.stalled
    assert all(machine.links is None for machine in run.machines)
    assert set(kinds(run)) <= {"sum", "nothing", "step"}
    used = {frozenset((sent.src, sent.dst)) for sent in run.sent}
    trees = algorithm.trees(run.topology)
    assert used <= {frozenset(edge) for tree in trees for edge in tree.edges}


def test_updates_count_once_though_the_middle_of_their_tree_goes():
    """With updates the tree stays: no update is ever told twice, and those of others are kept."""
    graph = nx.complete_graph(5)

    def train(node, number, model):
        step = np.zeros(5, np.float32)
        step[node] = number <= 12
        return model + step

    run = Cluster(
        RelaySGD(tree="spanning", variant="grad", patience=5.0),
        topology=graph,
        initial=np.zeros(5, np.float32),
        train=train,
        rounds=30,
        faults=outages(0, end=9.6),
    ).run()
    # In units of a fifth of an update: as many as were made, or fewer where they were missed.
    counted = 5 * run.models
    assert counted.max() <= 12 * 5 * (1 + 1e-5)
    for node in range(5):
        assert counted[node].max() > 0


def test_a_link_that_is_on_no_tree_changes_nothing():
    graph = nx.complete_graph(6)

    class Cut(Marked):
        """Break the link of the leaves 4 and 5 of the star in round 5."""

        def _change(self):
            super()._change()
            if self.now == second(5.4):
                for node, peer in ((4, 5), (5, 4)):
                    del self._nodes[node].peers[peer]
                    self._happen(node, PeerDown(at=self.now, peer=peer))

    # Something has to happen at that time; the machine of a lone node takes no notice.
    marker = Faults(partitions=(Split(second(5.4), second(5.5), frozenset()),))
    run, calm = Cut(graph, rounds=15, faults=marker), Marked(graph, rounds=15)
    run.run()
    calm.run()
    assert {machine.links.view for machine in run.machines} == {run.machines[0].links.view}
    assert run.machines[0].links.view != 0
    assert not run.changed_at
    np.testing.assert_array_equal(run.models, calm.models)


def test_kappa_is_reported_again_for_the_new_tree():
    graph = nx.cycle_graph(6)
    run = Marked(graph, rounds=12, faults=outages(0))
    run.run(until=second(6))
    before = run.counters["kappa"]
    assert before.total == pytest.approx(6 * tree_of(graph, range(6)).kappa())
    total, count = before.total, before.count
    run.run()
    # The ends of both links claim at once that they are down; no tree is planned in between.
    assert run.counters["new-tree"].count == run.counters["kappa"].count - count == 5
    kappa = tree_of(graph, range(1, 6)).kappa()
    assert run.counters["kappa"].total - total == pytest.approx(5 * kappa)


def test_rate_scale_uses_the_kappa_of_the_new_tree():
    graph, rate = nx.cycle_graph(6), np.float32(0.01)

    def train(_node, _number, model):
        return model + rate

    def speed(**parameters):
        run = Cluster(
            RelaySGD(tree="spanning", patience=5.0, **parameters),
            topology=graph,
            initial=np.zeros(1, np.float32),
            train=train,
            rounds=70,
            faults=outages(0),
        )
        run.run(until=second(40.5))
        early = run.models[1:].mean()
        run.run(until=second(60.5))
        return (run.models[1:].mean() - early) / 20

    kappa = tree_of(graph, range(1, 6)).kappa()
    assert kappa != tree_of(graph, range(6)).kappa()
    assert speed() == pytest.approx(rate / kappa, rel=0.05)
    assert speed(rate_scale="kappa") == pytest.approx(rate, rel=0.05)


# News that are lost, late or told twice

ROUGH = {
    "loss": Faults(drop=0.2),
    "duplication": Faults(duplicate=0.5, echo=2 * SECOND),
    "overtaking": Faults(reorder=True),
    "delay": Faults(delay=(0, SECOND)),
    "all": Faults(drop=0.1, duplicate=0.2, reorder=True, delay=(0, SECOND), echo=SECOND),
}


@pytest.mark.slow
@modes
@pytest.mark.parametrize("rough", ROUGH.values(), ids=ROUGH)
def test_news_get_through(mode, rough):
    graph, gone = build("torus", 9), Outage(4, second(6.4))
    flicker = Outage(0, second(9.2), second(15.7))
    faults = replace(rough, outages=(gone, flicker))
    run = Marked(graph, rounds=60, mode=mode, patience=3.0, faults=faults)
    run.run()
    assert not run.stalled
    rest = without(graph, 4)
    tree = tree_of(graph, rest)
    for node in rest:
        found = run.machines[node].relay.trees[0]
        assert found.present == tuple(rest)
        assert [[rest.index(peer) for peer in found.neighbors[each]] for each in rest] == [
            list(each) for each in tree.neighbors
        ]
    assert len({run.machines[node].epoch for node in rest}) == 1
    # Every model of who is there is in every average once; with nothing lost, none is missing.
    if not rough.drop and mode != "latest":
        run.expect_exact(rest, lags=False)
    for node in rest:
        each = run.sums(node, len(rest)).sum(axis=0)
        assert each[4] < 1e-3
        np.testing.assert_allclose(each.sum(), len(rest), rtol=1e-4)


@pytest.mark.slow
@modes
@pytest.mark.parametrize("seed", range(3))
def test_claims_that_are_all_lost_once_are_told_again(mode, seed):
    """The first claims of a node that leaves reach nobody; only sums show that trees differ."""

    class Deaf(Marked):
        def _send(self, node, to, message):
            if message.kind == "link" and self.now < second(6.6):
                self.injected["dropped"] += 1
                return
            super()._send(node, to, message)

    graph = (nx.complete_graph(6), nx.cycle_graph(7), build("torus", 9))[seed]
    run = Deaf(graph, rounds=40, mode=mode, faults=outages(0))
    run.run()
    assert not run.stalled
    assert run.injected["dropped"] > 0
    run.expect_exact(without(graph, 0), lags=False)
    assert len({run.machines[node].epoch for node in without(graph, 0)}) == 1


class Forgetful(Marked):
    """Let a node that returns begin anew, without any memory."""

    reborn = False

    def _return(self, node):
        state = self._nodes[node]
        if state.started:
            self.machines[node] = self.make(self.machines[node].site)
            self._referee._records[node] = type(self._referee._records[node])()
            state.started, state.training, state.peers, state.timers = False, None, {}, {}
            self.reborn = True


@pytest.mark.slow
@modes
@pytest.mark.parametrize(("graph", "gone"), [LEAVE[name] for name in list(LEAVE)[:3]])
@pytest.mark.parametrize("end", [6.5, 7.3, 14.3])
def test_a_node_that_begins_anew_is_a_part_again(mode, graph, gone, end):
    run = Forgetful(graph, rounds=40, mode=mode, faults=outages(*gone, end=end))
    run.run()
    assert run.reborn
    assert not run.stalled
    run.expect_exact(sorted(graph), lags=False)
    assert {machine.epoch for machine in run.machines} == {0}
    views = {machine.links.view for machine in run.machines}
    assert len(views) == 1


@pytest.mark.slow
@modes
def test_any_moment_of_a_change_can_be_written_down(mode):
    class Restoring(RestoringCluster, Marked):
        settled = 0

        def step(self, node, event):
            self.settled += self.machines[node].settling
            return super().step(node, event)

    graph = build("torus", 9)
    faults = Faults(
        outages=(Outage(4, second(2.4), second(5.6)), Outage(0, second(4.3))),
        partitions=(Split(second(6.4), second(8), frozenset({1, 2, 5})),),
        drop=0.1,
        delay=(0, SECOND // 2),
    )
    run = Restoring(graph, rounds=10, mode=mode, faults=faults)
    run.run()
    assert not run.stalled
    assert run.settled > 20


@waiting
def test_nobody_runs_ahead_where_news_wait_behind_sums(mode):
    """A sum is on an uplink three times as long as training takes, and news queue up behind it."""
    graph, initial, rounds = nx.freeze(build("torus", 12)), np.zeros(2000, np.float32), 30
    initial.flags.writeable = False
    algorithm, seeds = RelaySGD(tree="spanning", mode=mode, patience=1000.0), Seeds(1)
    conditions = Scenario(
        network=Network(uplink=2e4, latency=0.02),
        compute=Compute(seconds=1.0),
        outages=(Away(node=0, start=30.0, end=120.0),),
    ).resolve(12, seeds)
    plan = Plan(
        algorithm=algorithm,
        topology=graph,
        layout=Layout.of({"x": initial}),
        initial=initial,
        conditions=conditions,
        seeds=seeds,
        ops=choose(),
        rounds=rounds,
    )
    engine = Engine(plan, FunctionTrainer(lambda task, x: x + np.float32(0.5) * (task.node - x)))
    engine.run()
    assert engine.now < 500 * SECOND, "somebody had to lose patience"
    assert engine.tallies["new-tree"].count >= 2 * 11
    assert engine.tallies["skipped-round"].count <= 12
    np.testing.assert_allclose(np.stack(engine.models()), 5.5, atol=0.1)


@pytest.mark.slow
def test_churn_that_does_not_end_holds_nobody_up():
    graph = build("torus", 9)
    flicker = [
        Outage(node, second(2.1 * k + node / 5), second(2.1 * k + 1 + node / 5))
        for k in range(1, 12)
        for node in (0, 3, 4)
    ]
    run = Marked(graph, rounds=30, faults=Faults(outages=tuple(flicker)))
    run.run(until=second(26))
    # Each of the 33 who return has half a round left to train, and the others wait for it.
    assert min(run.trained[node] for node in (1, 2, 5, 6, 7, 8)) >= 10
    run.run()
    assert not run.stalled
    run.expect_exact(sorted(graph), lags=False)


# What a node makes of single messages


class Corner:
    """Node 2 of a ring of four, whose tree is 0 with 1 and 3, and 1 with 2."""

    def __init__(self, up=(1, 3), **parameters):
        site = make_site(topology=nx.cycle_graph(4), initial=np.zeros(2, np.float32), node=2)
        self.machine = RelaySGD(tree="spanning", **parameters).machine(site)
        self.commands = self.step(Started(at=0, up=up))

    def step(self, event):
        return self.machine.step(event)

    def train(self, *values):
        after = np.array(values or (4, 8), np.float32)
        before, number = self.machine.model, self.machine.round
        return self.step(TrainDone(at=0, round=number, before=before, after=after))

    def hear(self, source, kind, step=1, payload=None, **header):
        payload = None if payload is None else np.array(payload, np.float32)
        message = Message(kind=kind, step=step, payload=payload, header=header)
        return self.step(Received(at=0, source=source, message=message))

    def claim(self, *claim, source=1):
        return self.hear(source, "link", **Claim(*claim).message(1).header)

    def settle(self):
        return self.step(TimerFired(at=SECOND, name="settle"))


def sent(commands):
    return [(send.to, send.message.kind) for send in of(Send, commands)]


def test_news_are_passed_on_once_and_waited_for():
    node = Corner()
    commands = node.claim(0, 3, 1, False)
    assert sent(commands) == [(3, "link")]
    (timer,) = of(SetTimer, commands)
    assert (timer.name, timer.at) == ("settle", SECOND // 4)
    assert not node.claim(0, 3, 1, False)
    assert not sent(node.train())
    assert node.machine.waits_for == (1, 3)
    # The chain 3 - 2 - 1 - 0 hangs at its middle.
    commands = node.settle()
    assert sent(commands) == [(1, "sum"), (3, "sum")]
    assert len({send.message.header["epoch"] for send in of(Send, commands)} - {0}) == 1
    assert [send.message.header["members"] for send in of(Send, commands)] == [2, 3]
    assert {report.name for report in of(Report, commands)} == {"new-tree", "kappa"}
    assert node.machine.waits_for == (1, 3)


def test_what_was_held_back_is_sent_if_the_tree_is_the_same():
    node = Corner()
    # A claim that is true all the same.
    assert sent(node.claim(0, 3, 2, True)) == [(3, "link")]
    assert not sent(node.train())
    commands = node.settle()
    assert sent(commands) == [(1, "sum")]
    assert "epoch" not in of(Send, commands)[0].message.header
    assert node.machine.waits_for == (1,)


def test_a_sum_of_another_epoch_is_used_when_the_epoch_is_this_nodes():
    ahead = Corner()
    ahead.claim(0, 3, 1, False)
    ahead.settle()
    epoch = ahead.machine.epoch
    node = Corner()
    node.train()
    header = {"tree": 0, "count": 1, "members": 1, "epoch": epoch}
    commands = node.hear(3, "sum", payload=(2, 2), **header)
    assert (3, "known") in sent(commands)
    assert node.machine.round == 1
    node.claim(0, 3, 1, False, source=3)
    commands = node.settle()
    assert node.machine.epoch == epoch
    assert node.machine.waits_for == (1,)
    commands = node.hear(1, "sum", payload=(1, 1), **{**header, "members": 2})
    assert of(Train, commands)
    np.testing.assert_allclose(node.machine.model, [(4 + 1 + 2) / 4, (8 + 1 + 2) / 4])


def test_a_neighbor_in_another_epoch_is_asked_again_and_waited_for():
    node = Corner()
    node.train()
    header = {"tree": 0, "count": 1, "members": 1, "epoch": 99}
    commands = node.hear(1, "sum", payload=(1, 1), **header)
    assert sent(commands) == [(1, "known")]
    assert [(each.name, each.at) for each in of(SetTimer, commands)] == [("retry", SECOND // 4)]
    assert node.machine.waits_for == (1,)
    at = SECOND // 4
    for later in (2, 4, 8, 16, 32, 64, 64):
        commands = node.step(TimerFired(at=at, name="retry"))
        assert sent(commands) == [(1, "known")]
        at += later * SECOND // 4
        assert of(SetTimer, commands)[0].at == at
    # A newer word takes the place of the one that was set aside.
    (report,) = of(Report, node.hear(1, "sum", step=1, payload=(1, 1), **header))
    assert (report.name, report.nbytes) == ("stale-message", 64 + 8)
    header = {"tree": 0, "count": 1, "members": 3}
    commands = node.hear(1, "sum", payload=(8, 8), **header)
    assert [report.name for report in of(Report, commands)] == [
        "stale-message",
        "absent-contribution",
    ]
    assert [command.round for command in of(Train, commands)] == [2]
    np.testing.assert_array_equal(node.machine.model, [3, 4])
    assert not node.step(TimerFired(at=at, name="retry"))


def test_patience_ends_the_wait_for_a_neighbor_in_another_epoch():
    node = Corner()
    node.train()
    node.hear(1, "sum", payload=(1, 1), tree=0, count=1, members=1, epoch=99)
    commands = node.step(TimerFired(at=SECOND, name="patience"))
    assert [command.round for command in of(Train, commands)] == [2]
    np.testing.assert_array_equal(node.machine.model, [1, 2])


def on_a_chain():
    """Make a corner whose tree has become the chain 3 - 2 - 1 - 0, and the header of its sums."""
    node = Corner()
    node.claim(0, 3, 1, False)
    node.settle()
    assert node.machine.relay.trees[0].neighbors[2] == (1, 3)
    return node, {"tree": 0, "count": 1, "members": 1, "epoch": node.machine.epoch}


def test_what_is_missing_on_a_new_tree_is_filled_with_the_own_model():
    node = Corner()
    node.train()
    node.hear(1, "sum", payload=(4, 8), tree=0, count=1, members=3)
    np.testing.assert_array_equal(node.machine.model, [2, 4])  # half of it is the initial model
    node.claim(0, 3, 1, False)
    node.settle()
    node.train()
    header = {"tree": 0, "count": 1, "members": 1, "epoch": node.machine.epoch}
    node.hear(3, "sum", step=2, payload=(1, 1), **header)
    node.hear(1, "sum", step=2, payload=(1, 1), **{**header, "members": 2})
    np.testing.assert_allclose(node.machine.model, [(4 + 1 + 1 + 2) / 4, (8 + 1 + 1 + 4) / 4])


def test_who_leaves_rounds_out_says_so():
    node, header = on_a_chain()
    commands = node.hear(3, "sum", step=9, payload=(1, 1), **header)
    assert node.machine.round == 9
    assert [(send.to, send.message.kind, send.message.step) for send in of(Send, commands)] == [
        (1, "step", 9)
    ]


def test_who_is_in_touch_with_others_is_only_behind():
    node, header = on_a_chain()
    node.hear(3, "sum", step=9, payload=(1, 1), **header)
    assert node.machine.catching_up == 1
    node, header = on_a_chain()
    node.hear(1, "sum", step=1, payload=(1, 1), **header)
    node.hear(3, "sum", step=9, payload=(1, 1), **header)
    assert node.machine.round == 9
    assert node.machine.catching_up == 0


def test_who_knows_less_is_told():
    node = Corner()
    node.claim(0, 3, 1, False)
    node.settle()
    view = node.machine.links.view
    assert sent(node.hear(1, "known", view=view + 1, epoch=node.machine.epoch)) == [(1, "link")]
    assert not sent(node.hear(1, "known", view=view, epoch=node.machine.epoch))


def test_a_neighbor_in_reach_that_does_not_count_as_such_is_told_once_a_round():
    node = Corner()
    node.claim(3, 2, 1, False, source=3)
    node.settle()
    assert node.machine.relay.trees[0].neighbors[2] == (1,)
    told = sent(node.train())
    assert (3, "known") in told
    assert (1, "known") not in told


@pytest.mark.parametrize("header", [{}, {"node": 0, "peer": 2, "version": 1, "up": 0}])
@modes
def test_claims_that_make_no_sense_are_refused(mode, header):
    node = Corner(mode=mode)
    (report,) = of(Report, node.hear(1, "link", **header))
    assert report.name == "bad-message"
    assert not node.machine.settling


def test_who_is_not_there_at_first_does_not_count():
    node = Corner(up=(1,))
    assert (1, "link") in sent(node.commands)
    node.settle()
    assert node.machine.relay.trees[0] == Tree((-1, 0, 1, 0))
    commands = node.step(PeerUp(at=2 * SECOND, peer=3))
    assert sent(commands) == [(1, "link"), (3, "link"), (3, "link")]
    node.step(TimerFired(at=3 * SECOND, name="settle"))
    assert node.machine.epoch == 0


# Label-sorted digits


def accuracy(algorithm, graph, gone, rounds=300):
    """Train on a topology whose node ``gone`` leaves after a tenth of the run."""
    problem = Digits(nodes=len(graph), shards=1, dealt=False, rate=0.75, steps=1)
    run = Cluster(
        algorithm,
        topology=graph,
        initial=problem.initial,
        train=problem.train,
        rounds=rounds,
        faults=outages(gone, start=rounds / 10 + 0.4),
    ).run()
    each = [problem.accuracy(run.models[node]) for node in without(graph, gone)]
    return float(np.mean(each)), min(each)


@pytest.mark.slow
def test_a_torus_learns_all_digits_without_a_node_in_the_middle():
    torus = build("torus", 20)
    tree = spanning_tree(torus)
    middle = max(range(20), key=lambda node: len(tree.neighbors[node]))
    fixed = nx.empty_graph(20)
    fixed.add_edges_from(tree.edges)
    planned, worst = accuracy(RelaySGD(tree="spanning", patience=5.0), torus, middle)
    parted, _ = accuracy(RelaySGD(patience=5.0), fixed, middle)
    assert planned >= 0.91
    assert worst >= 0.86
    assert parted <= 0.6


class Deaf(Marked):
    """Lose most of what is said of links for some seconds, and nothing else."""

    def _send(self, node, to, message):
        said = message.kind in ("link", "known") and second(6) < self.now < second(12)
        if said and self.dice.random() < 0.8:
            self.injected["dropped"] += 1
        else:
            super()._send(node, to, message)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 20])
def test_lost_news_cost_no_patience(seed):
    """Training takes longer than the time after which a node asks again."""
    faults = replace(outages(4), slow={2: 3.0, 5: 1.7})
    run = Deaf(build("torus", 9), rounds=16, mode="overlapped", patience=600.0, faults=faults)
    run.dice = random.Random(seed)
    run.run()
    assert run.injected["dropped"] > 0
    assert run.now < second(100)
