"""A machine's timers: one alarm for each name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from flwr_decentral.core import Event, TimerFired

from .clock import Alarm, Clock

Occurrence: TypeAlias = Callable[[int], Event | None]
"""What waits for its turn: given the time, it is an event, or nothing after all."""


class Timers:
    """Keep the timers that a machine has set.

    Parameters
    ----------
    clock : Clock
        Who calls when a timer is due.
    post : callable
        Takes the :class:`~flwr_decentral.core.events.TimerFired` to come.
    """

    def __init__(self, clock: Clock, post: Callable[[Occurrence], None]) -> None:
        self._clock, self._post = clock, post
        self._alarms: dict[str, tuple[int, Alarm]] = {}
        self._tickets = 0

    def set(self, name: str, at: int | None) -> None:
        """Set or move a timer; None cancels it."""
        if name in self._alarms:
            self._alarms.pop(name)[1].cancel()
        if at is not None:
            self._tickets += 1
            ring = partial(self._post, partial(self._fire, name, self._tickets))
            self._alarms[name] = (self._tickets, self._clock.call_at(at, ring))

    def cancel(self) -> None:
        """Cancel all."""
        for _, alarm in self._alarms.values():
            alarm.cancel()
        self._alarms.clear()

    def _fire(self, name: str, ticket: int, at: int) -> Event | None:
        # What was before it in the queue may have moved the timer.
        if name not in self._alarms or self._alarms[name][0] != ticket:
            return None
        del self._alarms[name]
        return TimerFired(at=at, name=name)
