"""Machines that train all the time, and average with one neighbor at a time meanwhile.

:class:`PairwiseMachine` is what algorithms of pairwise exchanges have in common. A node trains
round after round and waits for nobody. Next to that it takes *turns*: each starts an exchange by
:mod:`flwr_decentral.core.pairing`. If a node is engaged when its turn comes, the turn follows as
soon as it is free; it is never owed more than one.

Time is counted in local rounds. What a round takes, in nanoseconds, is measured between the ends of
trainings, so it includes what a node has waited for. Until the first one has ended, nothing is
known, and a node takes part in no exchange.

A *rate* is the number of exchanges that a node takes part in per local round. It starts half of
them, so there are 2 / rate rounds between its turns, on average: see :data:`PACINGS`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from .algorithm import Algorithm, Capabilities, Machine, Site
from .commands import Command, Report, SetTimer, Train
from .errors import ConfigurationError, suggest
from .events import PeerDown, PeerUp, Received, Started, Stopped, TimerFired, TrainDone
from .pairing import PATIENCE, Exchange, Pairing
from .wire import Wire, check_wire

PACINGS: Final = ("poisson", "paced")
"""The time between a node's turns: exponential, or uniform between half and one and a half times
its mean. It is random either way, since nodes that start at the same time are all engaged."""

_TURN: Final = "turn"


@dataclass(frozen=True, kw_only=True)
class PairwiseAlgorithm(Algorithm):
    """Hyper-parameters that all algorithms of pairwise exchanges have.

    Parameters
    ----------
    rate : float (default: 1.0)
        Exchanges that a node takes part in per local round, on average.
    pacing : {"poisson", "paced"}
        The time between the turns of a node: exponential, or about the same each time.
    patience : float (default: 4.0)
        How long, in local rounds, a node waits for a message before it goes on without it or asks
        again.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which models travel.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(pairwise=True)

    rate: float = 1.0
    pacing: Literal["poisson", "paced"] = "poisson"
    patience: float = 4.0
    wire: Wire = "float32"

    def __post_init__(self) -> None:
        check_wire(self.wire)
        for field in ("rate", "patience"):
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{field} must be a finite number above 0, got {value}")
        if self.pacing not in PACINGS:
            raise ConfigurationError(
                f"{self.name} has no pacing {self.pacing!r}; {suggest(self.pacing, PACINGS)}"
            )


class PairwiseMachine(Machine):
    """One node of an algorithm of pairwise exchanges.

    A subclass says in :meth:`average` what an exchange does to the model, and may say in
    :meth:`learn` what training does. Where time alone changes the model, it says so in
    :meth:`advance`, and its :meth:`average` and :meth:`learn` take that in as well.

    Attributes
    ----------
    round : int
        The local round under way.
    interval : int
        What a round takes, in nanoseconds: half the last one, a quarter of the one before, and so
        on. 0 until the first has ended.
    pairing : Pairing
        This node's side of its exchanges.
    """

    STATE: ClassVar[tuple[str, ...]] = (
        "model",
        "round",
        "interval",
        "pairing",
        "_began",
        "_due",
        "_turns",
    )

    def __init__(self, site: Site, algorithm: PairwiseAlgorithm) -> None:
        super().__init__(site, algorithm.wire)
        self.algorithm = algorithm
        self.round = 1
        self.interval = 0
        self.pairing = Pairing(site.node, site.seeds.generator("peers"), self.wire)
        self._began = 0
        self._due = False
        self._turns = site.seeds.generator("turns")

    def advance(self, at: int) -> None:
        """Bring the model up to a time, because it is to be sent or shown."""

    def learn(self, event: TrainDone) -> None:
        """Take in a trained vector at ``event.at``; the model may have moved meanwhile."""
        self.model = self.site.ops.update(self.model, event.before, event.after)

    @abstractmethod
    def average(self, exchange: Exchange, at: int) -> None:
        """Do this node's part of an exchange that takes place at a time, in nanoseconds."""

    def on_started(self, event: Started) -> Iterable[Command]:
        """Begin round 1."""
        self._began = event.at
        yield Train(round=self.round, model=self.model)

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Take in the update and train on."""
        first = not self.interval
        self.end_round(event)
        yield Train(round=self.round, model=self.model)
        if first:
            yield self._next_turn(event.at)

    def on_received(self, event: Received) -> Iterator[Command]:
        """Go on with an exchange, whether or not the trainer is at work."""
        vector = self.model
        if self.pairing.concerns(event.message):
            self.advance(event.at)
            # Both ends move by the difference of what was sent, so by what was rounded.
            vector = self.on_wire(self.model)
        commands, exchange = self.pairing.receive(event, vector, step=self.round)
        if exchange is not None:
            self.average(exchange, event.at)
            yield Report(name="staleness", total=float(self.round - exchange.step))
        yield from commands
        yield from self.take_turn(event.at)

    def on_timer(self, event: TimerFired) -> Iterator[Command]:
        """Take a turn, or stop waiting for a message."""
        if event.name == PATIENCE:
            yield from self.pairing.lose_patience(at=event.at, step=self.round)
        else:
            self._due = True
            yield self._next_turn(event.at)
        yield from self.take_turn(event.at)

    def on_peer_up(self, event: PeerUp) -> Iterator[Command]:
        """Finish an exchange that the neighbor's absence has interrupted."""
        yield from self.pairing.meet(event.peer)

    def on_peer_down(self, event: PeerDown) -> Iterator[Command]:
        """Go on without a neighbor."""
        yield from self.pairing.miss(event.peer, at=event.at, step=self.round)
        yield from self.take_turn(event.at)

    def on_stopped(self, event: Stopped) -> Iterator[Command]:
        """Count what was left open, and show the model of now."""
        self.advance(event.at)
        yield from self.pairing.end()

    def end_round(self, event: TrainDone) -> None:
        """Take in what training did, and measure what the round took."""
        self.learn(event)
        self.round = event.round + 1
        took = max(1, event.at - self._began)
        self.interval = (self.interval + took) // 2 if self.interval else took
        self._began = event.at
        self.pairing.patience = max(1, round(self.algorithm.patience * self.interval))

    def take_turn(self, at: int) -> list[Command]:
        """Start an exchange, if one is due and this node is free."""
        if not (self._due and self.pairing.idle):
            return []
        self._due = False
        return self.pairing.begin(self.up, at=at, step=self.round)

    def _next_turn(self, at: int) -> SetTimer:
        poisson = self.algorithm.pacing == "poisson"
        gap = self._turns.exponential() if poisson else self._turns.uniform(0.5, 1.5)
        rounds = gap * 2 / self.algorithm.rate
        return SetTimer(name=_TURN, at=at + max(1, round(rounds * self.interval)))
