"""What a node asks for.

The runtime steps a machine once, carries out every command it returned, in order, and only then
looks for the next event.

==============  ================================================================================
Train           train from this vector; at most one outstanding
Send            put a message at the end of this node's outbox
DropQueued      remove messages that have not been started from the outbox
SetTimer        wake me at a time; the same name again moves the timer
Report          count something: an observation, a loss, a refusal
Halt            this node has nothing more to do
==============  ================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .message import Message, Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Train from ``model``.

    Attributes
    ----------
    round : int
        This node's round, counted from 1 and ascending. A run of R rounds ends for a node when it
        asks for a round beyond R; rounds may be skipped by a node that was away.
    model : ndarray of float32, shape (layout.size,)
        Where to start. The machine no longer writes to it: a model that moves during training is
        a new array.
    """

    round: int
    model: Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Queue ``message`` for neighbor ``to``.

    If that neighbor cannot be reached, the message is dropped and counted, and no event tells.
    """

    to: int
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class DropQueued:
    """Remove from the outbox what has not been started.

    Attributes
    ----------
    to : int, optional
        Only messages to this neighbor; all of them when None.
    """

    to: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTimer:
    """Ask for a :class:`~flwr_decentral.core.events.TimerFired`.

    Attributes
    ----------
    name : str
        One timer for each name; setting it again moves it.
    at : int, optional
        When, in nanoseconds since the start of the run; at once if that has passed. None cancels
        the timer.
    """

    name: str
    at: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Count something, so that nothing is lost silently.

    Attributes
    ----------
    name : str
        What is counted, in kebab case (``"staleness"``, ``"stale-message"``).
    count : int
        How many times it happened.
    total : float
        The sum of what was observed; the mean is ``total / count``.
    nbytes : int
        Bytes that were received in vain.
    """

    name: str
    count: int = 1
    total: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Halt:
    """Ask for no more training; the node still receives."""

    reason: str


Command: TypeAlias = Train | Send | DropQueued | SetTimer | Report | Halt
