"""The running state of a node: in lockstep with its neighbors, or waiting for nobody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flwr_decentral.core import (
    Command,
    DropQueued,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Report,
    Send,
    Site,
    Started,
    Train,
    TrainDone,
    Vector,
    message_bytes,
)
from flwr_decentral.core.lockstep import Letter, LockstepMachine

from .epochs import EpochMachine
from .relay import Key, Parts, Relay, Sums

_FAR_AHEAD = 2
"""Steps that a neighbor has to be ahead for a node to know that it comes late."""


class RelayMachine(EpochMachine, LockstepMachine):
    """One node of :class:`RelaySGD` that waits for its neighbors' sums.

    Attributes
    ----------
    own : tuple of ndarray, optional
        What this node contributes to the messages of this round.
    trained : tuple of ndarray, optional
        What its last training contributed.
    held : dict
        The last sum of each edge, for the messages of this round.
    catching_up : int
        For how many rounds more this node, which has been away, only listens.
    """

    STATE = (
        *EpochMachine.STATE,
        *LockstepMachine.STATE,
        "own",
        "trained",
        "held",
        "catching_up",
    )

    def __init__(
        self, site: Site, relay: Relay, *, replans: bool, overlap: bool, patience: float
    ) -> None:
        super().__init__(site, relay, replans=replans, overlap=overlap, patience=patience)
        self.own: Parts | None = None
        self.trained: Parts | None = None
        self.held: Sums = {}
        self.catching_up = 0

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The neighbors whose sums are still to come; while links settle, all in reach."""
        if self.settling and not self.training:
            return tuple(sorted(self.up))
        return super().waits_for

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Exchange, if that has not begun before training, and settle once all is in."""
        yield from self._remind()
        yield from super().on_train_done(event)

    def on_peer_down(self, event: PeerDown) -> Iterator[Command]:
        """Go on without a neighbor and all nodes behind it."""
        # States of nodes out of reach must not be relayed any longer; updates of theirs must.
        if not self.relay.of_updates:
            for box in (self.held, self.inbox, self.ahead):
                for t in self.relay.slots(event.peer):
                    box.pop((event.peer, t), None)
            if not self.up:
                # Whenever another neighbor comes, what was trained by now may be long outdated.
                self.own = None
        return super().on_peer_down(event)

    def slots(self, peer: int) -> tuple[int, ...]:
        """List the trees in which another node is a neighbor."""
        return self.relay.slots(peer)

    def slot_of(self, message: Message) -> int | None:
        """Tell which tree a message is about."""
        return self.relay.slot_of(message)

    def read(self, source: int, message: Message) -> tuple[int, Letter] | None:
        """Take (tree, sum) out of a message; None if it does not fit."""
        return self.relay.read(source, message)

    def take_in(self, event: TrainDone) -> None:
        """Keep what training contributes."""
        self.trained = self.relay.contribution(self.model, event)
        if not self.overlap:
            self.own = self.trained

    def messages(self, peers: Sequence[int]) -> Iterator[tuple[int, Message]]:
        """Write the sums of the current round to some neighbors."""
        own = None if self.catching_up else self.own
        return self.relay.messages(peers, self.round, own, self.held, self.up)

    def keep(self, key: Key, letter: Letter) -> bool:
        """Keep a sum that is late, if it is newer than the one that is held."""
        newer = self.relay.keeps and (key not in self.held or self.held[key][0] < letter[0])
        if newer:
            self.held[key] = letter
        return newer

    def found_behind(self) -> None:
        """Listen first: what this node knows is old, and its neighbors' average is at hand."""
        # Neighbors on a new tree may be ahead of one that has been in touch with others.
        in_touch = self.links is not None and len(self.up & self.heard.keys()) > 1
        if not self.relay.of_updates and not in_touch:
            # Where this round's messages are out, those of the next are the first to leave out.
            self.catching_up = 2 if self.sent else 1

    def settle(self, letters: dict[Key, Letter]) -> Iterator[Command]:
        """Average what came, or what stands in for it, with what was trained."""
        if not self.relay.keeps:
            self.held = dict(letters)
        for key, letter in letters.items():
            self.held[key] = letter
        yield from self._missed(letters)
        trained = self.trained
        assert trained is not None  # no round ends before its training
        outcome = self.relay.average(
            self.model,
            trained,
            self.held,
            self.up,
            self._reference(),
            counted=not self.catching_up,
        )
        self.model = outcome.model
        if outcome.absent:
            yield Report(name="absent-contribution", count=outcome.absent)
        if self.overlap:
            # What was trained from an old model is not for others either.
            self.own = None if self.catching_up else trained
        self.catching_up = max(self.catching_up - 1, 0)

    def take(self, event: Received) -> Iterable[Command]:
        """Put a message where its step belongs."""
        return LockstepMachine.on_received(self, event)

    def forget(self) -> Iterator[Command]:
        """Drop all sums."""
        letters = [each for box in (self.inbox, self.ahead) for each in box.values() if each]
        if letters:
            nbytes = sum(message_bytes(len(each[-1]), self.wire) for each in letters)
            yield Report(name="stale-message", count=len(letters), nbytes=nbytes)
        self.inbox, self.ahead, self.held = {}, {}, {}

    def tell(self, peers: list[int]) -> Iterator[Command]:
        """Send the sums of this round or, while there are none, say which it is."""
        return self._tell(peers)

    def proceed(self) -> Iterator[Command]:
        """Go on, if all is in."""
        return self._go_on()

    def _tell(self, peers: Iterable[int]) -> Iterator[Command]:
        if self.settling:
            self.owing.update(peers)
        else:
            yield from super()._tell(peers)

    def _hear(self, source: int, step: int) -> Iterator[Command]:
        before = self.round
        yield from super()._hear(source, step)
        if self.round != before and self.changes:
            # Others may wait for a round that this node has left out.
            yield from self._tell(sorted(self.up - {source}))

    def _missed(self, letters: dict[Key, Letter]) -> Iterator[Report]:
        """Count the sums that did not come, and how old those are that stand in for them."""
        edges = [(peer, t) for peer in sorted(self.up) for t in self.slots(peer)]
        lost = [key for key in edges if key not in letters]
        if lost and not (self.overlap and self.round == 1):
            yield Report(name="missing-sum", count=len(lost))
        ages = [self.round - self.held[key][0] for key in lost if key in self.held]
        if ages:
            yield Report(name="staleness", count=len(ages), total=float(sum(ages)))

    def _reference(self) -> Vector:
        """Choose what fills up: the initial model for as long as contributions are on their way."""
        first = not self.changes and self.round < self.relay.eccentricity + self.overlap
        if self.relay.missing == "initial" or (first and self.relay.keeps):
            return self.site.initial
        return self.model


class LatestMachine(EpochMachine):
    """One node of :class:`RelaySGD` that waits for nobody.

    Attributes
    ----------
    round : int
        The round that it trains for.
    own : tuple of ndarray, optional
        What its last training contributed.
    held : dict
        The newest sum of each edge.
    apart : bool
        It has been without neighbors, and has not averaged with any since.
    agreed : set of int
        The neighbors that have sent a sum of this epoch.
    """

    STATE = (*EpochMachine.STATE, "round", "own", "held", "apart", "agreed")

    def __init__(self, site: Site, relay: Relay, *, replans: bool) -> None:
        super().__init__(site, relay, replans=replans)
        self.round = 1
        self.own: Parts | None = None
        self.held: Sums = {}
        self.apart = True
        self.agreed: set[int] = set()

    def on_started(self, event: Started) -> Iterator[Command]:
        """Say how late models are, and begin round 1."""
        yield from super().on_started(event)
        yield Train(round=self.round, model=self.model)

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Send, average with the newest of what came, and train on."""
        trained = self.relay.contribution(self.model, event)
        ahead = max((each[0] for each in self.held.values()), default=0) - event.round
        # A node that comes late has nothing to say yet, and its neighbors' average at hand.
        late = self.apart and ahead >= _FAR_AHEAD
        self.apart = self.apart and not self.held
        self.own = None if late else trained
        yield from self._clear()
        yield from self._remind()
        yield from self._tell(self._in_turn(event.round), event.round)
        ages = [max(event.round - each[0], 0) for each in self.held.values()]
        if ages:
            yield Report(name="staleness", count=len(ages), total=float(sum(ages)))
        first = not self.changes and event.round <= self.relay.eccentricity
        reference = self.site.initial if first else self.model
        outcome = self.relay.average(
            self.model, trained, self.held, self.up, reference, counted=not late
        )
        self.model = outcome.model
        if outcome.absent:
            yield Report(name="absent-contribution", count=outcome.absent)
        self.round = event.round + 1
        yield Train(round=self.round, model=self.model)

    def on_peer_up(self, event: PeerUp) -> Iterator[Command]:
        """Tell a returning neighbor what it has missed."""
        yield from super().on_peer_up(event)
        yield from self.tell([event.peer])

    def on_peer_down(self, event: PeerDown) -> Iterator[Command]:
        """Go on without a neighbor and all nodes behind it."""
        yield DropQueued(to=event.peer)
        self.agreed.discard(event.peer)
        if not self.up:
            self.apart, self.own = True, None
        for t in self.relay.slots(event.peer):
            self.held.pop((event.peer, t), None)
        yield from super().on_peer_down(event)

    def take(self, event: Received) -> Iterator[Command]:
        """Keep a sum, if none newer is held."""
        read = self.relay.read(event.source, event.message)
        if read is None:
            if event.message.payload is not None:
                yield Report(name="bad-message", nbytes=event.message.nbytes)
            return
        t, letter = read
        self.agreed.add(event.source)
        held = self.held.get((event.source, t))
        if held is None or held[0] < letter.step:
            self.held[event.source, t] = letter
        else:
            nbytes = message_bytes(len(letter.content), self.wire)
            yield Report(name="stale-message", nbytes=nbytes)

    def forget(self) -> Iterator[Command]:
        """Drop all sums."""
        self.held, self.agreed = {}, set()
        yield from ()

    def tell(self, peers: list[int]) -> Iterator[Command]:
        """Send the sums of the last training again."""
        if self.own is not None:
            yield from self._tell(peers, self.round - 1)

    def proceed(self) -> Iterator[Command]:
        """Wait for nobody."""
        yield from ()

    def _in_turn(self, round: int) -> list[int]:
        """List the neighbors in reach, each round from another one on.

        Where the uplink takes only some of the sums of a round, it is not always the same ones.
        """
        peers = sorted(peer for peer in self.up if self.relay.slots(peer))
        first = round % len(peers) if peers else 0
        return peers[first:] + peers[:first]

    def _clear(self) -> Iterator[Command]:
        """Drop what has not been sent and is outdated."""
        if self.links is None or not self.links.claims:
            yield DropQueued()
        elif not self.settling:
            # What is said of links must get out, to whom it may be news.
            for peer in sorted(self.up & self.agreed):
                yield DropQueued(to=peer)

    def _hold(self, at: int) -> Iterator[Command]:
        if not self.settling:
            # The news come first: sums are sent again after that.
            for peer in sorted(self.agreed):
                yield DropQueued(to=peer)
            self.owing |= self.agreed
        yield from super()._hold(at)

    def _tell(self, peers: Sequence[int], step: int) -> Iterator[Send]:
        if self.settling:
            self.owing.update(peers)
            return
        for peer, message in self.relay.messages(peers, step, self.own, self.held, self.up):
            if message.payload is not None:
                yield Send(to=peer, message=message)
