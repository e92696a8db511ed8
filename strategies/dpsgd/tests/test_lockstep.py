"""Who waits for whom: the edge cases, on one machine stepped by hand."""

from collections import Counter

import networkx as nx
import numpy as np
import pytest

from flwr_decentral.core import (
    HEADER_BYTES,
    SECOND,
    ConfigurationError,
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
    TrainFailed,
)
from flwr_decentral.testing import make_site
from flwr_decentral_dpsgd import DPSGD

STAR = nx.star_graph(3)  # node 0 has the neighbors 1, 2 and 3, of degree 1
ORDERS = ("adapt-then-combine", "combine-then-adapt")
WASTE = HEADER_BYTES + 8


def vector(*values):
    return np.array(values, np.float32)


class Hub:
    """Node 0 of a star, and shorthands for what happens to it."""

    def __init__(self, up=(1, 2, 3), **parameters):
        site = make_site(topology=STAR, initial=vector(0, 0))
        self.machine = DPSGD(**parameters).machine(site)
        self.reports = Counter()
        self.wasted = Counter()
        self.now = 0
        self.commands = self.step(Started(at=0, up=up))

    def step(self, event):
        commands = self.machine.step(event)
        for command in commands:
            if isinstance(command, Report):
                self.reports[command.name] += command.count
                self.wasted[command.name] += command.nbytes
        return commands

    def train(self, number, after=(0, 0)):
        event = TrainDone(
            at=self.now, round=number, before=self.machine.model, after=vector(*after)
        )
        return self.step(event)

    def hear(self, source, step, *values, **header):
        message = Message(
            kind="model",
            step=step,
            payload=vector(*(values or (0, 0))),
            header={"degree": 1, **header},
        )
        return self.step(Received(at=self.now, source=source, message=message))

    def notice(self, source, step):
        message = Message(kind="step", step=step)
        return self.step(Received(at=self.now, source=source, message=message))


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def next_round(commands):
    (train,) = of(Train, commands)
    return train.round


def test_trains_sends_waits_and_averages():
    hub = Hub()
    assert next_round(hub.commands) == 1
    assert not of(Send, hub.commands)
    commands = hub.train(1, (4, 8))
    assert [send.to for send in of(Send, commands)] == [1, 2, 3]
    assert {send.message.step for send in of(Send, commands)} == {1}
    assert {send.message.header["degree"] for send in of(Send, commands)} == {3}
    assert of(Send, commands)[0].message.payload is of(Send, commands)[2].message.payload
    assert hub.machine.waits_for == (1, 2, 3)
    assert not hub.hear(2, 1, 8, 0)
    assert hub.machine.waits_for == (1, 3)
    hub.hear(3, 1, 0, 8)
    commands = hub.hear(1, 1, 4, 0)
    assert next_round(commands) == 2
    np.testing.assert_array_equal(hub.machine.model, [4, 4])
    assert hub.machine.waits_for == ()
    assert not hub.reports


def test_overlapped_order_sends_before_it_trains():
    hub = Hub(order="combine-then-adapt")
    assert [type(command) for command in hub.commands] == [Send, Send, Send, Train]
    for peer in (1, 2, 3):
        assert not hub.hear(peer, 1, 8, 0)
    commands = hub.train(1, (1, 2))
    np.testing.assert_array_equal(hub.machine.model, [7, 2])
    assert [type(command) for command in commands] == [Send, Send, Send, Train]
    np.testing.assert_array_equal(commands[0].message.payload, [7, 2])


def test_models_are_matched_on_step_and_not_on_arrival():
    orders = [(1, 2, 3), (3, 1, 2)]
    models = []
    for order in orders:
        hub = Hub()
        for peer in order:
            hub.hear(peer, 1, 0.1 * peer, 1)
        hub.train(1, (0.7, 0.3))
        models.append(hub.machine.model)
    np.testing.assert_array_equal(models[0], models[1])


def test_message_of_the_next_round_is_kept():
    hub = Hub(up=(1, 2))
    hub.train(1)
    hub.hear(1, 1)
    hub.hear(1, 2, 8, 8)
    assert next_round(hub.hear(2, 1)) == 2
    hub.train(2)
    assert hub.machine.waits_for == (2,)
    hub.hear(2, 2)
    np.testing.assert_array_equal(hub.machine.model, [2, 2])


def test_duplicates_are_ignored_and_counted():
    hub = Hub()
    hub.train(1)
    hub.hear(1, 1, 8, 8)
    assert not of(Train, hub.hear(1, 1, 4, 4))
    hub.hear(2, 1)
    hub.hear(3, 1)
    np.testing.assert_array_equal(hub.machine.model, [2, 2])
    assert hub.wasted == {"duplicate-message": WASTE}


def test_messages_of_past_rounds_are_counted_as_waste():
    hub = Hub(up=())
    hub.train(1)
    hub.hear(1, 1)
    assert hub.reports["stale-message"] == 1
    assert hub.wasted["stale-message"] == WASTE


def test_neighbor_known_to_be_ahead_is_not_waited_for():
    hub = Hub()
    hub.train(1)
    hub.hear(1, 1)
    hub.hear(2, 2)
    assert hub.machine.waits_for == (3,)
    assert next_round(hub.hear(3, 1)) == 2
    assert hub.reports == {"missing-neighbor": 1}


def test_node_in_training_adopts_a_far_step_at_once():
    hub = Hub()
    hub.hear(1, 1)
    hub.hear(1, 2)
    hub.hear(2, 7, 8, 8)
    assert hub.machine.round == 7
    assert hub.reports == {"stale-message": 2, "skipped-round": 6}
    commands = hub.train(1)
    assert {send.message.step for send in of(Send, commands)} == {7}
    assert hub.machine.waits_for == (1, 3)
    hub.hear(1, 7)
    assert next_round(hub.hear(3, 7)) == 8
    np.testing.assert_array_equal(hub.machine.model, [2, 2])


def test_node_in_an_exchange_finishes_it_before_it_adopts_a_far_step():
    hub = Hub()
    hub.train(1)
    hub.hear(1, 1)
    hub.hear(2, 7, 8, 8)
    assert hub.machine.waits_for == (3,)
    assert next_round(hub.hear(3, 1)) == 7
    assert hub.reports == {"missing-neighbor": 1, "skipped-round": 5}
    hub.train(7)
    hub.hear(1, 7)
    assert next_round(hub.hear(3, 7)) == 8
    np.testing.assert_array_equal(hub.machine.model, [2, 2])


def test_overlapped_node_finishes_its_round_before_it_adopts_a_far_step():
    hub = Hub(order="combine-then-adapt")
    hub.hear(2, 7)
    hub.hear(1, 7)
    hub.hear(3, 7)
    commands = hub.train(1)
    assert next_round(commands) == 7
    assert {send.message.step for send in of(Send, commands)} == {7}
    assert next_round(hub.train(7)) == 8


def test_inbox_holds_at_most_two_rounds():
    hub = Hub(order="combine-then-adapt")
    for step in range(1, 20):
        hub.hear(1, step)
    assert len(hub.machine.inbox) + len(hub.machine.ahead) == 2
    assert hub.reports["stale-message"] == 17


def test_neighbor_that_goes_down_is_not_waited_for_but_what_it_sent_counts():
    hub = Hub()
    hub.train(1)
    hub.hear(1, 1, 8, 8)
    hub.step(PeerDown(at=0, peer=1))
    hub.step(PeerDown(at=0, peer=2))
    assert hub.machine.waits_for == (3,)
    assert next_round(hub.step(PeerDown(at=0, peer=3))) == 2
    np.testing.assert_array_equal(hub.machine.model, [2, 2])
    assert hub.reports == {"missing-neighbor": 2}


def test_returning_neighbor_gets_the_current_model_again():
    hub = Hub(up=(1, 2))
    hub.train(1, (5, 6))
    (send,) = hub.step(PeerUp(at=0, peer=3))
    assert (send.to, send.message.kind, send.message.step) == (3, "model", 1)
    np.testing.assert_array_equal(send.message.payload, [5, 6])
    assert hub.machine.waits_for == (1, 2, 3)


def test_returning_neighbor_is_told_the_step_where_there_is_no_model_yet():
    hub = Hub(up=())
    hub.train(1)
    (send,) = hub.step(PeerUp(at=0, peer=3))
    assert (send.message.kind, send.message.step, send.message.payload) == ("step", 2, None)


@pytest.mark.parametrize("order", ORDERS)
def test_named_step_is_adopted_but_is_no_model(order):
    hub = Hub(order=order)
    hub.notice(1, 9)
    commands = hub.train(1)
    if order == "combine-then-adapt":
        hub.hear(2, 1)
        commands = hub.hear(3, 1)
        assert next_round(commands) == 9
        hub.train(9)
    assert {send.message.step for send in of(Send, commands)} == {9}
    assert hub.machine.waits_for == (1, 2, 3)
    assert hub.reports["stale-message"] == 0


def test_neighbor_that_starts_over_is_waited_for_again():
    hub = Hub(up=(1,))
    hub.notice(1, 2)
    hub.step(PeerDown(at=0, peer=1))
    hub.step(PeerUp(at=0, peer=1))
    hub.train(1)
    assert hub.machine.waits_for == (1,)


def test_patience_ends_the_wait():
    hub = Hub(patience=2.5)
    hub.now = 7 * SECOND
    (timer,) = of(SetTimer, hub.train(1, (8, 8)))
    assert timer.at == 9.5 * SECOND
    hub.hear(2, 1)
    commands = hub.step(TimerFired(at=timer.at, name=timer.name))
    assert next_round(commands) == 2
    assert hub.reports == {"missing-neighbor": 2}
    np.testing.assert_array_equal(hub.machine.model, [6, 6])


def test_timer_is_cancelled_when_the_wait_ends():
    hub = Hub(up=(1,))
    (armed,) = of(SetTimer, hub.train(1))
    (cancelled,) = of(SetTimer, hub.hear(1, 1))
    assert cancelled == SetTimer(name=armed.name, at=None)


def test_no_timer_where_nobody_is_waited_for():
    hub = Hub()
    for peer in (1, 2, 3):
        hub.hear(peer, 1)
    assert not of(SetTimer, hub.train(1))


@pytest.mark.parametrize(
    ("missing", "expected"), [("self", [6, 6]), ("renormalize", [16 / 3, 16 / 3])]
)
def test_weight_of_missing_messages(missing, expected):
    hub = Hub(missing=missing, up=(1, 2))
    hub.train(1, (8, 8))
    hub.step(PeerDown(at=0, peer=2))
    hub.hear(1, 1, 0, 0)  # 3/4 and 1/4, or 1/2 and 1/4 scaled by 4/3
    expected = [6, 6] if missing == "self" else [4, 4]
    np.testing.assert_allclose(hub.machine.model, expected, rtol=2**-22)


def test_renormalizing_leaves_the_local_update_alone():
    hub = Hub(missing="renormalize", order="combine-then-adapt", up=(1,))
    hub.hear(1, 1, 8, 8)
    hub.train(1, (3, 5))
    np.testing.assert_allclose(hub.machine.model, [4 + 3, 4 + 5], rtol=2**-22)


@pytest.mark.parametrize("missing", ["self", "renormalize"])
def test_nothing_heard_leaves_the_trained_model_as_it_is(missing):
    hub = Hub(missing=missing, up=())
    hub.train(1, (0.1, 0.3))
    np.testing.assert_array_equal(hub.machine.model, vector(0.1, 0.3))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rejected_model_is_missing_and_not_waited_for(bad):
    hub = Hub()
    hub.train(1)
    hub.hear(1, 1, bad, 1)
    assert hub.machine.waits_for == (2, 3)
    hub.hear(2, 1)
    assert next_round(hub.hear(3, 1)) == 2
    assert np.isfinite(hub.machine.model).all()
    assert hub.reports == {"payload-not-finite": 1, "missing-neighbor": 1}


@pytest.mark.parametrize(
    ("values", "header"),
    [((1, 2, 3), {}), ((1, 2), {"degree": 0}), ((1, 2), {"degree": 0.5})],
    ids=["length", "degree", "fraction"],
)
def test_model_that_does_not_fit_is_missing_and_not_waited_for(values, header):
    hub = Hub(up=(1,))
    hub.train(1)
    assert next_round(hub.hear(1, 1, *values, **header)) == 2
    assert hub.reports == {"bad-model": 1, "missing-neighbor": 3}
    assert hub.wasted["bad-model"] == HEADER_BYTES + 4 * len(values)


def test_unknown_kinds_of_message_are_refused():
    hub = Hub()
    hub.step(Received(at=0, source=1, message=Message(kind="fragment", step=1)))
    assert hub.reports == {"bad-model": 1}


def test_strangers_are_not_believed():
    site = make_site(topology=STAR, initial=vector(0, 0), node=1)
    machine = DPSGD().machine(site)
    machine.step(Started(at=0, up=(0,)))
    message = Message(kind="step", step=99)
    (report,) = machine.step(Received(at=0, source=2, message=message))
    assert report.name == "message-of-a-stranger"
    assert machine.round == 1


@pytest.mark.parametrize("order", ORDERS)
def test_failed_training_is_no_update_but_an_exchange(order):
    hub = Hub(order=order, up=(1,))
    commands = hub.step(TrainFailed(at=0, round=1, reason="out of memory"))
    assert [send.to for send in of(Send, [*hub.commands, *commands])] == [1]
    assert next_round(hub.hear(1, 1, 8, 8)) == 2
    np.testing.assert_array_equal(hub.machine.model, [2, 2])


@pytest.mark.parametrize(
    "parameters",
    [
        {"order": "combine"},
        {"average": "median"},
        {"missing": "ignore"},
        {"patience": -1.0},
        {"patience": float("inf")},
        {"patience": float("nan")},
    ],
)
def test_impossible_parameters_are_refused(parameters):
    with pytest.raises(ConfigurationError):
        DPSGD(**parameters)
