"""The engine: what happens, when, and in which order, with machines that follow a script."""

from dataclasses import dataclass, field

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    SECOND,
    AlgorithmError,
    ConfigurationError,
    DropQueued,
    Halt,
    LinkIdle,
    PeerDown,
    PeerUp,
    Received,
    Report,
    RuntimeFault,
    Seeds,
    Send,
    SetTimer,
    Started,
    Stopped,
    TimerFired,
    Train,
    TrainDone,
    TrainFailed,
)
from flwr_decentral.core.conduct import Tally, counters
from flwr_decentral.sim.engine import Observer
from flwr_decentral.sim.measures import average_model, consensus_distance
from flwr_decentral.sim.trainer import FunctionTrainer

from .scripted import SLOW, Idle, Scripted, add_one, make, note, seen, train_on

LINKS = (PeerUp, PeerDown)


def at_start(**commands):
    """Make a script: answer Started on node 0 with ``n0``, on node 1 with ``n1``, and so on."""

    def script(machine, event):
        if isinstance(event, Started):
            yield from commands.get(f"n{machine.node}", ())

    return script


def both(*scripts):
    """Make a script of several."""

    def script(machine, event):
        for each in scripts:
            yield from each(machine, event) or ()

    return script


def sends(*receivers):
    return [Send(to=to, message=note(step)) for step, to in enumerate(receivers)]


def test_every_machine_has_a_site_of_its_own():
    engine = make(at_start(), graph=nx.path_graph(3), seed=5, rounds=1)
    sites = [machine.site for machine in engine.machines]
    assert [site.neighbors for site in sites] == [(1,), (0, 2), (1,)]
    assert [site.seeds for site in sites] == [Seeds(5).of(node) for node in range(3)]
    assert all(model is engine.plan.initial for model in engine.models())


# --- order ----------------------------------------------------------------------------------------


def test_order_of_what_happens_to_a_node_at_one_time():
    script = at_start(
        n0=[SetTimer(name="alarm", at=SECOND), *sends(2), Train(round=1, model=np.zeros(3))],
        n1=sends(0),
    )
    engine = make(
        Idle(script=script),
        nodes=4,
        duration=1,
        uplink=[SLOW, None, None, None],
        latency=1,
        outages=[(3, 1, 2)],
    )
    engine.run()
    assert seen(engine, 0) == [
        "0 Started",
        "1 TrainDone 1",
        "1 PeerDown 3",
        "1 Received 1",
        "1 LinkIdle",
        "1 TimerFired alarm",
        "1 Stopped",
    ]


def test_what_was_caused_first_happens_first():
    order = []

    def script(machine, event):
        if isinstance(event, Started) and machine.node:
            yield from sends(0, 0)
        if isinstance(event, Received):
            order.append((event.source, event.message.step))

    make(script, nodes=4, duration=1).run()
    assert order == [(source, step) for source in (1, 2, 3) for step in (0, 1)]


def test_nobody_receives_before_everybody_has_started():
    engine = make(at_start(n0=sends(1, 2)), nodes=3, duration=1)
    engine.run()
    assert seen(engine, 2) == ["0 Started", "0 Received 0", "1 Stopped"]


def test_a_machine_is_stepped_with_what_the_last_command_changed():
    """One mutation, then drain: commands are carried out in order, before the next event."""

    def script(machine, event):
        if isinstance(event, Started) and machine.node == 0:
            yield from sends(1, 1, 1)
            yield DropQueued()
            yield Send(to=1, message=note(9))

    engine = make(script, duration=1)
    engine.run()
    assert [e.message.step for e in engine.machines[1].seen if isinstance(e, Received)] == [9]
    assert engine.traffic.dropped == 3 * 64


# --- training -------------------------------------------------------------------------------------


@dataclass
class Recorder(FunctionTrainer):
    """Keep the tasks."""

    given: list = field(default_factory=list)

    def dispatch(self, task, model):
        self.given.append((task, model))
        super().dispatch(task, model)


def test_training_starts_from_the_vector_of_the_command_and_returns_a_new_one():
    vectors = []

    def script(machine, event):
        if isinstance(event, Started | TrainDone):
            machine.model = np.full(3, len(vectors), np.float32)
            vectors.append(machine.model)
            yield Train(round=len(vectors), model=machine.model)
            machine.model = np.full(3, 99, np.float32)  # the model moves on meanwhile

    engine = make(script, nodes=1, rounds=3)
    engine.run()
    done = [event for event in engine.machines[0].seen if isinstance(event, TrainDone)]
    assert [event.before is vector for event, vector in zip(done, vectors, strict=False)] == [
        True
    ] * 3
    for number, event in enumerate(done):
        assert event.after.tolist() == [number + 1] * 3
        assert event.after is not event.before
        assert event.after.flags.writeable


def test_tasks_say_when_they_start_and_end_and_have_seeds_of_their_own():
    trainer = Recorder(add_one)
    make(train_on, rounds=2, factors=[1, 2.5], trainer=trainer).run()
    tasks = [task for task, _ in trainer.given]
    assert [(t.node, t.round, t.at / SECOND, t.due / SECOND) for t in tasks] == [
        (0, 1, 0, 1),
        (1, 1, 0, 2.5),
        (0, 2, 1, 2),
        (1, 2, 2.5, 5),
    ]
    assert len({task.seed for task in tasks}) == 4


def test_each_node_trains_its_rounds_and_the_last_one_ends_the_run():
    engine = make(train_on, nodes=3, rounds=4, factors=[1, 2, 3])
    engine.run()
    assert engine.trainings == 12
    assert engine.now == 12 * SECOND
    assert [model.tolist() for model in engine.models()] == [[4] * 3] * 3


def test_rounds_may_be_skipped():
    def script(machine, event):
        if isinstance(event, Started | TrainDone):
            yield Train(round=getattr(event, "round", 0) + 2, model=machine.model)

    engine = make(script, nodes=1, rounds=5)
    engine.run()
    assert seen(engine, 0, TrainDone) == ["1 TrainDone 2", "2 TrainDone 4"]


def test_a_node_that_has_done_its_rounds_still_receives():
    def script(machine, event):
        yield from train_on(machine, event)
        if isinstance(event, TrainDone) and machine.node == 1:
            yield from sends(0)

    engine = make(script, rounds=1, factors=[1, 3])
    engine.run()
    assert seen(engine, 0, TrainDone, Received) == ["1 TrainDone 1"]
    assert engine.traffic.lost == 64, "what is under way at the end is lost"
    engine = make(script, rounds=2, factors=[1, 3])
    engine.run()
    assert seen(engine, 0, Received) == ["3 Received 1"]


def test_a_duration_ends_the_run():
    trainer = Recorder(add_one)
    engine = make(train_on, duration=5, factors=[1, 2], trainer=trainer)
    engine.run()
    assert engine.now == 5 * SECOND
    assert seen(engine, 0, TrainDone)[-1] == "5 TrainDone 5", "its last moment counts"
    assert seen(engine, 1, TrainDone) == ["2 TrainDone 1", "4 TrainDone 2"]
    assert max(task.due for task, _ in trainer.given) == 5 * SECOND, "nothing is trained in vain"
    assert not trainer.tasks


def test_rounds_or_duration_whichever_is_over_first():
    assert ends(rounds=3, duration=10) == (3, 3)
    assert ends(rounds=10, duration=3) == (3, 3)
    assert ends(rounds=3, duration=3) == (3, 3)


def ends(**bounds):
    engine = make(train_on, nodes=1, **bounds)
    engine.run()
    return engine.now / SECOND, engine.trainings


def test_a_run_without_an_end_is_refused():
    with pytest.raises(ConfigurationError, match="rounds or a duration"):
        make(train_on)
    with pytest.raises(ConfigurationError, match="node 1 take no time"):
        make(train_on, duration=1, factors=[1, 1e-12])
    with pytest.raises(ConfigurationError, match="node 0 take no time"):
        make(train_on, duration=1, seconds=0)


def test_rounds_that_take_no_time_happen_in_order():
    engine = make(train_on, nodes=2, rounds=3, seconds=0)
    engine.run()
    assert engine.now == 0
    for node in range(2):
        assert seen(engine, node, TrainDone) == [f"0 TrainDone {r}" for r in (1, 2, 3)]
    assert engine.idle_share == 0


def test_a_halted_node_does_not_hold_up_the_run():
    def script(machine, event):
        if machine.node == 0:
            yield from train_on(machine, event)
        elif isinstance(event, Started):
            yield Halt(reason="nothing to do")
            yield Halt(reason="really nothing")
        if isinstance(event, TrainDone):
            yield from sends(1)

    engine = make(script, rounds=2)
    engine.run()
    assert engine.now == 2 * SECOND
    assert seen(engine, 1, Received) == ["1 Received 0"], "it still receives"


def test_a_run_ends_when_all_have_halted():
    engine = make(at_start(n0=[Halt(reason="")], n1=[Halt(reason="")]), rounds=9)
    engine.run()
    assert (engine.now, engine.trainings) == (0, 0)


# --- breaches of the contract ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "breach"),
    [
        ([1, 2], "node 1 to train round 2 while round 1 is in flight"),
        ([1, 1], "round 1 while round 1 is in flight"),
        ([0], "round 0 after round 0"),
        ([99, 100], "round 100 while round 99 is in flight"),
    ],
)
def test_trainings_one_at_a_time(rounds, breach):
    commands = [Train(round=number, model=np.zeros(3, np.float32)) for number in rounds]
    with pytest.raises(AlgorithmError, match=f"scripted asks .*{breach}"):
        make(at_start(n1=commands), rounds=9).run()


@pytest.mark.parametrize("step", [0, -1])
def test_rounds_ascend(step):
    def script(machine, event):
        if isinstance(event, Started | TrainDone):
            yield Train(round=getattr(event, "round", 5) + step, model=machine.model)

    with pytest.raises(AlgorithmError, match=rf"node 0 to train round {5 + 2 * step} after round"):
        make(script, rounds=9).run()


def test_no_training_after_a_halt():
    with pytest.raises(AlgorithmError, match="node 0 to train round 1 after it has halted"):
        make(both(at_start(n0=[Halt(reason="")]), train_on), rounds=9).run()


@pytest.mark.parametrize("stranger", [0, 2, 7, -1])
def test_messages_to_neighbors_only(stranger):
    engine = make(at_start(n0=sends(stranger)), graph=nx.path_graph(3), rounds=1)
    with pytest.raises(
        AlgorithmError, match=f"scripted on node 0 sends to {stranger}, which is no"
    ):
        engine.run()


# --- failures -------------------------------------------------------------------------------------


def failing(nodes=2, rounds=6, **failures):
    """Make an engine whose node i fails in the rounds that ``n<i>`` lists."""

    def train(task, vector):
        if task.round in failures.get(f"n{task.node}", ()):
            raise ValueError(f"no data in round {task.round}")
        return vector

    return make(train_on, nodes=nodes, rounds=rounds, function=train)


@pytest.mark.parametrize("rounds", [[1], [1, 2], [1, 2, 4, 5], [2, 4, 6]])
def test_failures_are_told_and_counted(rounds):
    engine = failing(n0=rounds)
    engine.run()
    failed = [event for event in engine.machines[0].seen if isinstance(event, TrainFailed)]
    assert [(event.at, event.round) for event in failed] == [(r * SECOND, r) for r in rounds]
    assert failed[0].reason == f"ValueError: no data in round {rounds[0]}"
    assert engine.tallies["training-failed"].count == len(rounds)
    assert engine.trainings == 12


def test_three_failures_in_a_row_on_a_node_end_the_run():
    engine = failing(n1=[2, 3, 4])
    with pytest.raises(RuntimeFault, match=r"3 times in a row on node 1, last in round 4:\nValueE"):
        engine.run()
    assert engine.now == 4 * SECOND


def test_failures_of_all_nodes_in_their_first_round_end_the_run():
    failing(nodes=3, n0=[1], n2=[1]).run()
    failing(nodes=3, n0=[1], n1=[2], n2=[1]).run()
    with pytest.raises(RuntimeFault, match=r"all 3 nodes in their first round, on node 2:\nValueE"):
        failing(nodes=3, n0=[1], n1=[1], n2=[1]).run()
    with pytest.raises(RuntimeFault, match="all 1 nodes"):
        failing(nodes=1, n0=[1]).run()


# --- the observer ---------------------------------------------------------------------------------


class Watcher(Observer):
    def __init__(self):
        self.log = []

    def trained(self, engine, node, round, outcome):
        self.log.append((engine.now / SECOND, node, round, float(outcome.model[0])))

    def barrier(self, engine, round):
        models = [float(model[0]) for model in engine.models()]
        self.log.append((engine.now / SECOND, "barrier", round, models))


def test_barriers_are_at_mean_rounds():
    watcher = Watcher()
    make(train_on, nodes=3, rounds=4, factors=[1, 1, 3.5], barrier_every=1, observer=watcher).run()
    assert [entry for entry in watcher.log if entry[1] == "barrier"] == [
        (2, "barrier", 1, [2, 1, 0]),
        (3, "barrier", 2, [3, 3, 0]),
        (4, "barrier", 3, [4, 4, 1]),
        (14, "barrier", 4, [4, 4, 4]),
    ]
    assert watcher.log[0] == (1, 0, 1, 1)
    assert len(watcher.log) == 12 + 4


@pytest.mark.parametrize(("every", "barriers"), [(0, []), (2, [(2, 2), (4, 4)]), (3, [(3, 3)])])
def test_barriers_every_few_rounds(every, barriers):
    watcher = Watcher()
    make(train_on, rounds=5, barrier_every=every, observer=watcher).run()
    found = [(at, round) for at, kind, round, _ in watcher.log if kind == "barrier"]
    assert found == barriers


def test_a_round_is_done_when_the_next_one_is_asked_for():
    def exchange(machine, event):
        if isinstance(event, TrainDone):
            yield SetTimer(name="exchanged", at=event.at + SECOND // 2)
        elif isinstance(event, Started | TimerFired):
            machine.round = getattr(machine, "round", 0) + 1
            yield Train(round=machine.round, model=machine.model)

    watcher = Watcher()
    make(exchange, rounds=2, barrier_every=1, observer=watcher).run()
    found = [(at, round) for at, kind, round, _ in watcher.log if kind == "barrier"]
    assert found == [(1.5, 1), (3, 2)]


# --- timers ---------------------------------------------------------------------------------------


def timers(*settings, **scenario):
    """Set timers ``(name, seconds)`` at the start, one after the other; return what fires."""
    commands = [
        SetTimer(name=name, at=None if at is None else round(at * SECOND)) for name, at in settings
    ]
    engine = make(at_start(n0=commands), duration=9, **scenario)
    engine.run()
    return seen(engine, 0, TimerFired, *LINKS)


def test_timers_fire_when_they_are_due():
    assert timers(("late", 3), ("early", 0.25)) == ["0.25 TimerFired early", "3 TimerFired late"]
    assert timers(("edge", 9), ("beyond", 9.000000001)) == ["9 TimerFired edge"]


def test_setting_a_timer_again_moves_it():
    assert timers(("a", 3), ("b", 4), ("a", 5)) == ["4 TimerFired b", "5 TimerFired a"]
    assert timers(("a", 3), ("a", 1)) == ["1 TimerFired a"]
    assert timers(("a", 3), ("a", 3)) == ["3 TimerFired a"]


def test_timers_can_be_cancelled():
    assert timers(("a", 3), ("b", 3), ("a", None), ("never-set", None)) == ["3 TimerFired b"]
    assert timers(("a", 3), ("a", None), ("a", 4)) == ["4 TimerFired a"]


def test_a_timer_of_the_past_fires_at_once():
    def script(_, event):
        if isinstance(event, Started):
            yield SetTimer(name="first", at=2 * SECOND)
        if isinstance(event, TimerFired) and event.name == "first":
            yield SetTimer(name="second", at=SECOND)

    engine = make(script, nodes=1, duration=9)
    engine.run()
    assert seen(engine, 0, TimerFired) == ["2 TimerFired first", "2 TimerFired second"]


def test_timers_wait_for_the_end_of_an_outage():
    assert timers(("a", 3), ("b", 1), outages=[(0, 1, 4)]) == [
        "4 PeerDown 1",
        "4 PeerUp 1",
        "4 TimerFired b",
        "4 TimerFired a",
    ]
    assert timers(("a", 3), outages=[(0, 1, 4), (0, 4.5, 5)])[-3] == "4 TimerFired a"
    assert timers(("a", 3), outages=[(0, 1, None)]) == []


# --- links ----------------------------------------------------------------------------------------


def test_messages_take_uplink_and_latency():
    engine = make(at_start(n0=sends(1, 2, 1)), nodes=3, duration=9, uplink=SLOW, latency=0.25)
    engine.run()
    assert seen(engine, 1, Received) == ["1.25 Received 0", "3.25 Received 0"]
    assert seen(engine, 2, Received) == ["2.25 Received 0"]


def test_a_downlink_is_taken_up_in_the_order_of_first_bytes():
    latency = [[0, 0, 3], [0, 0, 1], [0, 0, 0]]
    script = at_start(n0=sends(2), n1=sends(2))
    engine = make(script, nodes=3, duration=9, downlink=SLOW, latency=latency)
    engine.run()
    assert seen(engine, 2, Received) == ["2 Received 1", "4 Received 0"]


def test_messages_are_lost():
    engine = make(at_start(n0=sends(*[1] * 200)), duration=1, loss=0.5)
    engine.run()
    arrived = len(seen(engine, 1, Received))
    assert 60 < arrived < 140
    assert engine.traffic.arrived == 64 * arrived
    assert engine.traffic.lost == 64 * (200 - arrived)


def test_an_uplink_that_falls_idle_is_told_of_once():
    engine = make(Idle(script=at_start(n0=sends(1, 1))), duration=9, uplink=SLOW)
    engine.run()
    assert seen(engine, 0, LinkIdle) == ["2 LinkIdle"]
    assert seen(engine, 1, LinkIdle) == []


def test_an_outbox_can_be_filled_again_as_it_runs_empty():
    def script(machine, event):
        if isinstance(event, Started | LinkIdle) and machine.node == 0:
            yield from sends(1)

    engine = make(Idle(script=script), duration=3, uplink=SLOW)
    engine.run()
    assert seen(engine, 0, LinkIdle) == ["1 LinkIdle", "2 LinkIdle", "3 LinkIdle"]
    assert seen(engine, 1, Received) == ["1 Received 0", "2 Received 0", "3 Received 0"]


def test_a_dropped_queue_leaves_what_is_under_way():
    script = at_start(n0=[*sends(1, 1, 2, 1), SetTimer(name="drop", at=SECOND // 2)])

    def drop(_, event):
        if isinstance(event, TimerFired):
            yield DropQueued(to=1)

    engine = make(Idle(script=both(script, drop)), nodes=3, duration=9, uplink=SLOW)
    engine.run()
    assert seen(engine, 1, Received) == ["1 Received 0"]
    assert seen(engine, 2, Received) == ["2 Received 0"]
    assert seen(engine, 0, LinkIdle) == ["2 LinkIdle"]
    assert engine.traffic.dropped == 2 * 64


def test_an_uplink_that_broke_off_does_not_fall_idle():
    engine = make(
        Idle(script=at_start(n0=sends(1, 1))), duration=9, uplink=SLOW, outages=[(0, 0.25, 0.5)]
    )
    engine.run()
    assert seen(engine, 0, LinkIdle) == []


def test_idle_uplinks_are_told_of_only_where_that_is_wanted():
    engine = make(at_start(n0=sends(1)), duration=9, uplink=SLOW)
    engine.run()
    assert seen(engine, 0, LinkIdle) == []


def test_an_unlimited_uplink_never_falls_idle():
    engine = make(Idle(script=at_start(n0=sends(1))), duration=9)
    engine.run()
    assert seen(engine, 0, LinkIdle) == []


# --- nodes that come and go -----------------------------------------------------------------------


def test_an_outage_as_seen_by_all():
    engine = make(train_on, nodes=3, duration=5.5, outages=[(1, 2, 4)])
    engine.run()
    for node in (0, 2):
        assert seen(engine, node, *LINKS) == ["2 PeerDown 1", "4 PeerUp 1"]
    assert seen(engine, 1) == [
        "0 Started",
        "1 TrainDone 1",
        "2 TrainDone 2",  # what is done as it goes down has made it
        "4 PeerDown 0",
        "4 PeerDown 2",
        "4 PeerUp 0",
        "4 PeerUp 2",
        "5 TrainDone 3",
        "5.5 Stopped",
    ]


def test_training_stands_still_during_an_outage():
    engine = make(train_on, nodes=1, rounds=2, outages=[(0, 0.25, 2), (0, 2.5, 3)])
    engine.run()
    assert seen(engine, 0, TrainDone) == ["3.25 TrainDone 1", "4.25 TrainDone 2"]
    assert engine.idle_share == pytest.approx(1 - 2 / 4.25)


def test_a_returning_node_sees_who_is_there_now():
    engine = make(train_on, nodes=4, duration=9, outages=[(0, 2, 4), (1, 3, 5), (2, 1, 3)])
    engine.run()
    assert seen(engine, 0, *LINKS) == [
        "1 PeerDown 2",
        "4 PeerDown 1",
        "4 PeerDown 3",
        "4 PeerUp 2",
        "4 PeerUp 3",
        "5 PeerUp 1",
    ]
    assert engine.machines[0].up == {1, 2, 3}


def test_nodes_that_return_together_meet():
    engine = make(train_on, nodes=3, duration=9, outages=[(0, 1, 2), (1, 1, 2)])
    engine.run()
    assert seen(engine, 0, *LINKS) == ["2 PeerDown 1", "2 PeerDown 2", "2 PeerUp 1", "2 PeerUp 2"]
    assert seen(engine, 1, *LINKS) == ["2 PeerDown 0", "2 PeerDown 2", "2 PeerUp 0", "2 PeerUp 2"]
    assert seen(engine, 2, *LINKS) == ["1 PeerDown 0", "1 PeerDown 1", "2 PeerUp 0", "2 PeerUp 1"]


def test_a_node_that_joins_late_starts_late():
    engine = make(train_on, nodes=3, rounds=2, outages=[(1, 0, 1.5), (2, 0, 3)])
    engine.run()
    assert engine.machines[0].seen[0] == Started(at=0, up=())
    assert engine.machines[1].seen[0] == Started(at=1_500_000_000, up=(0,))
    assert engine.machines[2].seen[0] == Started(at=3 * SECOND, up=(0, 1))
    assert seen(engine, 0, *LINKS) == ["1.5 PeerUp 1", "3 PeerUp 2"]
    assert seen(engine, 2, TrainDone) == ["4 TrainDone 1", "5 TrainDone 2"]


def test_a_joining_node_starts_before_it_receives():
    def script(_, event):
        if isinstance(event, PeerUp):
            yield from sends(event.peer)

    engine = make(script, duration=3, outages=[(1, 0, 1)])
    engine.run()
    assert seen(engine, 1) == ["1 Started", "1 Received 0", "3 Stopped"]


def test_a_node_that_leaves_for_good_does_not_hold_up_the_run():
    trainer = Recorder(add_one)
    engine = make(train_on, nodes=3, rounds=5, outages=[(1, 2.5, None)], trainer=trainer)
    engine.run()
    assert engine.now == 5 * SECOND
    assert seen(engine, 0, *LINKS) == ["2.5 PeerDown 1"]
    assert seen(engine, 1, TrainDone) == ["1 TrainDone 1", "2 TrainDone 2"]
    assert sum(task.node == 1 for task, _ in trainer.given) == 2, "nothing is trained in vain"


def test_a_run_ends_when_all_have_left_or_never_came():
    engine = make(train_on, rounds=9, outages=[(0, 1.5, None), (1, 0, None)])
    engine.run()
    assert engine.now == 1.5 * SECOND
    assert seen(engine, 1) == [], "who never started is not stopped either"


def test_partitions():
    engine = make(train_on, nodes=3, duration=9, partitions=[([[0]], 1, 3), ([[0, 1]], 2, 4)])
    engine.run()
    assert seen(engine, 0, *LINKS) == ["1 PeerDown 1", "1 PeerDown 2", "3 PeerUp 1", "4 PeerUp 2"]
    assert seen(engine, 1, *LINKS) == ["1 PeerDown 0", "2 PeerDown 2", "3 PeerUp 0", "4 PeerUp 2"]
    assert len(seen(engine, 0, TrainDone)) == 9, "all nodes go on training"


def test_a_partition_from_the_start():
    engine = make(train_on, nodes=3, rounds=2, partitions=[([[0, 1]], 0, 1)])
    engine.run()
    assert [engine.machines[node].seen[0].up for node in range(3)] == [(1,), (0,), ()]
    assert seen(engine, 2, *LINKS) == ["1 PeerUp 0", "1 PeerUp 1"]


# --- messages on links that break -----------------------------------------------------------------


@pytest.mark.parametrize("node", [0, 1])
def test_what_is_under_way_when_an_end_goes_down_is_lost(node):
    script = at_start(n0=sends(1), n2=sends(1))
    engine = make(script, nodes=3, duration=9, latency=3, outages=[(node, 1, 2)])
    engine.run()
    assert seen(engine, 1, Received) == (["3 Received 2"] if node == 0 else [])
    assert engine.traffic.lost == (64 if node == 0 else 128)


def test_what_a_node_has_queued_is_dropped_as_it_goes_down():
    def script(machine, event):
        if isinstance(event, Started | PeerUp) and machine.node == 0:
            yield from sends(1, 1, 1)

    engine = make(script, duration=20, uplink=SLOW, outages=[(0, 1.5, 1.75)])
    engine.run()
    # One made it, one was cut, one was dropped; the uplink is free for the next three.
    times = ["1 Received 0", *(f"{1.75 + k} Received 0" for k in (1, 2, 3))]
    assert seen(engine, 1, Received) == times
    assert (engine.traffic.lost, engine.traffic.dropped) == (64, 64)


def test_what_is_queued_for_a_lost_peer_is_dropped():
    script = at_start(n0=sends(1, 2, 1, 2, 1))
    engine = make(script, nodes=3, duration=20, uplink=SLOW, outages=[(1, 1.5, 2)])
    engine.run()
    assert seen(engine, 1, Received) == ["1 Received 0"]
    assert seen(engine, 2, Received) == ["2 Received 0", "3 Received 0"]
    assert (engine.traffic.lost, engine.traffic.dropped) == (0, 2 * 64)


def test_a_returning_node_sends_nothing_on_the_links_it_had():
    def script(machine, event):
        if isinstance(event, PeerDown) and machine.node == 0 and event.peer == 1:
            yield from sends(2, 2)
        if isinstance(event, PeerUp) and machine.node == 0 and event.peer == 2:
            yield Send(to=2, message=note(7))

    engine = make(script, nodes=3, duration=9, uplink=SLOW, outages=[(0, 1, 2)])
    engine.run()
    received = [e.message.step for e in engine.machines[2].seen if isinstance(e, Received)]
    assert received == [7]
    assert engine.traffic.dropped == 2 * 64


def test_what_is_sent_to_a_peer_that_is_away_is_dropped():
    script = at_start(n0=[SetTimer(name="go", at=SECOND)])

    def go(_, event):
        if isinstance(event, TimerFired):
            yield from sends(1, 2)

    scenario = {"outages": [(1, 0.5, 4)], "partitions": [([[0, 1]], 0.5, 4)]}
    engine = make(both(script, go), nodes=3, duration=9, **scenario)
    engine.run()
    assert engine.traffic.dropped == 2 * 64
    assert engine.traffic.sent == 0


def test_what_is_sent_in_the_moment_of_an_outage_is_lost():
    """Training ends first; then the node goes down, with a message just put on its uplink."""

    def script(machine, event):
        yield from train_on(machine, event)
        if isinstance(event, Started) and machine.node == 0:
            yield from sends(1, 1)

    engine = make(script, rounds=3, uplink=SLOW, latency=0.5, outages=[(0, 1, 1.25)])
    engine.run()
    assert seen(engine, 1, Received) == []
    assert engine.traffic.sent == engine.traffic.lost + engine.traffic.arrived


def test_a_broken_downlink_is_idle_when_its_node_is_back():
    def script(machine, event):
        if isinstance(event, Started | PeerUp) and machine.node == 0:
            yield from sends(1, 1) if isinstance(event, Started) else sends(1)

    engine = make(script, duration=9, downlink=SLOW, outages=[(1, 0.25, 0.5)])
    engine.run()
    assert seen(engine, 1, Received) == ["1.5 Received 0"]


# --- stalls ---------------------------------------------------------------------------------------


def stalling(script, **scenario):
    return make(Scripted(script=script, stalls=True), **scenario)


def wait_for_all(machine, event):
    """Train a round, send, and wait for a message of every neighbor, without end."""
    if isinstance(event, Started):
        machine.trained, machine.heard = 0, dict.fromkeys(machine.site.neighbors, 0)
        yield Train(round=1, model=machine.model)
    if isinstance(event, Received):
        machine.heard[event.source] += 1
    if isinstance(event, TrainDone):
        machine.trained = event.round
        yield from sends(*machine.site.neighbors)
    if machine.trained and (isinstance(event, TrainDone) or machine.waits_for):
        missing = [peer for peer, count in machine.heard.items() if count < machine.trained]
        machine.waits_for = tuple(missing)
        if not missing:
            yield Train(round=machine.trained + 1, model=machine.model)


def test_a_stall_names_who_waits_for_whom():
    # What the nodes send at 1 s is lost between 1 and 2, and with it all that would have followed.
    engine = stalling(
        wait_for_all, graph=nx.path_graph(3), rounds=5, latency=1, partitions=[([[2]], 1.5, 1.75)]
    )
    with pytest.raises(RuntimeFault) as error:
        engine.run()
    text = str(error.value)
    assert "stalled at 4.000 s of virtual time" in text
    assert "node 1 (round 1) waits for 2; node 2 (round 1) waits for 1" in text
    assert "node 0 (round 2) waits for 1" in text
    assert "more" not in text


def test_a_stall_names_the_first_few_of_those_that_are_not_done():
    with pytest.raises(RuntimeFault) as error:
        stalling(at_start(n3=[Halt(reason="")]), nodes=13, rounds=1).run()
    text = str(error.value)
    assert "node 2 (round 0) waits for nobody it can name; node 4 (round 0)" in text
    assert "node 8 (round 0) waits for nobody it can name and 4 more." in text


def test_a_stalled_run_of_a_given_duration_fails_too():
    def script(machine, event):
        if isinstance(event, Started):
            yield Train(round=1, model=machine.model)

    with pytest.raises(RuntimeFault, match=r"stalled at 1\.000 s"):
        stalling(script, duration=9).run()


def test_who_waits_for_a_training_beyond_the_end_has_not_stalled():
    engine = stalling(wait_for_all, duration=5, factors=[1, 3.5])
    engine.run()
    assert engine.now == 5 * SECOND
    assert engine.trainings == 3


# --- the account ----------------------------------------------------------------------------------


def test_reports_are_added_up():
    reports = [
        Report(name="staleness", count=2, total=3.5),
        Report(name="staleness", count=1, total=1.0, nbytes=10),
        Report(name="useless", nbytes=5),
    ]
    engine = make(at_start(n0=reports, n1=reports[:1]), duration=1)
    engine.run()
    assert counters(engine.tallies) == {
        "staleness": {"count": 5, "total": 8.0, "nbytes": 10},
        "useless": {"count": 1, "total": 0.0, "nbytes": 5},
    }
    assert engine.tallies["useless"] == Tally(1, 0.0, 5)
    assert engine.wasted_bytes == 15


def test_the_last_reports_count_and_nothing_else_of_the_last_answer():
    def script(machine, event):
        if isinstance(event, Stopped):
            yield Report(name="left-over", nbytes=3)
            yield from sends(1 - machine.node)
            yield Train(round=9, model=machine.model)
            yield SetTimer(name="late", at=0)

    engine = make(both(train_on, script), rounds=1)
    engine.run()
    assert engine.tallies["left-over"] == Tally(2, 0.0, 6)
    assert (engine.traffic.sent, engine.trainings) == (0, 2)


def test_traffic_by_its_fate():
    # One arrives, one is lost with the outage, one is under way at the end, two never start.
    engine = make(
        at_start(n0=sends(1, 1, 1, 1, 1)), duration=2.5, uplink=SLOW, outages=[(1, 1.25, None)]
    )
    engine.run()
    assert vars(engine.traffic) == {
        "sent": 2 * 64,
        "arrived": 64,
        "lost": 64,
        "dropped": 3 * 64,
    }
    engine = make(at_start(n0=sends(1, 1, 1, 1, 1)), duration=2.5, uplink=SLOW)
    engine.run()
    assert vars(engine.traffic) == {
        "sent": 3 * 64,
        "arrived": 2 * 64,
        "lost": 64,
        "dropped": 2 * 64,
    }
    assert engine.wasted_bytes == 64


def test_idle_share():
    engine = make(train_on, rounds=3, factors=[1, 3])
    assert engine.idle_share == 0, "no time has passed"
    engine.run()
    assert engine.idle_share == pytest.approx(1 - (3 + 9) / (2 * 9))


def test_consensus_distance_is_the_mean_squared_distance_to_the_average():
    models = [np.array(values, np.float32) for values in ([3, 0], [-1, 0], [1, 6])]
    assert average_model(models).tolist() == [1, 2]
    assert consensus_distance(models) == pytest.approx(((4 + 4) + (4 + 4) + 16) / 3)
    assert consensus_distance(iter(models)) == consensus_distance(models)
    assert consensus_distance(models[:1]) == 0
    with pytest.raises(ValueError, match="no model"):
        average_model([])


def test_averages_are_in_double_precision():
    models = [np.array([16777216.0], np.float32), np.array([1.0], np.float32)] * 2
    assert average_model(models).tolist() == [16777217 / 2]
    assert models[0].tolist() == [16777216.0], "models are left alone"
