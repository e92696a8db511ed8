"""Client processes that die, that never come, and strangers at the engine's socket."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, RecordDict

from flwr_decentral.core import RuntimeFault
from flwr_decentral.flower import decentral_mod, mod, packed, strategy
from flwr_decentral.flower import dispatch as module
from flwr_decentral.flower.control import CONTROL
from flwr_decentral.localsocket import Connection, FrameBuffer, Listener, encode_frame

from . import toys
from .inprocess import ActorDied
from .toys import federate, make_client, node_of, round_of
from .watching import CountingGrid


@pytest.fixture
def die(monkeypatch):
    """Return a function that lets the host that calls it die: its connection breaks at once."""
    own = threading.local()

    class Breakable(Connection):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            own.connection = self

    monkeypatch.setattr(mod, "Connection", Breakable)
    monkeypatch.setattr(packed, "_LOOK_AFTER", 0.02)
    return lambda: own.connection.close()


@pytest.fixture(scope="module")
def undisturbed():
    return federate(make_client(), algorithm="dpsgd", rounds=4).run.digest


def run(train, **arguments):
    return federate(make_client(train), algorithm="dpsgd", rounds=4, **arguments)


# --- packed: the host's connection breaks ---------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_dead_host_was_training_runs_again(workers, die, undisturbed, caplog):
    tries = Counter()

    def train(msg, context):
        task = node_of(context), round_of(msg)
        tries[task] += 1
        if task == (1, 2) and tries[task] == 1:
            die()
        return toys.train(msg, context)

    result = run(train, workers=workers)
    assert tries[1, 2] == 2
    assert result.run.lost_tasks == 1
    assert result.run.train_failures == 0
    assert result.run.digest == undisturbed
    assert "Lost the training of node 1, round 2" in caplog.text


def test_the_state_that_a_dead_host_wrote_is_forgotten(die):
    seen = []

    def train(msg, context):
        times = context.state["memory"]["times"] if "memory" in context.state else 0
        seen.append(times)
        context.state["memory"] = ConfigRecord({"times": times + 1})
        if times == 1 and seen.count(1) == 1:
            die()
        return toys.train(msg, context)

    federate(make_client(train, None), nodes=1, rounds=4)
    assert seen == [0, 1, 1, 2, 3]


def test_a_task_that_is_lost_three_times_is_tried_a_fourth(die, undisturbed):
    tries = Counter()

    def train(msg, context):
        tries[node_of(context), round_of(msg)] += 1
        if node_of(context) == 1 and round_of(msg) == 2 and tries[1, 2] <= 3:
            die()
        return toys.train(msg, context)

    result = run(train)
    assert tries[1, 2] == 4
    assert result.run.lost_tasks == 3
    assert result.run.digest == undisturbed


def test_a_task_that_always_kills_its_host_fails_the_run(die, tmp_path):
    def train(msg, context):
        if node_of(context) == 1 and round_of(msg) == 2:
            die()
        return toys.train(msg, context)

    with pytest.raises(RuntimeFault, match=r"trained node 1, round 2, died 4 times.*resources"):
        run(train, results_dir=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_a_host_that_was_told_to_leave_gets_no_task_however_late_its_connection_ends(
    monkeypatch, undisturbed
):
    class Lingering(Connection):
        def close(self):
            end = self._socket.dup()
            super().close()
            threading.Timer(0.05, end.close).start()

    monkeypatch.setattr(mod, "Connection", Lingering)
    result = run(toys.train, evaluate_every=1)
    assert result.run.digest == undisturbed
    assert result.run.lost_tasks == 0


def test_a_host_whose_offer_is_read_after_it_was_told_to_leave_gets_no_task():
    """Its message has been answered by then, and others have been invited."""
    listener = Listener()
    roster = SimpleNamespace(node_ids=(100,))
    job = SimpleNamespace(token=listener.token)
    dispatcher = packed.PackedDispatcher(listener, None, roster, None, job, {}, 1.0)
    host = Connection(listener.address, listener.token, 30.0)
    while not any(each.known for each in dispatcher._hosts.values()):
        dispatcher._attend(1.0)
    dispatcher._dismiss()
    dispatcher._open = True
    host.send({"do": "serve"})
    dispatcher._attend(1.0)
    assert not list(dispatcher._serving())
    assert host.receive().header == {"do": "leave"}
    host.close()
    dispatcher.close()


def test_no_host_at_all_is_an_error_and_no_wait_for_ever(monkeypatch):
    monkeypatch.setattr(packed, "_NO_HOST", 0.1)
    monkeypatch.setattr(packed, "_LOOK_AFTER", 0.02)
    nothing = RecordDict({CONTROL: ConfigRecord({"served": 0})})
    monkeypatch.setitem(mod._ACTIONS, "host", lambda call, control, config: nothing)
    with pytest.raises(RuntimeFault, match="no client process has been there to train"):
        run(toys.train, start={"timeout": 30.0})


# --- actors that die and stay in Flower's pool ----------------------------------------------------


def with_deaths(*deaths, **arguments):
    """Run with an actor dying under each of some tasks; nodes evaluate after each round."""
    tries = Counter()

    def train(msg, context):
        task = node_of(context), round_of(msg)
        tries[task] += 1
        if task in deaths and tries[task] == 1:
            raise ActorDied
        return toys.train(msg, context)

    return run(train, nodes=6, evaluate_every=1, **arguments).run


@pytest.fixture(scope="module")
def without_deaths():
    return with_deaths()


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [[(2, 2)], [(2, 2), (3, 3)]], ids=["one", "two"])
def test_dead_actors_change_nothing_whatever_they_swallow(
    dispatch, deaths, without_deaths, caplog, monkeypatch
):
    monkeypatch.setattr(module, "_BALLAST", 1 << 20)  # it takes these threads long enough
    result = with_deaths(*deaths, workers=len(deaths) + 1, dispatch=dispatch)
    assert result.digest == without_deaths.digest
    assert result.evaluations == without_deaths.evaluations
    assert result.lost_tasks == len(deaths)
    assert "Lost the training of node 2, round 2" in caplog.text
    assert "Lost the evaluation" not in caplog.text


@pytest.mark.slow
def test_a_run_ends_when_no_actor_is_left(dispatch, monkeypatch):
    monkeypatch.setattr(module, "NOBODY", 0.1)
    monkeypatch.setattr(packed, "NOBODY", 0.1)
    monkeypatch.setattr(packed, "_NO_HOST", 0.1)
    monkeypatch.setattr(packed, "_LOOK_AFTER", 0.02)

    def train(msg, context):
        if round_of(msg) == 2:
            raise ActorDied
        return toys.train(msg, context)

    with pytest.raises(RuntimeFault, match="no client process"):
        run(train, dispatch=dispatch, start={"timeout": 30.0})


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "workers", "messages"), [(2, 2, 4), (1, 3, 4), (4, 2, 4)])
def test_hosts_are_invited_as_long_as_they_come(cores, workers, messages, monkeypatch):
    """Flower compares every message with every node, so those that nobody serves are few."""
    monkeypatch.setattr(packed.os, "cpu_count", lambda: cores)
    grids = []

    def wrap(grid):
        grids.append(CountingGrid(grid))
        return grids[-1]

    def train(msg, context):
        time.sleep(0.005)  # long enough for every worker to take part
        return toys.train(msg, context)

    nodes = 24
    run(train, nodes=nodes, workers=workers, wrap=wrap, evaluate_every=9)
    assert grids[0].messages["pushed", "train"] - nodes == messages


# --- packed: strangers ----------------------------------------------------------------------------


@pytest.fixture
def listeners(monkeypatch):
    """List the engine's listeners."""
    made = []

    class Remembered(Listener):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(strategy, "Listener", Remembered)
    return made


def knock(address: str, data: bytes) -> bytes:
    """Say something to the engine, and hear what it says until it hangs up; or say nothing."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(30.0)
        stranger.connect("\0" + address[1:])
        heard = b""
        with contextlib.suppress(ConnectionError):  # it may hang up before it has read all
            stranger.sendall(data)
            while data and (more := stranger.recv(1 << 16)):
                heard += more
        return heard


GET_STATE = encode_frame({"do": "get-state", "node": 0})
STRANGERS = {
    "no token": encode_frame({"do": "serve"}),
    "a question at once": GET_STATE,
    "a wrong token": encode_frame({"token": "0" * 32}),
    "a wrong token and a question": encode_frame({"token": "0" * 32}) + GET_STATE,
    "no frame": struct.pack("<II", 8, 0) + b"no frame",
    "a huge header": struct.pack("<II", 2**32 - 1, 0),
    "nothing": b"",
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_shown_out_and_the_run_goes_on(said, listeners, undisturbed):
    heard = []

    def train(msg, context):
        if node_of(context) == 0 and round_of(msg) == 2:
            (listener,) = listeners
            heard.append(knock(listener.address, said))
        return toys.train(msg, context)

    result = run(train)
    assert heard == [b""]
    assert result.run.digest == undisturbed
    assert result.run.lost_tasks == 0


def test_another_user_is_shown_out_and_the_run_goes_on(listeners, monkeypatch, undisturbed):
    heard = []
    another = os.getuid() + 1

    def train(msg, context):
        if node_of(context) == 0 and round_of(msg) == 2:
            (listener,) = listeners
            with monkeypatch.context() as patch:
                patch.setattr(os, "getuid", lambda: another)
                token = encode_frame({"token": listener.token})
                heard.append(knock(listener.address, token + GET_STATE))
        return toys.train(msg, context)

    assert run(train).run.digest == undisturbed
    assert heard == [b""]


def test_a_known_process_gets_an_answer(listeners):
    heard = []

    def train(msg, context):
        if node_of(context) == 0 and round_of(msg) == 2:
            (listener,) = listeners
            connection = Connection(listener.address, listener.token, 30.0)
            connection.send({"do": "get-state", "node": 0})
            heard.append(connection.receive())
            connection.close()
        return toys.train(msg, context)

    run(train)
    assert FrameBuffer().feed(encode_frame({"do": "state"}, [b""])) == heard


# --- message: Flower reports an error -------------------------------------------------------------


def losing(do: str, times: int):
    """Make a mod that lets the process die under node 1's first tasks of a kind."""
    left = [times]

    def losing_mod(msg, context, call_next):
        control = msg.content.config_records.get(CONTROL, {})
        if control.get("do") == do and control["node"] == 1 and left[0]:
            left[0] -= 1
            raise RuntimeError("the actor died")
        return call_next(msg, context)

    return losing_mod


def disturbed(do: str, times: int, **arguments):
    client = make_client(mods=[losing(do, times), decentral_mod])
    return federate(client, algorithm="dpsgd", rounds=4, **arguments)


@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_message_is_sent_again(times, undisturbed):
    result = disturbed("train", times, dispatch="message")
    assert result.run.lost_tasks == times
    assert result.run.digest == undisturbed


def test_a_message_that_is_lost_four_times_fails_the_run():
    with pytest.raises(RuntimeFault, match="node 1, round 1, died 4 times(?s:.*)actor died"):
        disturbed("train", 4, dispatch="message")


def test_a_lost_evaluation_is_sent_again(dispatch, undisturbed):
    result = disturbed("evaluate", 3, dispatch=dispatch, evaluate_every=4)
    assert result.run.digest == undisturbed
    assert None not in result.run.evaluations[-1].metrics["mean"].nodes


def test_an_evaluation_that_is_always_lost_leaves_its_node_out(dispatch, undisturbed, caplog):
    result = disturbed("evaluate", 4, dispatch=dispatch, evaluate_every=2)
    assert result.run.digest == undisturbed
    first, last = (entry.metrics["mean"].nodes for entry in result.run.evaluations)
    assert [value is None for value in first] == [False, True, False]
    assert None not in last
    assert "Lost the evaluation of node 1" in caplog.text
