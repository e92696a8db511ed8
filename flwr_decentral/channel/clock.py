"""Real time: integer nanoseconds since the start of a run, on a clock that never goes back.

Nobody compares the clocks of two hosts. A run's time starts at 0 on each node by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from flwr_decentral.core import to_seconds


class Alarm(Protocol):
    """A call that is due at some time."""

    def cancel(self) -> None:
        """Do not call; nothing happens if it has been called."""


class Clock(Protocol):
    """Tells the time, and calls when it has come."""

    def now(self) -> int:
        """Tell the time, in nanoseconds since the start of the run."""

    def call_at(self, at: int, callback: Callable[[], object]) -> Alarm:
        """Call back once, at a time or soon after it, never before, and never from within here."""


class LoopClock:
    """The monotonic clock, with the alarms of an asyncio event loop.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
        Who calls back.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._start = time.monotonic_ns()

    def now(self) -> int:
        """Tell the time, in nanoseconds since this clock was made."""
        return time.monotonic_ns() - self._start

    def call_at(self, at: int, callback: Callable[[], object]) -> Alarm:
        """Call back from the event loop."""
        return _LoopAlarm(self._loop, self, at, callback)


class _LoopAlarm:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: LoopClock,
        at: int,
        callback: Callable[[], object],
    ) -> None:
        self._loop, self._clock = loop, clock
        self._at, self._callback = at, callback
        self._arm()

    def cancel(self) -> None:
        self._handle.cancel()

    def _arm(self) -> None:
        delay = to_seconds(max(self._at - self._clock.now(), 0))
        self._handle = self._loop.call_later(delay, self._ring)

    def _ring(self) -> None:
        # A loop's clock has a resolution, within which it calls too early.
        if self._clock.now() < self._at:
            self._arm()
        else:
            self._callback()
