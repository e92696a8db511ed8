"""Who waits for whom, on a machine that adds up what it hears in two slots."""

from collections import Counter

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    HEADER_BYTES,
    SECOND,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Train,
    TrainDone,
)
from flwr_decentral.core.lockstep import NOTHING, NOTICE, PATIENCE, LockstepMachine
from flwr_decentral.testing import make_site

WASTE = HEADER_BYTES + 4


class Halves(LockstepMachine):
    """Send a model of one value twice a round, to neighbors with an even sum of indices."""

    STATE = (*LockstepMachine.STATE, "settled", "kept", "behind")

    def __init__(self, site, *, overlap=False, patience=2.0, keeps=False):
        super().__init__(site, overlap=overlap, patience=patience)
        self.settled, self.kept, self.behind, self.keeps = [], [], 0, keeps

    def slots(self, peer):
        return () if peer == 3 else (0, 1)

    def take_in(self, event):
        self.model = event.after

    def messages(self, peers):
        for peer in peers:
            for slot in self.slots(peer):
                header = {"slot": slot}
                yield (
                    peer,
                    Message(kind="half", step=self.round, payload=self.model, header=header),
                )

    def slot_of(self, message):
        return message.header.get("slot")

    def read(self, source, message):
        slot = self.slot_of(message)
        if message.kind != "half" or slot not in self.slots(source):
            return None
        return slot, (message.step, message.payload)

    def settle(self, letters):
        self.settled.append((self.round, sorted(letters)))
        return iter(())

    def keep(self, key, letter):
        if self.keeps:
            self.kept.append((*key, letter[0]))
        return self.keeps

    def found_behind(self):
        self.behind += 1


class Hub:
    """Node 0 of a star with the neighbors 1, 2 and 3, of which the last sends nothing."""

    def __init__(self, up=(1, 2, 3), **options):
        site = make_site(topology=nx.star_graph(3), initial=np.zeros(1, np.float32))
        self.machine = Halves(site, **options)
        self.reports, self.wasted = Counter(), Counter()
        self.commands = self.step(Started(at=0, up=up))

    def step(self, event):
        commands = self.machine.step(event)
        for report in of(Report, commands):
            self.reports[report.name] += report.count
            self.wasted[report.name] += report.nbytes
        return commands

    def train(self, at=0):
        after = np.ones(1, np.float32)
        number = self.machine.round
        return self.step(TrainDone(at=at, round=number, before=self.machine.model, after=after))

    def hear(self, source, step, slots=(0, 1), kind="half", value=1.0):
        commands = []
        for slot in slots:
            header = {} if slot is None else {"slot": slot}
            payload = np.full(1, value, np.float32) if kind == "half" else None
            message = Message(kind=kind, step=step, payload=payload, header=header)
            commands += self.step(Received(at=0, source=source, message=message))
        return commands


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


@pytest.mark.parametrize("overlap", [False, True])
def test_every_slot_of_a_neighbor_is_waited_for(overlap):
    hub = Hub(overlap=overlap)
    first = hub.train()
    sends = of(Send, hub.commands if overlap else first)
    assert [(send.to, send.message.header["slot"]) for send in sends] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert hub.machine.waits_for == (1, 2)
    hub.hear(2, 1)
    hub.hear(1, 1, slots=(1,))
    assert hub.machine.waits_for == (1,)
    commands = hub.hear(1, 1, slots=(0,))
    assert of(Train, commands)[0].round == 2
    assert hub.machine.settled == [(1, [(1, 0), (1, 1), (2, 0), (2, 1)])]
    assert not hub.reports


def test_a_later_step_shows_that_what_is_missing_is_lost():
    hub = Hub()
    hub.train()
    hub.hear(2, 1)
    hub.hear(1, 1, slots=(0,))
    hub.hear(1, 2, slots=(0,))
    assert hub.machine.settled == [(1, [(1, 0), (2, 0), (2, 1)])]
    hub.train()
    hub.hear(1, 2, slots=(1,))
    hub.hear(2, 2)
    assert hub.machine.settled[1] == (2, [(1, 0), (1, 1), (2, 0), (2, 1)])


@pytest.mark.parametrize("keeps", [False, True])
def test_what_comes_late_is_kept_or_counted(keeps):
    hub = Hub(keeps=keeps)
    hub.train()
    hub.hear(2, 1)
    hub.hear(1, 2)
    hub.hear(1, 1)
    assert hub.machine.kept == ([(1, 0, 1), (1, 1, 1)] if keeps else [])
    assert hub.wasted == ({} if keeps else {"stale-message": 2 * WASTE})


@pytest.mark.parametrize("slots", [(None,), (0, 1)], ids=["unclear", "each"])
@pytest.mark.parametrize("kind", ["other", NOTHING, "not-finite"])
def test_what_comes_in_vain_is_not_waited_for(kind, slots):
    hub = Hub(up=(1,))
    hub.train()
    if kind == "not-finite":
        hub.hear(1, 1, slots, value=np.nan)
    else:
        hub.hear(1, 1, slots, kind=kind)
    assert hub.machine.settled == [(1, [])]
    counted = {"other": "bad-message", NOTHING: None, "not-finite": "payload-not-finite"}[kind]
    assert hub.reports == ({counted: len(slots)} if counted else {})


def test_a_notice_does_not_end_a_wait():
    hub = Hub(up=(1,))
    hub.train()
    hub.hear(1, 1, kind=NOTICE)
    assert hub.machine.waits_for == (1,)
    hub.hear(1, 2, kind=NOTICE)
    assert hub.machine.settled == [(1, [])]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_far_ahead_is_adopted(overlap):
    hub = Hub(overlap=overlap)
    hub.hear(1, 7)
    assert hub.machine.round == (1 if overlap else 7)
    assert hub.machine.behind == 1
    commands = hub.train()
    if overlap:
        assert of(Train, hub.hear(2, 1))[0].round == 7
        assert hub.reports["skipped-round"] == 5
    else:
        assert {send.message.step for send in of(Send, commands)} == {7}
        assert of(Train, hub.hear(2, 7))[0].round == 8
        assert hub.reports["skipped-round"] == 6
    hub.hear(1, 20)
    assert hub.machine.behind == 1


def test_what_is_skipped_is_kept_or_counted():
    for keeps in (False, True):
        hub = Hub(keeps=keeps)
        hub.hear(1, 1)
        hub.hear(2, 2)
        hub.hear(2, 9)
        assert hub.wasted["stale-message"] == (0 if keeps else 4 * WASTE)
        assert len(hub.machine.kept) == (4 if keeps else 0)


def test_patience_ends_a_wait_and_a_wait_that_ends_cancels_it():
    hub = Hub(patience=2.5)
    (timer,) = of(SetTimer, hub.train(at=7 * SECOND))
    assert timer == SetTimer(name=PATIENCE, at=9 * SECOND + SECOND // 2)
    assert of(Train, hub.step(TimerFired(at=timer.at, name=PATIENCE)))
    hub.train()
    hub.hear(1, 2)
    assert of(SetTimer, hub.hear(2, 2)) == [SetTimer(name=PATIENCE, at=None)]
    assert not hub.step(TimerFired(at=0, name=PATIENCE))


def test_a_neighbor_that_goes_is_not_waited_for_and_one_that_returns_is_told():
    hub = Hub()
    hub.train()
    hub.hear(1, 1)
    hub.hear(2, 1, slots=(0,))
    assert of(Train, hub.step(PeerDown(at=0, peer=2)))[0].round == 2
    (send,) = of(Send, hub.step(PeerUp(at=0, peer=2)))
    assert (send.message.kind, send.message.step) == (NOTICE, 2)
    hub.train()
    sends = of(Send, hub.step(PeerUp(at=0, peer=2)))
    assert [send.message.kind for send in sends] == ["half", "half"]
    assert not hub.step(PeerUp(at=0, peer=3))


@pytest.mark.parametrize("step", [1, 2, 9])
def test_duplicates_are_counted_and_change_nothing(step):
    hub = Hub()
    hub.train()
    hub.hear(1, step, slots=(0,))
    before = hub.machine.snapshot()
    hub.hear(1, step, slots=(0,))
    assert hub.wasted["duplicate-message"] == WASTE
    assert repr(hub.machine.snapshot()) == repr(before)
