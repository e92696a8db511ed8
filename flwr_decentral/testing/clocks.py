"""A clock that goes when it is told to."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class ManualAlarm:
    """A call that is due at some time, on a :class:`ManualClock`."""

    def __init__(self, at: int, callback: Callable[[], object]) -> None:
        self.at, self.callback = at, callback
        self.pending = True

    def cancel(self) -> None:
        """Do not call."""
        self.pending = False


class ManualClock:
    """Keep alarms, and ring them in the order in which they are due.

    Alarms of the same time ring in the order in which they were set. One that is set for the past
    is due at once.

    Attributes
    ----------
    time : int
        What the clock says, in nanoseconds; set it at will.

    Examples
    --------
    >>> clock, rung = ManualClock(), []
    >>> _ = clock.call_at(5, lambda: rung.append("b"))
    >>> _ = clock.call_at(3, lambda: rung.append("a"))
    >>> clock.advance(4), rung
    (1, ['a'])
    >>> clock.now()
    4
    """

    def __init__(self) -> None:
        self.time = 0
        self._heap: list[tuple[int, int, ManualAlarm]] = []
        self._set = 0

    def now(self) -> int:
        """Tell the time."""
        return self.time

    def call_at(self, at: int, callback: Callable[[], object]) -> ManualAlarm:
        """Set an alarm."""
        self._set += 1
        alarm = ManualAlarm(max(at, self.time), callback)
        heapq.heappush(self._heap, (alarm.at, self._set, alarm))
        return alarm

    @property
    def due(self) -> int | None:
        """When the next alarm is due; None if none is set."""
        while self._heap and not self._heap[0][2].pending:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def ring(self) -> bool:
        """Ring the next alarm if it is due; tell whether one was."""
        due = self.due
        if due is None or due > self.time:
            return False
        alarm = heapq.heappop(self._heap)[2]
        alarm.pending = False
        alarm.callback()
        return True

    def advance(self, to: int) -> int:
        """Go on to a time, and ring what is due until then, each at its time.

        Returns
        -------
        int
            How many alarms have rung.
        """
        rung, to = 0, max(to, self.time)
        while (due := self.due) is not None and due <= to:
            self.time = max(self.time, due)
            rung += self.ring()
        self.time = to
        return rung
