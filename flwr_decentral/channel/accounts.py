"""What a node has done, as numbers for the reply that ends a segment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from flwr_decentral.core import Message
from flwr_decentral.core.conduct import Tally


@dataclass
class Accounts:
    """Count what one node does, since it was started.

    Attributes
    ----------
    rounds : int
        The highest round that has been trained, counted over the whole run.
    trained, failed : int
        Trainings that returned a vector, and that did not.
    sent : int
        Bytes that were queued for the uplink, less those that were taken off it again.
    received, dropped, lost : int
        Bytes that came, that never were put on the uplink, and that came and never reached the
        machine.
    active, busy : int
        Nanoseconds in segments, and those of training.
    tallies : dict of str to Tally
        What the machine and the pump have reported.
    """

    rounds: int = 0
    trained: int = 0
    failed: int = 0
    sent: int = 0
    received: int = 0
    dropped: int = 0
    lost: int = 0
    active: int = 0
    busy: int = 0
    tallies: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def take_back(self, messages: Iterable[Message]) -> None:
        """Count messages as dropped that had been queued."""
        nbytes = sum(message.nbytes for message in messages)
        self.sent -= nbytes
        self.dropped += nbytes

    def metrics(self) -> dict[str, int | float]:
        """List everything by name, in kebab case.

        Returns
        -------
        dict of str to int or float
            Rounds, bytes by their fate (headers included), the share of the segments in which the
            node did not train, and for each name that was reported, its count and mean.
        """
        values: dict[str, int | float] = {
            "rounds": self.rounds,
            "trained-rounds": self.trained,
            "failed-rounds": self.failed,
            "bytes-sent": self.sent,
            "bytes-received": self.received,
            "bytes-dropped": self.dropped,
            "bytes-wasted": self.lost + sum(tally.nbytes for tally in self.tallies.values()),
            "idle-share": max(0.0, 1 - self.busy / self.active) if self.active else 0.0,
        }
        for name, tally in sorted(self.tallies.items()):
            values[f"{name}-count"] = tally.count
            if tally.total:
                values[f"{name}-mean"] = tally.total / tally.count
        return values
