"""What happens to a node.

Every event carries ``at``, the time it happened in integer nanoseconds since the start of the run
(virtual in ``sim``, monotonic in ``channel``). Within one machine, ``at`` never goes backwards.

===============  ===============================================================================
Started          the first event; exactly once
TrainDone        the trainer finished what the last ``Train`` command asked for
TrainFailed      it failed: zero local steps were taken
Received         a message arrived
TimerFired       a timer that the machine set is due
LinkIdle         the uplink's queue has run empty (only for algorithms that declare it)
PeerUp           a neighbor can be reached (again); what was sent before may be lost
PeerDown         a neighbor cannot be reached; what is queued for it is dropped
Stopped          the last event; what is commanded in answer may not be carried out
===============  ===============================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .message import Message, Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Begin: every machine gets this first.

    Attributes
    ----------
    at : int
        Nanoseconds since the start of the run.
    up : tuple of int
        The neighbors that can be reached, ascending.
    """

    at: int
    up: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainDone:
    """The trainer returned a vector.

    Attributes
    ----------
    at : int
        Nanoseconds since the start of the run.
    round : int
        The round of the ``Train`` command that this answers.
    before : ndarray of float32, shape (layout.size,)
        The vector that training started from: the very array of the ``Train`` command.
    after : ndarray of float32, shape (layout.size,)
        The trained vector. It now belongs to the machine, which may write to it.

    Notes
    -----
    The model may have moved while the trainer was at work. Where it has not, ``after`` is the new
    value: ``x + (after - x)`` differs from ``after`` in floating point. ``ops.update`` tells the
    two cases apart, coordinate by coordinate.
    """

    at: int
    round: int
    before: Vector
    after: Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainFailed:
    """Training failed or timed out; it counts as zero local steps."""

    at: int
    round: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A message arrived from ``source``, whose identity the runtime vouches for."""

    at: int
    source: int
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class TimerFired:
    """The timer ``name`` is due."""

    at: int
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkIdle:
    """The outbox is empty: another send would start at once."""

    at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerUp:
    """Neighbor ``peer`` can be reached."""

    at: int
    peer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerDown:
    """Neighbor ``peer`` cannot be reached."""

    at: int
    peer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """The run ends."""

    at: int
    reason: str


Event: TypeAlias = (
    Started
    | TrainDone
    | TrainFailed
    | Received
    | TimerFired
    | LinkIdle
    | PeerUp
    | PeerDown
    | Stopped
)
