from dataclasses import FrozenInstanceError, dataclass

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    Algorithm,
    AlgorithmError,
    Capabilities,
    DropQueued,
    Halt,
    Layout,
    Letter,
    LinkIdle,
    Machine,
    Mailbox,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Seeds,
    Send,
    SetTimer,
    Site,
    Started,
    Stopped,
    TimerFired,
    Train,
    TrainDone,
    TrainFailed,
)
from flwr_decentral.ops import Reference

LAYOUT = Layout.of({"w": np.zeros(4, np.float32)})


def vector(*values):
    array = np.array(values, np.float32)
    array.flags.writeable = False
    return array


INITIAL = vector(0, 0, 0, 0)


def site(node=1):
    # Node 1 has the neighbors 0, 2 and 3; node 4 is a stranger.
    graph = nx.freeze(nx.Graph([(1, 3), (1, 0), (1, 2), (3, 4)]))
    return Site(
        node=node,
        topology=graph,
        layout=LAYOUT,
        initial=INITIAL,
        seeds=Seeds(7).of(node),
        ops=Reference(),
    )


@dataclass(frozen=True, kw_only=True)
class Dice(Algorithm):
    """Send to a neighbor that a die has chosen, and average with what came."""

    name = "dice"
    capabilities = Capabilities(link_idle=True)

    rate: float = 0.5
    label: str | None = None

    def machine(self, site):
        return DiceMachine(site, self.rate)


class DiceMachine(Machine):
    STATE = ("model", "round", "dice", "inbox", "counts", "history", "lost")

    def __init__(self, site, rate):
        super().__init__(site)
        self.rate = rate
        self.round = 0
        self.dice = site.seeds.generator("peers")
        self.inbox = Mailbox()
        self.counts = {"timer": [0, 0], "idle": 0}
        self.history = ()
        self.lost = {0}

    @property
    def waits_for(self):
        return tuple(sorted(self.up))

    def on_started(self, event):
        self.round = 1
        return [SetTimer(name="tick", at=event.at + 5), Train(round=1, model=self.model)]

    def on_train_done(self, event):
        self.model = self.site.ops.update(self.model, event.before, event.after)
        self.history += ((event.round, self.model),)
        for letter in self.inbox.drain():
            self.model = self.site.ops.combine([self.model, letter.payload], [0.5, self.rate])
        yield DropQueued()
        if self.up:
            peer = sorted(self.up)[self.dice.integers(len(self.up))]
            message = Message(kind="model", step=event.round, payload=self.model)
            yield Send(to=peer, message=message)
        self.round = event.round + 1
        yield Train(round=self.round, model=self.model)

    def on_received(self, event):
        old = self.inbox.put(Letter(event.source, 0, event.message.step, event.message.payload))
        return [] if old is None else [Report(name="stale-message", nbytes=event.message.nbytes)]

    def on_rejected(self, event):
        self.lost.add(event.source)
        yield Report(name="told")

    def on_timer(self, event):
        self.counts["timer"][0] += 1
        yield SetTimer(name=event.name, at=None)

    def on_link_idle(self, event):
        self.counts["idle"] += 1
        return ()

    def on_peer_up(self, event):
        yield Report(name=f"up-{event.peer}", count=len(self.up))

    def on_peer_down(self, event):
        yield DropQueued(to=event.peer)

    def on_stopped(self, event):
        yield Halt(reason=event.reason)


class Bare(Machine):
    """The least that a machine can be."""

    def on_train_done(self, event):
        self.model = event.after
        yield Train(round=event.round + 1, model=self.model)


def started(machine, *up):
    machine.step(Started(at=0, up=up))
    return machine


def received(source, *values, step=1):
    return Received(
        at=1, source=source, message=Message(kind="model", step=step, payload=vector(*values))
    )


# Algorithms


def test_an_algorithm_is_frozen_printable_and_comparable():
    assert Dice() == Dice(rate=0.5)
    assert Dice() != Dice(rate=0.25)
    assert hash(Dice()) == hash(Dice())
    assert str(Dice(label="a")) == "dice(rate=0.5, label='a')"
    assert Dice(rate=1).parameters == {"rate": 1, "label": None}
    with pytest.raises(FrozenInstanceError):
        Dice().rate = 1
    with pytest.raises(TypeError):
        Dice(0.5)
    with pytest.raises(TypeError, match="pace"):
        Dice(pace=1)


def test_an_algorithm_accepts_any_topology_by_default():
    assert Dice().check(site().topology, LAYOUT) == ()
    assert Dice().default_topology == "ring"


def test_an_algorithm_without_machines_cannot_be_made():
    @dataclass(frozen=True, kw_only=True)
    class Nothing(Algorithm):
        name = "nothing"

    with pytest.raises(TypeError, match="machine"):
        Nothing()


def test_a_site_knows_its_neighbors_in_order():
    assert site(1).neighbors == (0, 2, 3)
    assert site(4).neighbors == (3,)
    assert site().size == 5


# Steps


def test_every_event_reaches_its_handler():
    machine = Dice().machine(site())
    assert machine.model is INITIAL

    assert machine.step(Started(at=10, up=(0, 2))) == [
        SetTimer(name="tick", at=15),
        Train(round=1, model=INITIAL),
    ]
    assert machine.up == {0, 2}
    assert machine.waits_for == (0, 2)

    assert machine.step(received(2, 2, 2, 2, 2)) == []
    [report] = machine.step(received(2, 9, 9, 9, 9))
    assert report == Report(name="stale-message", nbytes=64 + 16)

    drop, send, train = machine.step(
        TrainDone(at=12, round=1, before=INITIAL, after=vector(4, 4, 4, 4))
    )
    assert drop == DropQueued()
    assert send.to in {0, 2}
    assert send.message.step == 1
    assert train.round == 2
    assert machine.model.tolist() == [3, 3, 3, 3]

    assert machine.step(TimerFired(at=15, name="tick")) == [SetTimer(name="tick", at=None)]
    assert machine.step(LinkIdle(at=16)) == []
    assert machine.counts == {"timer": [1, 0], "idle": 1}
    assert machine.step(PeerUp(at=17, peer=3)) == [Report(name="up-3", count=3)]
    assert machine.step(PeerDown(at=18, peer=0)) == [DropQueued(to=0)]
    assert machine.up == {2, 3}
    assert machine.step(Stopped(at=19, reason="over")) == [Halt(reason="over")]


def test_commands_are_carried_out_before_step_returns():
    machine = Dice().machine(site())
    commands = machine.step(Started(at=0, up=()))
    assert isinstance(commands, list)
    commands = machine.step(TrainDone(at=1, round=1, before=INITIAL, after=vector(1, 1, 1, 1)))
    assert isinstance(commands, list)
    assert machine.round == 2


def test_the_default_handlers_do_nothing():
    machine = Bare(site())
    events = [
        Started(at=0, up=(0,)),
        received(0, 1, 1, 1, 1),
        received(0, np.nan, 1, 1, 1),
        TimerFired(at=2, name="x"),
        LinkIdle(at=3),
        PeerUp(at=4, peer=2),
        PeerDown(at=5, peer=0),
        Stopped(at=6, reason="over"),
    ]
    answers = [machine.step(event) for event in events]
    assert [len(answer) for answer in answers] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert machine.up == {2}
    assert machine.waits_for == ()
    assert machine.model is INITIAL


def test_a_failed_training_counts_as_no_local_steps():
    machine = started(Dice().machine(site()), 0)
    before = machine.model
    commands = machine.step(TrainFailed(at=5, round=1, reason="the user's function raised"))
    assert [type(command) for command in commands] == [DropQueued, Send, Train]
    assert commands[-1].round == 2
    np.testing.assert_array_equal(machine.model, before)


def test_after_a_failure_the_machine_may_write_to_what_it_gets():
    class Writer(Bare):
        def on_train_done(self, event):
            event.after[0] = 9
            yield from super().on_train_done(event)

    machine = started(Writer(site()))
    [train] = machine.step(TrainFailed(at=5, round=1, reason="out of memory"))
    assert train.model.tolist() == [9, 0, 0, 0]
    assert INITIAL.tolist() == [0, 0, 0, 0]


def test_peers_come_and_go_more_than_once():
    machine = started(Dice().machine(site()), 0)
    for event in [
        PeerDown(at=1, peer=0),
        PeerDown(at=2, peer=0),
        PeerUp(at=3, peer=2),
        PeerUp(at=4, peer=2),
    ]:
        machine.step(event)
    assert machine.up == {2}


# Refusals


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_payload_that_is_not_finite_is_counted_and_never_used(value):
    machine = started(Dice().machine(site()), 0)
    bad = received(0, 1, value, 1, 1)
    assert machine.step(bad) == [
        Report(name="payload-not-finite", nbytes=bad.message.nbytes),
        Report(name="told"),
    ]
    assert len(machine.inbox) == 0
    assert machine.lost == {0}


def test_finite_values_whose_sum_is_not_are_accepted():
    machine = started(Dice().machine(site()), 0)
    huge = float(np.finfo(np.float32).max)
    assert machine.step(received(0, huge, huge, huge, huge)) == []
    assert len(machine.inbox) == 1


@pytest.mark.parametrize("source", [4, 1, 17, -1])
def test_a_message_of_a_stranger_is_counted_and_never_used(source):
    machine = started(Dice().machine(site()), 0)
    bad = received(source, 1, 1, 1, 1)
    commands = machine.step(bad)
    assert commands[0] == Report(name="message-of-a-stranger", nbytes=bad.message.nbytes)
    assert len(machine.inbox) == 0


def test_a_message_without_a_payload_passes():
    class Listener(Bare):
        def on_received(self, event):
            yield Report(name=event.message.kind)

    machine = started(Listener(site()), 0)
    hello = Received(at=1, source=0, message=Message(kind="hello", step=0))
    assert machine.step(hello) == [Report(name="hello")]


# Snapshots


def eventful(machine):
    """Bring a machine into a state in which every part of it has changed."""
    started(machine, 0, 2, 3)
    machine.step(TrainDone(at=1, round=1, before=machine.model, after=np.ones(4, np.float32)))
    machine.step(received(0, 5, 5, 5, 5))
    machine.step(received(2, 6, 6, 6, 6, step=2))
    machine.step(received(3, np.nan, 6, 6, 6))
    machine.step(TimerFired(at=2, name="tick"))
    machine.step(PeerDown(at=3, peer=3))
    return machine


def future():
    rng = np.random.default_rng(1)
    for round in range(2, 12):
        before = rng.normal(size=4).astype(np.float32)
        after = before + rng.normal(size=4).astype(np.float32)
        yield received(0, *rng.normal(size=4), step=round)
        yield received(2, *rng.normal(size=4), step=round)
        yield TrainDone(at=10 * round, round=round, before=before, after=after)
        yield PeerUp(at=10 * round + 1, peer=3)
        yield TimerFired(at=10 * round + 2, name="tick")
        yield PeerDown(at=10 * round + 3, peer=round % 2)


def transcript(machine):
    lines = []
    for event in future():
        for command in machine.step(event):
            line = [type(command).__name__, getattr(command, "to", None)]
            if isinstance(command, Send):
                line.append(command.message.payload.tobytes())
            if isinstance(command, Train):
                line += [command.round, command.model.tobytes()]
            lines.append(line)
    return lines


def test_a_restored_machine_goes_on_identically():
    machine = eventful(Dice().machine(site()))
    snapshot = machine.snapshot()
    restored = Dice().machine(site())
    restored.restore(snapshot)
    expected = transcript(machine)
    assert {line[1] for line in expected} > {0, 2, 3}
    assert transcript(restored) == expected

    # Taking a snapshot and going on has not changed it.
    again = Dice().machine(site())
    again.restore(snapshot)
    assert transcript(again) == expected


def test_a_machine_without_the_dices_state_would_go_on_otherwise():
    machine = eventful(Dice().machine(site()))
    restored = Dice().machine(site())
    fresh = restored.snapshot()["dice"]
    restored.restore({**machine.snapshot(), "dice": fresh})
    assert transcript(restored) != transcript(machine)


def test_a_snapshot_is_plain_and_shares_nothing():
    machine = eventful(Dice().machine(site()))
    snapshot = machine.snapshot()
    assert set(snapshot) == {"up", *DiceMachine.STATE}
    plain(snapshot)
    model, inbox = machine.model.copy(), [letter.payload.copy() for letter in machine.inbox]
    scribble(snapshot)
    np.testing.assert_array_equal(machine.model, model)
    for letter, payload in zip(machine.inbox, inbox, strict=True):
        np.testing.assert_array_equal(letter.payload, payload)
    assert machine.up == {0, 2}
    assert machine.counts == {"timer": [1, 0], "idle": 0}


def plain(value):
    """Fail on anything that needs pickle."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            plain(item)
    else:
        assert isinstance(value, bool | int | float | str | np.ndarray | None), type(value)


def scribble(value):
    """Write over everything that can be written to."""
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value[...] = 0
    elif isinstance(value, dict):
        for item in value.values():
            scribble(item)
        value.clear()
    elif isinstance(value, list | tuple):
        for item in value:
            scribble(item)
    if isinstance(value, list | set):
        value.clear()


def test_restoring_shares_nothing_with_the_snapshot():
    snapshot = eventful(Dice().machine(site())).snapshot()
    restored = Dice().machine(site())
    restored.restore(snapshot)
    model = restored.model.copy()
    scribble(snapshot)
    np.testing.assert_array_equal(restored.model, model)
    assert restored.up == {0, 2}
    assert len(restored.inbox) == 2
    assert restored.counts["timer"] == [1, 0]


def test_what_was_read_only_stays_so():
    machine = Dice().machine(site())
    restored = Dice().machine(site())
    restored.restore(machine.snapshot())
    assert not restored.model.flags.writeable
    machine = eventful(machine)
    restored.restore(machine.snapshot())
    assert restored.model.flags.writeable
    assert isinstance(restored.dice, np.random.Generator)
    assert isinstance(restored.inbox, Mailbox)


def test_a_snapshot_of_another_machine_is_refused_before_anything_changes():
    machine = eventful(Dice().machine(site()))
    round_before = machine.round
    with pytest.raises(AlgorithmError, match=r"DiceMachine cannot restore .*\['model', 'up'\]"):
        machine.restore(Bare(site()).snapshot())
    incomplete = machine.snapshot()
    del incomplete["dice"]
    incomplete["round"] = 99
    with pytest.raises(AlgorithmError, match="its state is"):
        machine.restore(incomplete)
    with pytest.raises(AlgorithmError):
        machine.restore({**machine.snapshot(), "round": 99, "more": 1})
    assert machine.round == round_before


def test_copies_are_plain_tuples_and_sets():
    class Keeper(Bare):
        STATE = ("model", "letters", "seen")

        def __init__(self, site):
            super().__init__(site)
            self.letters = [Letter(1, 2, 3, np.ones(2, np.float32))]
            self.seen = frozenset({(1, 2)})

    machine, restored = Keeper(site()), Keeper(site())
    restored.letters, restored.seen = [], frozenset()
    restored.restore(machine.snapshot())
    [letter] = restored.letters
    assert type(letter) is tuple  # as whoever writes it down without pickle would give it back
    assert letter[:3] == (1, 2, 3)
    assert letter[3] is not machine.letters[0].payload
    assert restored.seen == frozenset({(1, 2)})
