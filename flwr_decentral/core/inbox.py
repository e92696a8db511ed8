"""Machines that wait for nobody: what has come since the last average goes into the next one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from .algorithm import Machine, Site, Topology
from .commands import Command, DropQueued, Report
from .events import PeerDown, PeerUp, Stopped, TrainDone
from .mailbox import Letter, Mailbox
from .wire import Wire


def check_degree(degree: int, topology: Topology, what: str) -> tuple[str, ...]:
    """Warn where a node has fewer neighbors than it is to send ``what`` to."""
    fewest = min((neighbors for _, neighbors in topology.degree), default=0)
    if not 0 < fewest < degree:
        return ()
    return (
        f"degree {degree} is more than some node has neighbors, {fewest}: it sends {what} to all "
        "of those. Take a denser topology, or a smaller degree",
    )


class InboxMachine(Machine):
    """Keep the newest letter of each sender until the next average, and use each once.

    A peer that returns may have started over, so whatever it sends is new. One that goes away is
    sent nothing more; what it has sent stays. What comes too late to be used is counted.

    Attributes
    ----------
    inbox : Mailbox
        The newest unused letter of each sender.
    """

    STATE: ClassVar[tuple[str, ...]] = ("model", "inbox")

    def __init__(self, site: Site, wire: Wire = "float32") -> None:
        super().__init__(site, wire)
        self.inbox = Mailbox()

    def keep(self, letter: Letter) -> Iterator[Report]:
        """Put a letter into the inbox, if none newer is there; count the one that is of no use."""
        useless = self.inbox.put(letter)
        if useless is not None:
            yield Report(name="superseded", nbytes=useless.nbytes)

    def average_models(self, event: TrainDone) -> Iterator[Report]:
        """Let the model be the plain average of the trained one and all in the inbox."""
        letters = self.inbox.drain()
        self.model = event.after
        if letters:
            models = [event.after, *(letter.payload for letter in letters)]
            self.model = self.site.ops.combine(models, [1 / len(models)] * len(models))
            age = sum(event.round - letter.step for letter in letters)
            yield Report(name="staleness", count=len(letters), total=float(age))

    def on_peer_up(self, event: PeerUp) -> Iterable[Command]:
        """Take from a returning peer whatever it sends."""
        self.inbox.forget(event.peer)
        return ()

    def on_peer_down(self, event: PeerDown) -> Iterator[Command]:
        """Send a peer that is gone nothing more."""
        yield DropQueued(to=event.peer)

    def on_stopped(self, event: Stopped) -> Iterator[Command]:
        """Count what came too late to be used."""
        late = self.inbox.drain()
        if late:
            nbytes = sum(letter.nbytes for letter in late)
            yield Report(name="unused", count=len(late), nbytes=nbytes)
