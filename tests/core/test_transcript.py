from dataclasses import fields

import numpy as np
import pytest

from flwr_decentral.core import (
    Command,
    DropQueued,
    Event,
    Halt,
    LinkIdle,
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
from flwr_decentral.core.transcript import (
    format_command,
    format_event,
    format_step,
    format_vector,
    vector_digest,
)

X = np.arange(3, dtype=np.float32)
D = f"3:{vector_digest(X)}"
MESSAGE = Message(kind="model", step=2, payload=X, header={"b": 0.5, "a": 3})

EVENTS = [
    (Started(at=0, up=(1, 3)), "0 n7 Started up=1,3"),
    (Started(at=0, up=()), "0 n7 Started up="),
    (TrainDone(at=5, round=2, before=X, after=X), f"5 n7 TrainDone round=2 before={D} after={D}"),
    (TrainFailed(at=5, round=2, reason="a\nb"), "5 n7 TrainFailed round=2 reason='a\\nb'"),
    (
        Received(at=5, source=1, message=MESSAGE),
        f"5 n7 Received source=1 kind=model step=2 a=3 b=0.5 payload={D}",
    ),
    (TimerFired(at=5, name="patience"), "5 n7 TimerFired name=patience"),
    (LinkIdle(at=5), "5 n7 LinkIdle"),
    (PeerUp(at=5, peer=1), "5 n7 PeerUp peer=1"),
    (PeerDown(at=5, peer=1), "5 n7 PeerDown peer=1"),
    (Stopped(at=5, reason="the end"), "5 n7 Stopped reason='the end'"),
]
COMMANDS = [
    (Train(round=2, model=X), f"Train(round=2 model={D})"),
    (Send(to=1, message=MESSAGE), f"Send(to=1 kind=model step=2 a=3 b=0.5 payload={D})"),
    (Send(to=1, message=Message(kind="ping", step=0)), "Send(to=1 kind=ping step=0)"),
    (DropQueued(), "DropQueued(to=None)"),
    (SetTimer(name="patience", at=9), "SetTimer(name=patience at=9)"),
    (Report(name="age", total=0.5), "Report(name=age count=1 total=0.5 nbytes=0)"),
    (Halt(reason="done"), "Halt(reason='done')"),
]


@pytest.mark.parametrize(("event", "text"), EVENTS)
def test_events(event, text):
    assert format_event(7, event) == text


@pytest.mark.parametrize(("command", "text"), COMMANDS)
def test_commands(command, text):
    assert format_command(command) == text


def test_every_kind_is_one_line_with_every_field():
    assert {type(event) for event, _ in EVENTS} == set(Event.__args__)
    assert {type(command) for command, _ in COMMANDS} == set(Command.__args__)
    for what, text in (*EVENTS, *COMMANDS):
        names = {field.name for field in fields(what)} - {"at", "message"}
        assert "\n" not in text
        assert all(f"{name}=" in text for name in names), text


def test_a_step_is_its_event_and_its_commands():
    event = LinkIdle(at=5)
    assert format_step(7, event, []) == "5 n7 LinkIdle"
    assert (
        format_step(7, event, [DropQueued(to=1), Halt(reason="x")])
        == "5 n7 LinkIdle -> DropQueued(to=1); Halt(reason='x')"
    )


def test_digests_are_of_bytes_whatever_the_strides():
    assert vector_digest(X) == vector_digest(np.repeat(X, 2)[::2])
    assert vector_digest(np.zeros(3, np.float32)) != vector_digest(-np.zeros(3, np.float32))
    frozen = X.copy()
    frozen.flags.writeable = False
    assert vector_digest(frozen) == vector_digest(X)
    assert vector_digest(np.empty(0, np.float32)) == "e3b0c44298fc1c14"


def test_what_stands_in_for_a_vector_shows_as_itself():
    assert format_vector("handle 3") == "handle 3"
    assert format_vector(None) == "None"


def test_text_is_the_same_in_every_process_and_version():
    assert COMMANDS[1][1] == "Send(to=1 kind=model step=2 a=3 b=0.5 payload=3:75664b4da1c08de9)"
