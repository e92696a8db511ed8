"""The hyper-parameters, and the running state of a node."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from flwr_decentral.core import (
    Algorithm,
    Command,
    ConfigurationError,
    DropQueued,
    Letter,
    Machine,
    Mailbox,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    Site,
    Started,
    Stopped,
    Train,
    TrainDone,
    Vector,
    Wire,
    check_wire,
    suggest,
    to_seconds,
)

from .weights import client_weight, complete

_MODEL: Final = "model"
_CHOICES: Final = {
    "influence": ("uniform", "measured"),
    "memory": ("standard", "low"),
    "missing": ("self", "boost"),
}


@dataclass(frozen=True, kw_only=True)
class SWIFT(Algorithm):
    """Average with the newest models of all neighbors, without waiting.

    Parameters
    ----------
    every : int (default: 1)
        s: average in every s-th round only. Models are sent in every round all the same.
    influence : {"uniform", "measured"}
        How often a node ends a round, as its neighbors believe: as often as they, so that all nodes
        count alike, or as often as it says that it does, so that all rounds count alike.
    window : int (default: 16)
        Rounds that a measurement lasts; it holds for the next ones. Without effect on uniform
        influence.
    memory : {"standard", "low"}
        Keep the newest model of each neighbor for all averages, or use each for one average.
    missing : {"self", "boost"}
        Who gets the weight of a neighbor of whom there is no model: the node's own model, or all
        that are there in proportion.
    max_age : int (default: 0)
        Drop the model of a neighbor that has sent no newer one for more than this many rounds of
        this node; 0 keeps it until the neighbor goes down.
    flush : bool (default: True)
        Drop what is still queued when a new model is ready.
    wire : {"float32", "bfloat16", "float16", "int8"}
        The form in which models travel.

    Examples
    --------
    >>> print(SWIFT(every=2))  # doctest: +ELLIPSIS
    swift(every=2, influence='uniform', window=16, memory='standard', missing='self', ...)
    """

    name: ClassVar[str] = "swift"
    paper: ClassVar[str] = "Bornstein et al., ICLR 2023, arXiv:2210.14026"
    default_topology: ClassVar[str] = "ring"

    every: int = 1
    influence: Literal["uniform", "measured"] = "uniform"
    window: int = 16
    memory: Literal["standard", "low"] = "standard"
    missing: Literal["self", "boost"] = "self"
    max_age: int = 0
    flush: bool = True
    wire: Wire = "float32"

    def __post_init__(self) -> None:
        check_wire(self.wire)
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                raise ConfigurationError(
                    f"swift has no {field} {value!r}; {suggest(str(value), choices)}"
                )
        for field, least in {"every": 1, "window": 1, "max_age": 0}.items():
            value = getattr(self, field)
            if value < least:
                raise ConfigurationError(f"{field} must be at least {least}, got {value}")
        if self.memory == "low" and self.max_age:
            raise ConfigurationError(
                f"memory='low' uses each model once, so max_age={self.max_age} has no meaning; "
                "leave it out"
            )

    def machine(self, site: Site) -> SWIFTMachine:
        """Make the machine of one node."""
        return SWIFTMachine(site, self)


class SWIFTMachine(Machine):
    """One node of :class:`SWIFT`.

    Attributes
    ----------
    inbox : Mailbox
        The newest model of each neighbor.
    renewed : dict of int to int
        The round of this node in which that of each neighbor came.
    unused : set of int
        The neighbors whose model has been in no average yet.
    pace : float
        Rounds per second of this node, by its last measurement; 0 if there was none.
    paces : dict of int to float
        What each neighbor has said of itself.
    since : int
        When the current measurement began, in nanoseconds.
    round : int
        The current round.
    """

    STATE = ("model", "inbox", "renewed", "unused", "pace", "paces", "since", "round")

    def __init__(self, site: Site, algorithm: SWIFT) -> None:
        super().__init__(site, algorithm.wire)
        self.algorithm = algorithm
        self.inbox = Mailbox()
        self.renewed: dict[int, int] = {}
        self.unused: set[int] = set()
        self.pace = 0.0
        self.paces: dict[int, float] = {}
        self.since = 0
        self.round = 1

    def on_started(self, event: Started) -> Iterator[Command]:
        """Begin round 1, with the initial model in the place of each neighbor's."""
        self.since = event.at
        if self.algorithm.memory == "standard":
            for peer in event.up:
                self.inbox.put(Letter(peer, 0, 0, self.model))
                self.renewed[peer] = 1
        yield Train(round=self.round, model=self.model)

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Average, add what training did, send the result, and train on."""
        self._measure(event)
        mixed = self.model
        if event.round % self.algorithm.every == 0:
            yield from self._expire(event.round)
            letters = self.inbox.drain() if self.algorithm.memory == "low" else list(self.inbox)
            if letters:
                mixed = self._mix(letters)
                age = sum(event.round - letter.step for letter in letters)
                yield Report(name="staleness", count=len(letters), total=float(age))
                self.unused.clear()
        self.model = self.site.ops.update(mixed, self.model, event.after)
        self.round = event.round + 1
        if self.algorithm.flush:
            yield DropQueued()
        measured = self.algorithm.influence == "measured"
        header = {"pace": self.pace} if measured else {}
        message = Message(
            kind=_MODEL,
            step=event.round,
            payload=self.on_wire(self.model),
            header=header,
            wire=self.wire,
        )
        for peer in sorted(self.up):
            yield Send(to=peer, message=message)
        yield Train(round=self.round, model=self.model)

    def on_received(self, event: Received) -> Iterator[Command]:
        """Keep a model, if none newer is there."""
        source, message = event.source, event.message
        payload, pace = message.payload, message.header.get("pace", 0.0)
        if (
            message.kind != _MODEL
            or payload is None
            or len(payload) != self.site.layout.size
            or not 0 <= pace < math.inf
        ):
            yield Report(name="bad-model", nbytes=message.nbytes)
            return
        letter = Letter(source, 0, message.step, payload, message.wire)
        useless = self.inbox.put(letter)
        if useless is letter or (useless is not None and source in self.unused):
            yield Report(name="superseded", nbytes=letter.nbytes)
        if useless is not letter:
            self.unused.add(source)
            self.renewed[source] = self.round
            self.paces[source] = float(pace)

    def on_peer_up(self, event: PeerUp) -> Iterator[Command]:
        """Take from a returning neighbor, which may have started over, whatever it sends."""
        self.inbox.forget(event.peer)
        return iter(())

    def on_peer_down(self, event: PeerDown) -> Iterator[Command]:
        """Leave the model of a neighbor that is gone out of the averages."""
        yield DropQueued(to=event.peer)
        yield from self._discard("expired", [event.peer])

    def on_stopped(self, event: Stopped) -> Iterator[Command]:
        """Count what came too late to be used."""
        yield from self._discard("unused", sorted(self.unused))

    def _expire(self, round: int) -> Iterator[Report]:
        limit = self.algorithm.max_age
        old = [peer for peer, at in self.renewed.items() if limit and round - at > limit]
        yield from self._discard("expired", sorted(old))

    def _discard(self, name: str, peers: list[int]) -> Iterator[Report]:
        """Take out the models of neighbors; count those that have been of no use."""
        gone = [letter for peer in peers for letter in self.inbox.discard(peer)]
        for peer in peers:
            self.renewed.pop(peer, None)
            self.paces.pop(peer, None)
        wasted = sum(letter.nbytes for letter in gone if letter.sender in self.unused)
        self.unused.difference_update(peers)
        if gone:
            yield Report(name=name, count=len(gone), nbytes=wasted)

    def _measure(self, event: TrainDone) -> None:
        """Find this node's own pace, each time a window is full."""
        window = self.algorithm.window
        if event.round % window == 0 and event.at > self.since:
            self.pace = window / to_seconds(event.at - self.since)
            self.since = event.at

    def _mix(self, letters: list[Letter]) -> Vector:
        vectors = {letter.sender: letter.payload for letter in letters}
        weights = self._weights(set(vectors))
        weights[self.site.node] = 1 - sum(weights.values())
        vectors[self.site.node] = self.model
        order = sorted(vectors)
        return self.site.ops.combine([vectors[j] for j in order], [weights[j] for j in order])

    def _weights(self, heard: set[int]) -> dict[int, float]:
        """Weigh the models of those who were heard."""
        degree = self.site.topology.degree
        own = len(self.site.neighbors)
        weights = {
            peer: client_weight(own, degree[peer], self._influence(peer))
            for peer in self.site.neighbors
        }
        return complete(weights, heard, boost=self.algorithm.missing == "boost")

    def _influence(self, peer: int) -> float:
        """Compare a neighbor's pace with this node's; they are equal as long as one is unknown."""
        pace = self.paces.get(peer, 0.0)
        known = self.algorithm.influence == "measured" and pace and self.pace
        return pace / self.pace if known else 1.0
