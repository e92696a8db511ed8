"""Two complete algorithms, as small as they can be: for documentation and for tests.

:class:`Gossip` never waits, :class:`Lockstep` always does. Neither comes from a paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from flwr_decentral.core import (
    Algorithm,
    Capabilities,
    Command,
    ConfigurationError,
    Letter,
    Machine,
    Mailbox,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    SetTimer,
    Site,
    Started,
    TimerFired,
    Train,
    TrainDone,
    Vector,
    from_seconds,
)


@dataclass(frozen=True, kw_only=True)
class Gossip(Algorithm):
    """Send the model to every neighbor and average with whatever has arrived."""

    name: ClassVar[str] = "gossip"

    def machine(self, site: Site) -> Machine:
        """Make the machine of one node."""
        return GossipMachine(site)


class GossipMachine(Machine):
    """Keep the newest model of each neighbor until the next average."""

    STATE = ("model", "inbox")

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.inbox = Mailbox()

    def on_started(self, event: Started) -> Iterator[Command]:
        """Begin."""
        yield Train(round=1, model=self.model)

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Send, average, go on."""
        x = self.site.ops.update(self.model, event.before, event.after)
        for peer in sorted(self.up):
            yield Send(to=peer, message=Message(kind="model", step=event.round, payload=x))
        vectors = [x, *(letter.payload for letter in self.inbox.drain())]
        self.model = self.site.ops.combine(vectors, [1 / len(vectors)] * len(vectors))
        yield Train(round=event.round + 1, model=self.model)

    def on_received(self, event: Received) -> Iterator[Command]:
        """Keep a model."""
        message = event.message
        assert message.payload is not None
        useless = self.inbox.put(Letter(event.source, 0, message.step, message.payload))
        if useless is not None:
            yield Report(name="unused-message", nbytes=message.nbytes)


@dataclass(frozen=True, kw_only=True)
class Lockstep(Algorithm):
    """Wait for every neighbor's model of the same round, and average.

    Parameters
    ----------
    patience : float (default: 60.0)
        Seconds after which a node goes on without the neighbors that it has not heard from.
    """

    name: ClassVar[str] = "lockstep"
    capabilities: ClassVar[Capabilities] = Capabilities(synchronous=True)

    patience: float = 60.0

    def __post_init__(self) -> None:
        if not self.patience > 0:
            raise ConfigurationError(f"patience must be positive, got {self.patience} s")

    def machine(self, site: Site) -> Machine:
        """Make the machine of one node."""
        return LockstepMachine(site, from_seconds(self.patience))


class LockstepMachine(Machine):
    """Alternate between training, when ``waiting`` is false, and waiting for neighbors.

    ``inbox`` holds models by (neighbor, step). A neighbor is at most one round ahead, unless this
    node was away: then its next round is the newest one that it has heard of.
    """

    STATE = ("model", "round", "waiting", "inbox")

    def __init__(self, site: Site, patience: int) -> None:
        super().__init__(site)
        self.patience = patience
        self.round = 1
        self.waiting = False
        self.inbox: dict[tuple[int, int], Vector] = {}

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The neighbors whose model is missing, ascending."""
        if not self.waiting:
            return ()
        return tuple(sorted(peer for peer in self.up if self._model_of(peer) is None))

    def on_started(self, event: Started) -> Iterator[Command]:
        """Begin."""
        yield Train(round=self.round, model=self.model)

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Send, and wait for the others."""
        self.model = self.site.ops.update(self.model, event.before, event.after)
        self.waiting = True
        for peer in sorted(self.up):
            yield self._letter_to(peer)
        yield SetTimer(name="patience", at=event.at + self.patience)
        yield from self._go_on()

    def on_received(self, event: Received) -> Iterator[Command]:
        """Keep a model of this round or a later one."""
        message = event.message
        assert message.payload is not None
        key = event.source, message.step
        if message.step < self.round or key in self.inbox:
            yield Report(name="unused-message", nbytes=message.nbytes)
        else:
            self.inbox[key] = message.payload
            yield from self._go_on()

    def on_timer(self, event: TimerFired) -> Iterator[Command]:
        """Lose patience."""
        yield Report(name="lost-patience")
        yield from self._go_on(patient=False)

    def on_peer_up(self, event: PeerUp) -> Iterator[Command]:
        """Send again what the neighbor may have missed."""
        if self.waiting:
            yield self._letter_to(event.peer)

    def on_peer_down(self, event: PeerDown) -> Iterator[Command]:
        """Stop waiting for the neighbor."""
        yield from self._go_on()

    def _letter_to(self, peer: int) -> Send:
        message = Message(kind="model", step=self.round, payload=self.model)
        return Send(to=peer, message=message)

    def _model_of(self, peer: int) -> Vector | None:
        """Find a neighbor's model of this round, or of the next it has sent."""
        steps = [step for sender, step in self.inbox if sender == peer and step >= self.round]
        return self.inbox[peer, min(steps)] if steps else None

    def _go_on(self, *, patient: bool = True) -> Iterator[Command]:
        """Average and train the next round, once nobody is waited for."""
        if not self.waiting or (patient and self.waits_for):
            return
        models = [model for j in self.site.neighbors if (model := self._model_of(j)) is not None]
        weights = [1 / (1 + len(models))] * (1 + len(models))
        self.model = self.site.ops.combine([self.model, *models], weights)
        self.round = max([self.round + 1, *(step for _, step in self.inbox)])
        self.inbox = {key: model for key, model in self.inbox.items() if key[1] >= self.round}
        self.waiting = False
        yield SetTimer(name="patience", at=None)
        yield Train(round=self.round, model=self.model)
