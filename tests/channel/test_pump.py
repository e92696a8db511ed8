"""The pump: one event, all commands, the next event; and what segments do to training."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.channel.pump import Pump
from flwr_decentral.channel.rounds import Segment
from flwr_decentral.channel.trainer import Outcome
from flwr_decentral.core import (
    Algorithm,
    AlgorithmError,
    Capabilities,
    ConfigurationError,
    DropQueued,
    Halt,
    LinkIdle,
    Machine,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    RuntimeFault,
    Send,
    SetTimer,
    Started,
    Stopped,
    TimerFired,
    Train,
    TrainDone,
    TrainFailed,
)
from flwr_decentral.testing import make_site
from flwr_decentral.testing.clocks import ManualClock

SIZE = 3
ALWAYS = Segment(last_round=10**9)


@dataclass(frozen=True, kw_only=True)
class Scripted(Algorithm):
    """Answer what ``script(machine, event)`` yields."""

    name = "scripted"

    script: Callable

    def machine(self, site):
        return ScriptedMachine(site, self.script)


class Idle(Scripted):
    capabilities = Capabilities(link_idle=True)


class ScriptedMachine(Machine):
    def __init__(self, site, script):
        super().__init__(site)
        self.script, self.seen = script, []

    def step(self, event):
        self.seen.append(event)
        super().step(event)
        return list(self.script(self, event) or ())

    def on_train_done(self, event):
        self.model = event.after
        return ()

    def on_train_failed(self, event):
        return ()


def train_on(machine, event):
    """Train one round after the other."""
    if isinstance(event, Started):
        yield Train(round=1, model=machine.model)
    elif isinstance(event, TrainDone | TrainFailed):
        yield Train(round=event.round + 1, model=machine.model)


def quiet(machine, event):
    """Do nothing."""


class Link:
    """A transport that keeps what it is given, and calls back as it is told to."""

    def __init__(self, up=()):
        self.up, self.queue = set(up), []
        self.on_send = lambda to, message: None

    def send(self, to, message):
        if to not in self.up:
            return False
        self.queue.append((to, message))
        self.on_send(to, message)
        return True

    def drop(self, to=None):
        dropped = [message for each, message in self.queue if to in (None, each)]
        self.queue = [item for item in self.queue if to not in (None, item[0])]
        return dropped


class Desk:
    """A trainer whose tasks end when the test says so."""

    def __init__(self):
        self.tasks, self.cancelled, self.instant = [], 0, False

    def start(self, task, done):
        self.tasks.append((task, done))
        if self.instant:
            self.finish()

    def cancel(self):
        self.cancelled += 1

    def finish(self, outcome=None):
        task, done = self.tasks[-1]
        done(outcome or Outcome(model=task.model + np.float32(1)))

    @property
    def rounds(self):
        return [task.round for task, _ in self.tasks]


class Rig:
    """One node of a path of three, its middle one, and everything around it."""

    def __init__(self, script=quiet, *, kind=Scripted, up=(0, 2), graph=None, start=True):
        self.graph = graph or nx.path_graph(3)
        self.link, self.desk, self.clock, self.lines = Link(up), Desk(), ManualClock(), []
        self.ended = 0
        self.pump = Pump(
            kind(script=script), self.site(), self.link, self.desk, self.clock, self.lines.append
        )
        for peer in up:
            self.pump.peer_up(peer)
        if start:
            self.pump.start()

    def site(self, graph=None, *, size=SIZE, node=1):
        initial = np.zeros(size, np.float32)
        return make_site(topology=graph or self.graph, initial=initial, node=node, seed=7)

    def resume(self, segment=ALWAYS):
        self.pump.resume(segment, self._end)
        return self

    def _end(self):
        self.ended += 1

    @property
    def seen(self):
        return self.pump.machine.seen

    @property
    def kinds(self):
        return [type(event).__name__ for event in self.seen]


def note(step=0):
    return Message(kind="note", step=step)


# --- one event at a time --------------------------------------------------------------------------


def test_the_first_event_says_who_is_up():
    rig = Rig(up=(2,))
    assert rig.seen == [Started(at=0, up=(2,))]
    with pytest.raises(RuntimeFault, match="node 1 has been started already"):
        rig.pump.start()


def test_what_happens_during_a_step_comes_after_it():
    order = []

    def script(machine, event):
        order.append(("step", type(event).__name__))
        if isinstance(event, Started):
            yield Send(to=0, message=note(1))
            yield Send(to=2, message=note(2))
        order.append(("end", type(event).__name__))

    rig = Rig(script, start=False)

    def answer(to, message):
        order.append(("sent", to))
        rig.pump.received(to, note(9))
        rig.pump.peer_down(to, [])

    rig.link.on_send = answer
    rig.pump.start()
    steps = [name for what, name in order if what == "step"]
    assert steps == ["Started", "Received", "PeerDown", "Received", "PeerDown"]
    assert order[:4] == [("step", "Started"), ("end", "Started"), ("sent", 0), ("sent", 2)]


def test_times_come_from_the_clock_and_never_go_back():
    rig = Rig()
    for time in (5, 3, 9):
        rig.clock.time = time
        rig.pump.received(0, note())
    assert [event.at for event in rig.seen] == [0, 5, 5, 9]


def test_links_and_messages_are_events():
    rig = Rig()
    rig.pump.peer_down(0, [])
    rig.pump.peer_up(0)
    message = note(4)
    rig.pump.received(2, message)
    rig.pump.link_idle()
    assert rig.seen[1:] == [
        PeerDown(at=0, peer=0),
        PeerUp(at=0, peer=0),
        Received(at=0, source=2, message=message),
    ]


def test_only_who_wants_it_learns_that_the_uplink_is_idle():
    rig = Rig(kind=Idle)
    rig.pump.link_idle()
    assert rig.seen[1:] == [LinkIdle(at=0)]


def test_the_transcript_is_that_of_virtual_time():
    rig = Rig(train_on, up=(0,)).resume()
    rig.clock.time = 5
    rig.desk.finish()
    assert rig.lines[0].startswith("0 n1 Started up=0 -> Train(round=1 model=3:")
    assert rig.lines[1].startswith("5 n1 TrainDone round=1 before=3:")


# --- waiting for neighbors ------------------------------------------------------------------------


def test_a_node_begins_when_all_its_neighbors_are_up():
    rig = Rig(up=(), start=False)
    rig.pump.start(patience=10)
    rig.pump.peer_up(0)
    assert rig.seen == []
    rig.clock.time = 4
    rig.pump.peer_up(2)
    assert rig.seen == [Started(at=4, up=(0, 2))]
    rig.clock.advance(100)
    assert len(rig.seen) == 1, "patience is not needed any more"


def test_a_node_begins_without_those_who_do_not_come():
    rig = Rig(up=(2,), start=False)
    rig.pump.start(patience=10)
    rig.clock.advance(9)
    assert rig.seen == []
    rig.clock.advance(10)
    assert rig.seen == [Started(at=10, up=(2,))]
    rig.pump.peer_up(0)
    assert rig.seen[1:] == [PeerUp(at=10, peer=0)]


def test_who_began_earlier_is_heard_after_the_start():
    rig = Rig(up=(0,), start=False)
    rig.pump.received(0, note(1))
    rig.pump.start(patience=10)
    rig.pump.received(0, note(2))
    rig.pump.peer_up(2)
    assert [getattr(event, "message", None) for event in rig.seen] == [None, note(1), note(2)]


def test_what_came_over_a_link_that_has_broken_is_lost():
    rig = Rig(up=(0, 2), start=False)
    rig.pump.received(0, note(1))
    rig.pump.received(2, note(2))
    rig.pump.peer_down(0, [])
    rig.pump.start()
    assert [event.message for event in rig.seen[1:]] == [note(2)]
    assert rig.pump.metrics()["bytes-wasted"] == 64
    assert rig.pump.metrics()["bytes-received"] == 128


# --- commands -------------------------------------------------------------------------------------


def on_start(*commands):
    def script(machine, event):
        if isinstance(event, Started):
            yield from commands

    return script


def test_messages_go_to_the_transport_and_are_counted():
    rig = Rig(on_start(Send(to=0, message=note(1)), Send(to=2, message=note(2))), up=(0,))
    assert rig.link.queue == [(0, note(1))]
    metrics = rig.pump.metrics()
    assert (metrics["bytes-sent"], metrics["bytes-dropped"]) == (64, 64)


@pytest.mark.parametrize(("to", "left"), [(None, []), (0, [2])])
def test_what_is_dropped_was_not_sent(to, left):
    sends = [Send(to=peer, message=note()) for peer in (0, 2, 0)]
    rig = Rig(on_start(*sends, DropQueued(to=to)))
    assert [peer for peer, _ in rig.link.queue] == left
    metrics = rig.pump.metrics()
    assert (metrics["bytes-sent"], metrics["bytes-dropped"]) == (
        64 * len(left),
        64 * (3 - len(left)),
    )


def test_what_a_broken_link_hands_back_was_not_sent():
    rig = Rig(on_start(Send(to=0, message=note()), Send(to=2, message=note())))
    rig.pump.peer_down(0, rig.link.drop(0))
    metrics = rig.pump.metrics()
    assert (metrics["bytes-sent"], metrics["bytes-dropped"]) == (64, 64)


def test_timers_fire_move_and_are_cancelled():
    def script(machine, event):
        if isinstance(event, Started):
            yield SetTimer(name="a", at=5)
            yield SetTimer(name="b", at=7)
            yield SetTimer(name="c", at=8)
            yield SetTimer(name="a", at=9)
            yield SetTimer(name="c", at=None)
        if isinstance(event, TimerFired) and event.name == "b":
            yield SetTimer(name="past", at=0)

    rig = Rig(script)
    rig.clock.advance(20)
    fired = [(event.at, event.name) for event in rig.seen[1:]]
    assert fired == [(7, "b"), (7, "past"), (9, "a")]


def test_timers_that_are_late_when_they_are_set_fire_in_that_order():
    def script(machine, event):
        if isinstance(event, Received):
            yield SetTimer(name="a", at=9)
            yield SetTimer(name="b", at=3)

    rig = Rig(script)
    rig.clock.time = 10
    rig.pump.received(0, note())
    rig.clock.advance(10)
    assert rig.seen[2:] == [TimerFired(at=10, name="a"), TimerFired(at=10, name="b")]


def test_a_timer_that_something_before_it_has_moved_does_not_fire():
    """Both were due, and the first has moved the second while that waited in the queue."""

    def script(machine, event):
        if isinstance(event, Started):
            yield SetTimer(name="late", at=5)
            yield Send(to=0, message=note())
        if isinstance(event, Received):
            yield SetTimer(name="late", at=50)

    rig = Rig(script, start=False)

    def answer(to, message):
        rig.pump.received(0, note())
        rig.clock.time = 6
        rig.clock.ring()

    rig.link.on_send = answer
    rig.pump.start()
    rig.clock.advance(49)
    assert rig.kinds == ["Started", "Received"]
    rig.clock.advance(50)
    assert rig.seen[-1] == TimerFired(at=50, name="late")


def test_reports_add_up_by_name():
    rig = Rig(
        on_start(
            Report(name="staleness", total=3.0),
            Report(name="staleness", total=2.0),
            Report(name="stale-message", nbytes=100),
        )
    )
    metrics = rig.pump.metrics()
    assert (metrics["staleness-count"], metrics["staleness-mean"]) == (2, 2.5)
    assert metrics["stale-message-count"] == 1
    assert metrics["bytes-wasted"] == 100


# --- training -------------------------------------------------------------------------------------


def test_rounds_are_trained_with_the_seeds_of_virtual_time():
    rig = Rig(train_on).resume()
    for _ in range(3):
        rig.desk.finish()
    assert rig.desk.rounds == [1, 2, 3, 4]
    seeds = [task.seed for task, _ in rig.desk.tasks]
    assert seeds == [rig.pump.site.seeds.seeds.number(1, "train", r) for r in (1, 2, 3, 4)]
    assert rig.pump.machine.model.tolist() == [3] * SIZE


def test_a_trainer_may_be_done_at_once():
    def script(machine, event):
        if not (isinstance(event, TrainDone) and event.round == 5):
            yield from train_on(machine, event)

    rig = Rig(script)
    rig.desk.instant = True
    rig.resume()
    assert rig.desk.rounds == [1, 2, 3, 4, 5]
    assert rig.kinds == ["Started", *["TrainDone"] * 5]


def test_a_failure_is_an_event_and_two_in_a_row_are_endured():
    rig = Rig(train_on).resume()
    for outcome in (Outcome(error="x"), Outcome(error="y"), None, Outcome(error="z")):
        rig.desk.finish(outcome)
    assert rig.kinds[1:] == ["TrainFailed", "TrainFailed", "TrainDone", "TrainFailed"]
    assert rig.seen[1] == TrainFailed(at=0, round=1, reason="x")
    metrics = rig.pump.metrics()
    assert (metrics["trained-rounds"], metrics["failed-rounds"], metrics["rounds"]) == (1, 3, 4)
    assert metrics["training-failed-count"] == 3


def test_three_failures_in_a_row_end_the_pump():
    rig = Rig(train_on).resume()
    for _ in range(3):
        rig.desk.finish(Outcome(error="Traceback: no data"))
    match = "(?s)failed 3 times in a row on node 1, last in round 3.*no data"
    with pytest.raises(RuntimeFault, match=match):
        rig.pump.check()
    assert rig.ended == 1


def test_trainings_that_were_lost_are_no_failures():
    rig = Rig(train_on).resume()
    for _ in range(5):
        rig.desk.finish(Outcome(error="nobody came", lost=True))
    assert rig.kinds[1:] == ["TrainFailed"] * 5
    assert rig.pump.metrics()["training-lost-count"] == 5
    rig.pump.check()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_a_failure(value):
    rig = Rig(train_on).resume()
    rig.desk.finish(Outcome(model=np.array([0, value, 0], np.float32)))
    assert "not finite" in rig.seen[1].reason


def test_another_model_is_the_trainers_fault():
    rig = Rig(train_on).resume()
    rig.desk.finish(Outcome(model=np.zeros(9, np.float32)))
    with pytest.raises(RuntimeFault, match="node 1 returned 9 values in round 1; the model has 3"):
        rig.pump.check()


@pytest.mark.parametrize(
    ("first", "later", "breach"),
    [
        (["train 1", "train 2"], [], "round 2 while round 1 is in flight"),
        (["train 5"], ["train 4"], "round 4 after round 5"),
        (["train 5"], ["train 5"], "round 5 after round 5"),
        (["halt", "train 1"], [], "round 1 after it has halted"),
    ],
)
@pytest.mark.parametrize("paused", [True, False])
def test_a_training_that_is_not_due_ends_the_pump(first, later, breach, paused):
    def script(machine, event):
        for word in first if isinstance(event, Started) else later:
            if word == "halt":
                yield Halt(reason="enough")
            else:
                yield Train(round=int(word.split()[1]), model=machine.model)

    rig = Rig(script, start=False)
    rig.resume()
    rig.pump.start()
    if later:
        if paused:
            rig.pump.pause()
        rig.desk.finish()
    with pytest.raises(AlgorithmError, match=f"asks node 1 to train {breach}"):
        rig.pump.check()


def test_an_outcome_that_nobody_waits_for_is_nothing():
    rig = Rig(train_on).resume()
    rig.desk.finish()
    task, done = rig.desk.tasks[0]
    done(Outcome(model=task.model))
    assert rig.kinds == ["Started", "TrainDone"]


# --- segments -------------------------------------------------------------------------------------


def test_nothing_is_trained_outside_a_segment():
    rig = Rig(train_on)
    assert rig.desk.tasks == []
    rig.resume()
    assert rig.desk.rounds == [1]


def test_a_segment_ends_at_its_last_round_and_the_next_one_goes_on():
    rig = Rig(train_on).resume(Segment(last_round=2))
    rig.desk.finish()
    assert rig.ended == 0
    rig.desk.finish()
    assert rig.ended == 1
    assert rig.desk.rounds == [1, 2]
    assert rig.kinds == ["Started", "TrainDone", "TrainDone"]
    rig.pump.received(0, note(1))
    assert rig.kinds[-1] == "Received", "everything else goes on"
    rig.resume(Segment(last_round=3))
    assert rig.desk.rounds == [1, 2, 3]
    rig.desk.finish()
    assert rig.ended == 2


def test_a_segment_that_has_nothing_to_train_is_over_at_once():
    rig = Rig(train_on).resume(Segment(last_round=1))
    rig.desk.finish()
    rig.resume(Segment(last_round=1))
    assert rig.ended == 2
    assert rig.desk.rounds == [1]


def test_a_segment_ends_when_its_time_is_up_and_training_has_ended():
    rig = Rig(train_on).resume(Segment(until=10))
    rig.clock.advance(9)
    rig.desk.finish()
    assert rig.desk.rounds == [1, 2]
    rig.clock.advance(15)
    assert rig.ended == 0, "what has begun is not given up"
    rig.desk.finish()
    assert rig.ended == 1
    assert rig.desk.rounds == [1, 2]
    assert rig.kinds[-1] == "TrainDone"


def test_a_segment_ends_when_its_time_is_up_also_if_the_machine_does_not_train():
    rig = Rig(quiet).resume(Segment(until=10))
    rig.clock.advance(9)
    assert rig.ended == 0
    rig.clock.advance(10)
    assert rig.ended == 1


def test_a_segment_may_have_a_round_and_a_time():
    for last_round, until, rounds in ((1, 99, [1]), (99, 10, [1, 2])):
        rig = Rig(train_on).resume(Segment(last_round=last_round, until=until))
        rig.clock.time = 5
        rig.desk.finish()
        if not rig.ended:
            rig.clock.time = 10
            rig.desk.finish()
        assert (rig.ended, rig.desk.rounds) == (1, rounds)


def test_a_segment_needs_an_end():
    with pytest.raises(ConfigurationError, match="nothing would end the segment"):
        Segment()


def test_there_is_one_segment_at_a_time():
    rig = Rig(train_on).resume()
    with pytest.raises(RuntimeFault, match="node 1 is in a segment already"):
        rig.resume()


def test_a_machine_that_has_halted_has_no_segments_to_do():
    rig = Rig(on_start(Halt(reason="enough"))).resume()
    rig.resume()
    assert rig.ended == 2


def test_a_machine_may_halt_while_it_trains():
    def script(machine, event):
        if isinstance(event, Started):
            yield Train(round=1, model=machine.model)
            yield Halt(reason="enough")

    rig = Rig(script).resume()
    assert rig.ended == 0
    rig.desk.finish()
    assert rig.ended == 1


def test_a_pause_lets_a_training_end():
    rig = Rig(train_on).resume()
    rig.pump.pause()
    rig.pump.pause()
    assert rig.ended == 1
    rig.resume(Segment(last_round=9, until=99))
    assert rig.desk.rounds == [1], "it is not begun again"
    rig.pump.pause()
    assert rig.clock.due is None
    rig.desk.finish()
    assert rig.kinds == ["Started", "TrainDone"]
    assert rig.desk.rounds == [1]


def test_the_time_between_segments_is_not_idle():
    rig = Rig(train_on).resume(Segment(last_round=1))
    rig.clock.advance(10)
    rig.desk.finish()
    assert rig.pump.metrics()["idle-share"] == 0
    rig.clock.advance(1000)
    rig.resume(Segment(last_round=2, until=1010))
    rig.clock.advance(1010)
    assert rig.pump.metrics()["idle-share"] == 0, "also while it trains"
    rig.desk.finish()
    rig = Rig(quiet).resume(Segment(until=10))
    rig.clock.advance(10)
    assert rig.pump.metrics()["idle-share"] == 1


def test_a_segment_can_be_awaited():
    async def work():
        rig = Rig(train_on)
        rig.desk.instant = True
        await rig.pump.run(Segment(last_round=3))
        assert rig.desk.rounds == [1, 2, 3]
        rig.desk.instant = False
        waiting = asyncio.ensure_future(rig.pump.run(Segment(last_round=9)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        rig.resume()  # it is not in a segment any more
        rig.pump.pause()
        for _ in range(3):
            rig.resume()
            rig.desk.finish(Outcome(error="x"))
            if rig.pump.error is None:
                rig.pump.pause()
        with pytest.raises(RuntimeFault, match="3 times in a row"):
            await rig.pump.run(Segment(last_round=9))

    asyncio.run(work())


# --- ends -----------------------------------------------------------------------------------------


def test_a_machine_that_raises_ends_the_pump_by_name():
    def script(machine, event):
        yield from train_on(machine, event)
        if isinstance(event, Received):
            raise KeyError("slot")

    rig = Rig(script).resume()
    rig.clock.time = 12
    rig.pump.received(2, note(4))
    match = (
        r"scripted failed on node 1 at '12 n1 Received source=2 kind=note step=4': KeyError\('slot"
    )
    with pytest.raises(AlgorithmError, match=match) as caught:
        rig.pump.check()
    assert isinstance(caught.value.__cause__, KeyError)
    assert (rig.ended, rig.desk.cancelled) == (1, 1)
    rig.pump.received(2, note(5))
    rig.clock.advance(10**12)
    assert len(rig.seen) == 2, "nothing happens any more"
    with pytest.raises(AlgorithmError):
        rig.resume()


def test_a_message_to_who_is_no_neighbor_is_the_algorithms_fault():
    rig = Rig(on_start(Send(to=1, message=note())))
    with pytest.raises(AlgorithmError, match="sends to 1, which is no neighbor"):
        rig.pump.check()


def test_what_fails_beneath_the_machine_is_not_the_algorithms_fault():
    rig = Rig(on_start(Send(to=0, message=note())), start=False)

    def fail(to, message):
        raise OSError("no buffer")

    rig.link.on_send = fail
    rig.pump.start()
    with pytest.raises(RuntimeFault, match="no buffer"):
        rig.pump.check()


def test_the_last_event_is_answered_with_reports_alone():
    def script(machine, event):
        yield from train_on(machine, event)
        if isinstance(event, Stopped):
            yield Report(name="left-over")
            yield Send(to=0, message=note())
            yield SetTimer(name="x", at=0)
            yield Train(round=9, model=machine.model)

    rig = Rig(script).resume()
    rig.pump.stop("enough")
    assert rig.seen[-1] == Stopped(at=0, reason="enough")
    assert rig.pump.metrics()["left-over-count"] == 1
    assert rig.link.queue == []
    assert (rig.ended, rig.desk.cancelled, rig.clock.due) == (1, 1, None)
    rig.pump.received(0, note())
    rig.desk.finish()
    rig.pump.stop("again")
    assert rig.kinds == ["Started", "Stopped"]
    rig.pump.check()


def test_a_stop_in_the_middle_of_a_step_comes_after_it():
    rig = Rig(on_start(Send(to=0, message=note(1)), Send(to=2, message=note(2))), start=False)
    rig.link.on_send = lambda to, message: rig.pump.stop("now")
    rig.pump.start()
    assert rig.kinds == ["Started", "Stopped"]
    assert len(rig.link.queue) == 2


def test_a_node_that_never_began_has_nothing_to_end():
    rig = Rig(start=False)
    rig.pump.stop("early")
    assert rig.seen == []
    rig.pump.peer_up(0)
    assert rig.seen == []


# --- epochs ---------------------------------------------------------------------------------------


def test_a_machine_lives_through_an_epoch_with_the_same_graph():
    rig = Rig(train_on).resume(Segment(last_round=1))
    rig.desk.finish()
    machine, fresh = rig.pump.machine, Link()
    rig.pump.adopt(rig.site(), fresh)
    assert rig.pump.machine is machine
    rig.pump.peer_down(0, [])
    assert rig.kinds[2:] == ["PeerDown", "PeerDown"], "the old links are gone, once"
    rig.pump.peer_up(0)
    assert machine.up == {0}
    rig.resume(Segment(last_round=2))
    assert rig.desk.rounds == [1, 2]


def test_another_graph_is_another_machine_that_goes_on_from_the_model():
    rig = Rig(train_on).resume(Segment(last_round=3))
    for _ in range(3):
        rig.desk.finish()
    old, model = rig.pump.machine, rig.pump.machine.model
    rig.clock.time = 50
    fresh = Link()
    rig.pump.adopt(rig.site(nx.cycle_graph(4)), fresh, patience=10)
    assert old.seen[-1] == Stopped(at=50, reason="the topology changes")
    assert rig.seen == [], "it waits for its neighbors"
    for peer in (0, 2):
        fresh.up.add(peer)
        rig.pump.peer_up(peer)
    assert rig.seen == [Started(at=50, up=(0, 2))]
    np.testing.assert_array_equal(rig.pump.machine.model, model)
    assert rig.pump.machine.model is not model
    assert not rig.pump.site.initial.flags.writeable
    rig.resume(Segment(last_round=4))
    task = rig.desk.tasks[-1][0]
    assert task.round == 4, "the trainer goes on counting"
    assert task.seed == rig.pump.site.seeds.number("train", 4)
    assert task.model.tolist() == [3] * SIZE
    rig.desk.finish()
    assert rig.ended == 2
    assert rig.lines[-1].split(" round=")[1].startswith("1 "), "the machine counts from 1"


def test_all_nodes_can_be_told_how_many_rounds_are_past():
    rig = Rig(train_on, start=False)
    rig.pump.start(after=20)
    rig.resume(Segment(last_round=21))
    assert rig.desk.rounds == [21]
    rig.desk.finish()
    assert rig.pump.metrics()["rounds"] == 21
    rig.pump.adopt(rig.site(nx.cycle_graph(3)), after=30)
    rig.resume(Segment(last_round=40))
    assert rig.desk.rounds == [21, 31]


def test_timers_and_links_of_the_old_graph_are_forgotten():
    rig = Rig(on_start(SetTimer(name="old", at=5)), up=(0, 2))
    rig.pump.adopt(rig.site(nx.Graph([(0, 1), (2, 0)])))
    rig.clock.advance(4)
    assert rig.seen == [Started(at=0, up=(0,))]
    rig.clock.advance(100)
    assert rig.kinds == ["Started", "TimerFired"], "its own"


def test_the_patience_of_one_epoch_is_not_that_of_the_next():
    rig = Rig(up=(), start=False)
    rig.pump.start(patience=100)
    for peer in (0, 2):
        rig.pump.peer_up(peer)
    rig.clock.time = 50
    rig.pump.adopt(rig.site(nx.cycle_graph(4)), Link(), patience=500)
    rig.clock.advance(549)
    assert rig.seen == []
    rig.clock.advance(550)
    assert rig.kinds == ["Started"]


def test_nothing_changes_within_a_segment():
    rig = Rig(train_on).resume()
    for _ in range(2):
        with pytest.raises(RuntimeFault, match="node 1 can change only between segments"):
            rig.pump.adopt(rig.site(nx.cycle_graph(3)))
        rig.pump.pause()  # what is in training still is
    rig.desk.finish()
    rig.pump.adopt(rig.site(nx.cycle_graph(3)))


@pytest.mark.parametrize("change", [{"size": 9}, {"node": 0}])
def test_another_model_or_node_is_another_run(change):
    rig = Rig()
    with pytest.raises(ConfigurationError, match="cannot go on as node .*: that is another run"):
        rig.pump.adopt(rig.site(**change))
