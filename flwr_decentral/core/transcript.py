"""Events and commands as text: one line for each step of a machine.

Two runs that print the same transcript were the same run, in whichever runtime they ran. A line is

    {at} n{node} {Event} {key}={value} ... -> {Command}({key}={value} ...); ...

and a machine that answered with nothing has no arrow. A vector shows as ``{length}:{digest}``, a
message as its fields, a text in quotes:

    1000000000 n0 TrainDone round=1 before=3:5dd1… after=3:e4a8… -> Send(to=1 kind=model step=1 …)

The text is the same in every process and on every machine of one byte order. Formatting runs for
every event, so it is written for speed: a hash of each vector is nearly all of its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Final

import numpy as np

from .commands import Command, DropQueued, Halt, Report, Send, SetTimer, Train
from .events import (
    Event,
    LinkIdle,
    PeerDown,
    PeerUp,
    Received,
    Started,
    Stopped,
    TimerFired,
    TrainDone,
    TrainFailed,
)
from .message import Message, Vector


def vector_digest(vector: Vector) -> str:
    """Hash the bytes of a vector: 16 hexadecimal digits.

    Examples
    --------
    >>> vector_digest(np.zeros(3, np.float32))
    '15ec7bf0b50732b4'
    """
    return sha256(np.ascontiguousarray(vector).data).hexdigest()[:16]


def format_vector(vector: Vector | None) -> str:
    """Write a vector as its length and digest; whatever stands in for one, as itself."""
    if not isinstance(vector, np.ndarray):
        return str(vector)
    return f"{len(vector)}:{vector_digest(vector)}"


def format_message(message: Message) -> str:
    """Write the fields of a message, its header's in the order of their names.

    Examples
    --------
    >>> format_message(Message(kind="fragment", step=4, header={"fragment": 3, "degree": 2}))
    'kind=fragment step=4 degree=2 fragment=3'
    """
    text = f"kind={message.kind} step={message.step}"
    if message.header:
        text += "".join(f" {key}={message.header[key]}" for key in sorted(message.header))
    if message.payload is not None:
        text += f" payload={format_vector(message.payload)}"
    if message.wire != "float32":
        text += f" wire={message.wire}"
    return text


def format_event(node: int, event: Event) -> str:
    """Write an event that happened to a node.

    Examples
    --------
    >>> format_event(3, Started(at=0, up=(1, 2)))
    '0 n3 Started up=1,2'
    """
    details = _EVENTS[type(event)](event)
    return f"{event.at} n{node} {type(event).__name__}{details}"


def format_command(command: Command) -> str:
    """Write a command.

    Examples
    --------
    >>> format_command(SetTimer(name="patience", at=5))
    'SetTimer(name=patience at=5)'
    """
    return f"{type(command).__name__}({_COMMANDS[type(command)](command)})"


def format_step(node: int, event: Event, commands: Sequence[Command]) -> str:
    """Write one line: an event and what the machine wanted done about it.

    Examples
    --------
    >>> format_step(3, PeerDown(at=7, peer=1), [Report(name="given-up"), DropQueued()])
    '7 n3 PeerDown peer=1 -> Report(name=given-up count=1 total=0.0 nbytes=0); DropQueued(to=None)'
    """
    line = format_event(node, event)
    return f"{line} -> {'; '.join(map(format_command, commands))}" if commands else line


_EVENTS: Final[dict[type, Callable[[Any], str]]] = {
    Started: lambda e: f" up={','.join(map(str, e.up))}",
    TrainDone: lambda e: (
        f" round={e.round} before={format_vector(e.before)} after={format_vector(e.after)}"
    ),
    TrainFailed: lambda e: f" round={e.round} reason={e.reason!r}",
    Received: lambda e: f" source={e.source} {format_message(e.message)}",
    TimerFired: lambda e: f" name={e.name}",
    LinkIdle: lambda _: "",
    PeerUp: lambda e: f" peer={e.peer}",
    PeerDown: lambda e: f" peer={e.peer}",
    Stopped: lambda e: f" reason={e.reason!r}",
}

_COMMANDS: Final[dict[type, Callable[[Any], str]]] = {
    Train: lambda c: f"round={c.round} model={format_vector(c.model)}",
    Send: lambda c: f"to={c.to} {format_message(c.message)}",
    DropQueued: lambda c: f"to={c.to}",
    SetTimer: lambda c: f"name={c.name} at={c.at}",
    Report: lambda c: f"name={c.name} count={c.count} total={c.total} nbytes={c.nbytes}",
    Halt: lambda c: f"reason={c.reason!r}",
}
