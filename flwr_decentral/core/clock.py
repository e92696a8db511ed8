"""Time is an argument: integer nanoseconds since the start of the run.

Algorithms never read a clock. Every event carries ``at``, and a machine that wants to be woken asks
for a point in time with :class:`~flwr_decentral.core.commands.SetTimer`. Integers keep virtual time
exact: no sum of delays depends on the order in which it was added up.
"""

from __future__ import annotations

from typing import Final

NANOSECOND: Final = 1
MICROSECOND: Final = 1_000
MILLISECOND: Final = 1_000_000
SECOND: Final = 1_000_000_000


def from_seconds(seconds: float) -> int:
    """Round a number of seconds to integer nanoseconds.

    Parameters
    ----------
    seconds : float
        A finite duration in seconds, zero or more.

    Returns
    -------
    int
        Nanoseconds, rounded to the nearest.

    Raises
    ------
    ValueError
        If ``seconds`` is negative or not finite.

    Examples
    --------
    >>> from_seconds(1.5)
    1500000000
    """
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"a duration must be finite and not negative, got {seconds!r} s")
    return round(seconds * SECOND)


def to_seconds(nanoseconds: int) -> float:
    """Convert integer nanoseconds to seconds, for people and reports.

    Examples
    --------
    >>> to_seconds(1_500_000_000)
    1.5
    """
    return nanoseconds / SECOND
