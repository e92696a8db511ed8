"""The cluster does to machines what it says, and nothing else."""

from dataclasses import dataclass, field

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    SECOND,
    Algorithm,
    AlgorithmError,
    Capabilities,
    ConfigurationError,
    DropQueued,
    LinkIdle,
    Machine,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    SetTimer,
    Started,
    Stopped,
    TimerFired,
    Train,
    TrainDone,
    TrainFailed,
)
from flwr_decentral.testing import Cluster, Faults, Outage, Split, make_site
from flwr_decentral.testing.faults import fault_matrix
from flwr_decentral.testing.toys import Gossip, Lockstep

MS = 10**6


class ProbeMachine(Machine):
    """Train round after round, answer by script, remember every event."""

    def __init__(self, site, script):
        super().__init__(site)
        self.script, self.events = script, []

    def step(self, event):
        self.events.append(event)
        commands = super().step(event)
        return [*(self.script(self.site.node, event) or ()), *commands]

    def on_started(self, event):
        yield Train(round=1, model=self.model)

    def on_train_done(self, event):
        self.model = self.site.ops.update(self.model, event.before, event.after)
        yield Train(round=event.round + 1, model=self.model)


@dataclass(frozen=True, kw_only=True)
class Probe(Algorithm):
    name = "probe"
    script: object = field(default=lambda *_: ())

    def machine(self, site):
        return ProbeMachine(site, self.script)


class IdleProbe(Probe):
    capabilities = Capabilities(link_idle=True)


def grow(_node, _round, vector):
    return vector + 1


def grow_by_node(node, _round, vector):
    return vector + np.float32(node)


def run(script=lambda *_: (), graph=None, rounds=3, algorithm=Probe, **settings):
    settings = {"initial": np.zeros(4, np.float32), "train": grow} | settings
    graph = nx.path_graph(2) if graph is None else graph
    cluster = Cluster(algorithm(script=script), topology=graph, rounds=rounds, **settings)
    return cluster.run()


def events(cluster, node, *kinds):
    kinds = kinds or (object,)
    return [event for event in cluster.machines[node].events if isinstance(event, kinds)]


def letter(step, kind="model"):
    return Message(kind=kind, step=step, payload=np.full(2, step, np.float32))


def send_each_round(node, event, copies=1):
    if node == 0 and isinstance(event, TrainDone):
        return [Send(to=1, message=letter(copies * event.round + i)) for i in range(copies)]
    return []


def steps_received(cluster):
    return [event.message.step for event in events(cluster, 1, Received)]


def test_a_calm_run():
    cluster = run(send_each_round)
    assert cluster.finished == [True, True]
    assert cluster.halted == [False, False]
    assert cluster.stalled == {}
    assert cluster.trained == [3, 3]
    assert np.array_equal(cluster.models, np.full((2, 4), 3))
    assert steps_received(cluster) == [1, 2, 3]
    assert [event.at for event in events(cluster, 1, Received)] == [
        round * SECOND + 10 * MS for round in (1, 2, 3)
    ]
    assert [sent[:3] for sent in cluster.sent] == [(r * SECOND, 0, 1) for r in (1, 2, 3)]
    assert isinstance(events(cluster, 0)[0], Started)
    assert isinstance(events(cluster, 0)[-1], Stopped)


def test_training_starts_from_the_very_vector_and_gives_a_writable_one():
    seen = []

    def script(_node, event):
        if isinstance(event, TrainDone):
            seen.append((event.before.flags.writeable, event.after.flags.writeable))

    cluster = run(script)
    first = events(cluster, 0, TrainDone)[0]
    assert first.before is cluster.machines[0].site.initial
    assert seen[0] == (False, True)


def test_training_cannot_spoil_the_model_it_starts_from():
    def train(_node, _round, vector):
        vector += 5
        return vector

    cluster = run(train=train, rounds=2)
    assert np.array_equal(cluster.models, np.full((2, 4), 10))
    assert not cluster.machines[0].site.initial.any()


def test_failed_training():
    def train(_node, round, vector):
        if round == 1:
            raise RuntimeError("no data")
        return vector + 1

    cluster = run(train=train, faults=Faults(fail_train={1: {2}}))
    assert [event.reason for event in events(cluster, 0, TrainFailed)] == ["RuntimeError: no data"]
    assert [event.reason for event in events(cluster, 1, TrainFailed)] == [
        "RuntimeError: no data",
        "injected",
    ]
    assert cluster.models[:, 0].tolist() == [2, 1]


def test_a_trainer_that_changes_the_shape_is_the_testers_fault():
    with pytest.raises(ConfigurationError, match="returned shape"):
        run(train=lambda *given: given[2][:1])


def test_slow_nodes():
    cluster = run(faults=Faults(slow={1: 2.5}))
    assert [event.at for event in events(cluster, 1, TrainDone)] == [
        2_500 * MS,
        5_000 * MS,
        7_500 * MS,
    ]


def test_one_uplink_and_links_in_order():
    cluster = run(lambda n, e: send_each_round(n, e, copies=3), rounds=1)
    assert [event.at - SECOND for event in events(cluster, 1, Received)] == [
        10 * MS,
        20 * MS,
        30 * MS,
    ]
    delayed = run(
        lambda n, e: send_each_round(n, e, copies=5), faults=Faults(delay=(0, 3 * SECOND))
    )
    assert steps_received(delayed) == sorted(steps_received(delayed))
    assert len(steps_received(delayed)) == 15


def test_reordering():
    cluster = run(lambda n, e: send_each_round(n, e, copies=5), faults=Faults(reorder=True))
    assert sorted(steps_received(cluster)) == [
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        16,
        17,
        18,
        19,
    ]
    assert steps_received(cluster) != sorted(steps_received(cluster))


def test_loss_duplication_and_corruption_are_counted():
    faults = Faults(drop=0.2, duplicate=0.2, corrupt=0.2)
    cluster = run(lambda n, e: send_each_round(n, e, copies=20), rounds=10, faults=faults)
    arrived = events(cluster, 1, Received)
    injected = cluster.injected
    assert len(cluster.sent) == 200
    assert len(arrived) == 200 - injected["dropped"] + injected["duplicated"]
    spoilt = [event for event in arrived if not np.isfinite(event.message.payload).all()]
    assert len(spoilt) == injected["corrupted"] == cluster.counters["payload-not-finite"].count
    assert all(20 < injected[each] < 60 for each in ("dropped", "duplicated", "corrupted"))
    assert cluster.counters["payload-not-finite"].nbytes == 72 * len(spoilt)


def test_late_echoes():
    cluster = run(send_each_round, faults=Faults(duplicate=1.0, echo=5 * SECOND))
    assert sorted(steps_received(cluster)) == [1, 1, 2, 2, 3, 3]
    assert steps_received(cluster) != sorted(steps_received(cluster))


def test_one_fault_leaves_the_dice_of_the_others_alone():
    def arrivals(**faults):
        cluster = run(
            lambda n, e: send_each_round(n, e, copies=4),
            rounds=6,
            faults=Faults(delay=(0, SECOND), **faults),
        )
        return {event.message.step: event.at for event in events(cluster, 1, Received)}

    calm, lossy = arrivals(), arrivals(drop=0.3)
    assert 0 < len(lossy) < len(calm)
    assert lossy.items() <= calm.items()


def test_partition():
    faults = Faults(partitions=(Split(1500 * MS, 3500 * MS, frozenset({0})),))
    cluster = run(send_each_round, rounds=5, faults=faults)
    assert steps_received(cluster) == [1, 4, 5]
    assert cluster.injected["unsent"] == 2
    for node, other in ((0, 1), (1, 0)):
        assert events(cluster, node, PeerDown, PeerUp) == [
            PeerDown(at=1500 * MS, peer=other),
            PeerUp(at=3500 * MS, peer=other),
        ]
    assert cluster.trained == [5, 5]


def test_what_is_on_the_way_or_queued_is_lost_with_its_link():
    faults = Faults(
        partitions=(Split(1015 * MS, 1016 * MS, frozenset({0})),), delay=(20 * MS, 20 * MS)
    )
    cluster = run(lambda n, e: send_each_round(n, e, copies=4), rounds=1, faults=faults)
    assert steps_received(cluster) == []
    assert cluster.injected == {"cut": 2, "unsent": 2}


def test_a_node_that_is_away_sees_nothing_and_stands_still():
    def script(node, event):
        if isinstance(event, Started):
            yield SetTimer(name="alarm", at=2 * SECOND)
        yield from send_each_round(node, event)

    faults = Faults(outages=(Outage(1, 1500 * MS, 4250 * MS),))
    cluster = run(script, nx.path_graph(3), rounds=5, faults=faults)
    assert [(type(event).__name__, event.at // MS) for event in events(cluster, 1)][3:12] == [
        ("PeerDown", 4250),
        ("PeerDown", 4250),
        ("PeerUp", 4250),
        ("PeerUp", 4250),
        ("TimerFired", 4250),
        ("TrainDone", 4750),
        ("Received", 5010),
        ("TrainDone", 5750),
        ("TrainDone", 6750),
    ]
    for node in (0, 2):
        assert events(cluster, node, PeerDown, PeerUp) == [
            PeerDown(at=1500 * MS, peer=1),
            PeerUp(at=4250 * MS, peer=1),
        ]
    assert cluster.finished == [True] * 3


def test_a_node_that_leaves_for_good_is_not_waited_for():
    faults = Faults(outages=(Outage(1, 1500 * MS),))
    cluster = run(faults=faults)
    assert cluster.live == [0]
    assert cluster.finished == [True, False]
    assert cluster.stalled == {}
    assert events(cluster, 0, PeerDown) == [PeerDown(at=1500 * MS, peer=1)]
    assert not events(cluster, 1, Stopped)


def test_a_node_that_joins():
    faults = Faults(outages=(Outage(1, 0, 2500 * MS),))
    cluster = run(graph=nx.path_graph(3), faults=faults)
    assert events(cluster, 0)[0] == Started(at=0, up=())
    assert events(cluster, 1)[0] == Started(at=2500 * MS, up=(0, 2))
    assert events(cluster, 0, PeerUp) == [PeerUp(at=2500 * MS, peer=1)]
    assert not events(cluster, 1, PeerUp, PeerDown)
    assert cluster.finished == [True] * 3


def test_a_link_that_breaks_while_a_node_is_away_is_told_when_it_returns():
    faults = Faults(
        outages=(Outage(1, 1 * SECOND, 3 * SECOND),),
        partitions=(Split(2 * SECOND, 4 * SECOND, frozenset({2})),),
    )
    cluster = run(graph=nx.path_graph(3), rounds=9, faults=faults)
    assert events(cluster, 1, PeerDown, PeerUp) == [
        PeerDown(at=3 * SECOND, peer=0),
        PeerDown(at=3 * SECOND, peer=2),
        PeerUp(at=3 * SECOND, peer=0),
        PeerUp(at=4 * SECOND, peer=2),
    ]


def test_timers_move_and_can_be_cancelled():
    def script(_node, event):
        if isinstance(event, Started):
            yield SetTimer(name="moved", at=100 * MS)
            yield SetTimer(name="moved", at=200 * MS)
            yield SetTimer(name="cancelled", at=300 * MS)
            yield SetTimer(name="cancelled", at=None)
            yield SetTimer(name="late", at=-5)

    assert events(run(script), 0, TimerFired) == [
        TimerFired(at=0, name="late"),
        TimerFired(at=200 * MS, name="moved"),
    ]


def test_queued_messages_can_be_dropped_but_started_ones_cannot():
    def script(node, event):
        if node == 0 and isinstance(event, Started):
            yield from (Send(to=1, message=letter(step)) for step in (1, 2, 3))
            yield SetTimer(name="flush", at=15 * MS)
        if isinstance(event, TimerFired):
            yield DropQueued(to=1)
            yield Send(to=1, message=letter(4))

    cluster = run(script)
    assert steps_received(cluster) == [1, 2, 4]
    assert cluster.injected == {"unsent": 1}


def test_idle_links_are_told_to_those_who_ask():
    def script(node, event):
        if node == 0 and isinstance(event, Started):
            yield Send(to=1, message=letter(1))
        if isinstance(event, LinkIdle) and event.at < 30 * MS:
            yield Send(to=1, message=letter(event.at))

    assert not events(run(script), 0, LinkIdle)
    cluster = run(script, algorithm=IdleProbe)
    assert [event.at // MS for event in events(cluster, 0, LinkIdle)] == [10, 20, 30]
    assert len(steps_received(cluster)) == 3


def test_what_is_on_the_way_at_the_end_arrives():
    cluster = run(send_each_round, faults=Faults(delay=(9 * SECOND, 9 * SECOND)))
    assert steps_received(cluster) == [1, 2, 3]
    assert cluster.finished == [True, True]


def test_reports_add_up():
    def script(_node, event):
        if isinstance(event, TrainDone):
            yield Report(name="seen", count=2, total=0.5, nbytes=8)

    tally = run(script).counters["seen"]
    assert (tally.count, tally.total, tally.nbytes) == (12, 3.0, 48)


class Waiting(Probe):
    def machine(self, site):
        machine = ProbeMachine(site, self.script)
        machine.on_train_done = lambda _: ()
        return machine


def test_a_run_that_cannot_go_on_ends_and_says_who_waits():
    cluster = run(algorithm=Waiting)
    assert cluster.stalled == {0: (), 1: ()}
    assert cluster.finished == [False, False]
    lockstep = Cluster(
        Lockstep(patience=1e9),
        topology=nx.path_graph(3),
        initial=np.zeros(2, np.float32),
        train=grow,
        rounds=3,
        faults=Faults(drop=1.0),
    ).run(until=50 * SECOND)
    assert [machine.waits_for for machine in lockstep.machines] == [(1,), (0, 2), (1,)]


@pytest.mark.slow
def test_a_run_that_only_keeps_its_timers_busy_ends():
    def script(_node, event):
        if isinstance(event, Started | TimerFired):
            yield SetTimer(name="tick", at=event.at + 1)

    assert run(script, algorithm=Waiting, rounds=1).stalled == {0: (), 1: ()}


def test_a_run_can_be_paused():
    def cluster():
        return Cluster(
            Gossip(),
            topology=nx.cycle_graph(4),
            initial=np.zeros(3, np.float32),
            train=grow_by_node,
            rounds=6,
            seed=5,
            faults=fault_matrix(4)["storm"],
        )

    whole, parts = cluster().run(), cluster()
    for seconds in (1, 2, 2, 5):
        assert parts.run(until=seconds * SECOND).now == seconds * SECOND
    assert parts.run().transcript == whole.transcript
    assert parts.run().transcript == whole.transcript, "the end is the end"


def test_the_matrix_has_what_every_algorithm_has_to_survive():
    single = [faults for name, faults in fault_matrix(4).items() if name != "storm"]
    assert {faults.drop for faults in single} == {0.0, 0.01, 0.1, 0.3, 1.0}
    assert {sum(faults.delay) / 2 / SECOND for faults in single} == {0.0, 0.2, 1.0, 4.0}
    assert {faults.echo for faults in single if faults.duplicate} == {0, 4 * SECOND}
    assert any(faults.reorder for faults in single)
    assert any(faults.corrupt for faults in single)
    splits = [split for faults in single for split in faults.partitions]
    assert {split.end - split.start for split in splits} == {20 * SECOND}
    outages = [outage for faults in single for outage in faults.outages]
    assert {(o.start > 0, o.end is not None) for o in outages} == {
        (True, False),  # leaves
        (False, True),  # joins
        (True, True),  # returns
    }
    assert any(5.0 in faults.slow.values() for faults in single)
    assert any(faults.fail_train for faults in single)


@pytest.mark.parametrize("name", fault_matrix(4))
def test_a_seed_is_a_run(name):
    def transcript(seed):
        cluster = Cluster(
            Gossip(),
            topology=nx.cycle_graph(4),
            initial=np.zeros(3, np.float32),
            train=grow_by_node,
            rounds=8,
            seed=seed,
            faults=fault_matrix(4)[name],
        )
        return cluster.run().transcript

    assert transcript(1) == transcript(1)
    if name in ("drop-0.3", "duplicate-late", "reorder", "delay-1", "not-finite", "storm"):
        assert transcript(1) != transcript(2)


def test_errors_of_a_machine_pass_unchanged():
    def script(_node, _event):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        run(script)


def test_breaches_name_algorithm_and_node():
    def script(_node, event):
        if isinstance(event, TrainDone):
            event.before[0] = 1
        return ()

    with pytest.raises(AlgorithmError, match="probe: node 0 wrote to a vector") as caught:
        run(script)
    assert caught.value.fault == "algorithm"


def test_models_of_several_tensors():
    tensors = {"w": np.ones((2, 3), np.float32), "b": np.zeros(2, np.float32)}
    cluster = run(initial=tensors)
    assert cluster.layout.size == 8
    assert [tensor.name for tensor in cluster.layout.shared] == ["w", "b"]
    assert cluster.models.shape == (2, 8)


def test_sites_are_checked():
    vector = np.zeros(3, np.float32)
    site = make_site(topology=nx.star_graph(3), initial=vector, node=2, seed=7)
    assert site.neighbors == (0,)
    assert not site.initial.flags.writeable
    assert vector.flags.writeable
    assert site.seeds.seeds.run == 7
    with pytest.raises(ConfigurationError, match="numbered from 0"):
        make_site(topology=nx.grid_2d_graph(2, 2), initial=vector)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop": 1.5}, "drop is a probability"),
        ({"delay": (2, 1)}, "least, most"),
        ({"uplink": 0}, "at least 1 ns"),
        ({"outages": (Outage(0, 5, 5),)}, "contains no time"),
        ({"partitions": (Split(-1, 5, frozenset()),)}, "contains no time"),
    ],
)
def test_faults_are_checked(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        Faults(**settings)


def test_faults_print_what_is_unusual():
    assert str(Faults()) == "Faults()"
    assert str(Faults(drop=0.5, slow={1: 2.0})) == "Faults(drop=0.5, slow={1: 2.0})"
