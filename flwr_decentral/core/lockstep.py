"""Lockstep: machines that take a step together with their neighbors.

A message belongs to the round that its ``step`` names, whenever it arrives. After its own training
of a round, a node waits for the messages of that round from each neighbor that can be reached, and
then goes on to the next. The rules, all of which say when *not* to wait:

======================  ========================================================================
a neighbor goes down    nothing more comes from it
a later step of it      what it sent for this round is lost: nobody sends a round after the next
an unusable message     it will not come again
patience ends           both directions of a link lost a message at once, or the other is stuck
======================  ========================================================================

A node that hears of a step of two or more ahead has been away. It adopts that step: at once if its
own messages of the round are not out yet, else after this round. The others need not wait until it
has caught up, the rounds between are not made up for, and all nodes that can reach one another move
to the highest step among them. A neighbor that returns is sent the messages of the current round
again or, while there are none, a *notice*: a message that only names the round. A node that has
nothing to say in a round says so.

What is exchanged, and what is made of it, is up to the subclass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final, TypeAlias

from .algorithm import Machine, Site
from .clock import from_seconds
from .commands import Command, Report, Send, SetTimer, Train
from .events import PeerDown, PeerUp, Received, Started, TimerFired, TrainDone
from .message import Message, message_bytes
from .wire import Wire

NOTICE: Final = "step"
"""The kind of a message that only says which step its sender is at."""

NOTHING: Final = "nothing"
"""The kind of a message that takes the place of one: its sender has nothing to say this round."""

PATIENCE: Final = "patience"
"""The name of the timer that ends a wait."""

Letter: TypeAlias = tuple[Any, ...]
"""What a subclass has read from a message; the payload comes last."""

Box: TypeAlias = dict[tuple[int, int], Letter | None]
"""Letters of one step by (sender, slot); None where what came was of no use."""


class LockstepMachine(Machine):
    """A machine that goes from round to round together with its neighbors.

    A subclass says what a trained vector means (:meth:`take_in`), what a neighbor is sent in a
    round (:meth:`messages`), what a message holds (:meth:`read`) and what becomes of a round's
    letters (:meth:`settle`). One that sends several messages a round to a neighbor gives each a
    slot (:meth:`slots`). It adds its own attributes to ``STATE``.

    Parameters
    ----------
    site : Site
        Where it runs.
    overlap : bool
        Send before training, so that the exchange runs while the node trains; else after it.
    patience : float
        How long to wait after the node's own training, in seconds.

    Attributes
    ----------
    round : int
        The step of the current exchange or, before it, of the training that leads to it.
    following : int
        The step of the next one: ``round + 1``, or the highest step heard of.
    training : bool
        The trainer is at work.
    inbox, ahead : dict
        What came for ``round`` and for ``following``.
    heard : dict of int to int
        The highest step heard of from each neighbor.
    """

    BAD: ClassVar[str] = "bad-message"
    """How a message is counted that does not fit."""

    STATE: ClassVar[tuple[str, ...]] = (
        *Machine.STATE,
        "round",
        "following",
        "training",
        "inbox",
        "ahead",
        "heard",
    )

    def __init__(
        self, site: Site, *, overlap: bool, patience: float, wire: Wire = "float32"
    ) -> None:
        super().__init__(site, wire)
        self.overlap, self.patience = overlap, patience
        self.round, self.following = 1, 2
        self.training = True
        self.inbox: Box = {}
        self.ahead: Box = {}
        self.heard: dict[int, int] = {}

    # What a subclass decides.

    @abstractmethod
    def take_in(self, event: TrainDone) -> None:
        """Keep what training returned."""

    @abstractmethod
    def messages(self, peers: Sequence[int]) -> Iterator[tuple[int, Message]]:
        """Write the messages of the current round to some neighbors, one for each slot.

        Yields (neighbor, message).
        """

    @abstractmethod
    def read(self, source: int, message: Message) -> tuple[int, Letter] | None:
        """Take (slot, letter) out of a message; None if it does not fit."""

    @abstractmethod
    def settle(self, letters: dict[tuple[int, int], Letter]) -> Iterator[Command]:
        """End a round: make the next model of what was trained and of what came.

        Parameters
        ----------
        letters : dict
            The letters of this round by (sender, slot), ascending.
        """

    def slots(self, peer: int) -> tuple[int, ...]:
        """List what a neighbor sends each round; nothing if it is not waited for."""
        del peer
        return (0,)

    def slot_of(self, message: Message) -> int | None:
        """Tell which slot a message takes that holds nothing usable; None if that is unclear."""
        del message
        return None

    def keep(self, key: tuple[int, int], letter: Letter) -> bool:
        """Make use of a letter for whose round it is too late; tell whether there is any."""
        del key, letter
        return False

    def found_behind(self) -> None:
        """Learn that a neighbor's first word names a step far ahead: this node has been away."""

    # Who waits for whom.

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The neighbors in reach whose messages of this round are still to come."""
        if self.training:
            return ()
        return tuple(
            peer
            for peer in sorted(self.up)
            if self.heard.get(peer, 0) <= self.round
            and any((peer, slot) not in self.inbox for slot in self.slots(peer))
        )

    @property
    def sent(self) -> bool:
        """Whether this round's messages are out."""
        return self.overlap or not self.training

    def on_started(self, event: Started) -> Iterable[Command]:
        """Begin round 1."""
        return self._begin()

    def on_train_done(self, event: TrainDone) -> Iterator[Command]:
        """Exchange, if that has not begun before training, and settle once all is in."""
        self.training = False
        self.take_in(event)
        if not self.overlap:
            yield from self._tell(sorted(self.up))
        if self.waits_for:
            yield SetTimer(name=PATIENCE, at=event.at + from_seconds(self.patience))
        else:
            yield from self._finish()

    def on_received(self, event: Received) -> Iterator[Command]:
        """Put a message where its step belongs."""
        source, message = event.source, event.message
        if message.kind == NOTICE:
            yield from self._hear(source, message.step)
        elif message.kind == NOTHING:
            yield from self._miss(event)
        elif (read := self.read(source, message)) is not None:
            yield from self._hear(source, message.step)
            yield from self._file(source, message, *read)
        else:
            yield Report(name=self.BAD, nbytes=message.nbytes)
            yield from self._miss(event)
        yield from self._go_on()

    def on_rejected(self, event: Received) -> Iterator[Command]:
        """Do not wait for what a neighbor has sent in vain."""
        yield from self._miss(event)
        yield from self._go_on()

    def on_timer(self, event: TimerFired) -> Iterator[Command]:
        """Lose patience."""
        if not self.training:
            yield from self._finish()

    def on_peer_up(self, event: PeerUp) -> Iterator[Command]:
        """Tell a returning neighbor, which may have started over, where this node is."""
        self.heard.pop(event.peer, None)
        yield from self._tell([event.peer])

    def on_peer_down(self, event: PeerDown) -> Iterator[Command]:
        """Go on without a neighbor."""
        return self._go_on()

    def _begin(self) -> Iterator[Command]:
        self.training = True
        if self.overlap:
            yield from self._tell(sorted(self.up))
        yield Train(round=self.round, model=self.model)

    def _tell(self, peers: Iterable[int]) -> Iterator[Command]:
        """Send the messages of this round or, while there are none, a notice."""
        peers = [peer for peer in peers if self.slots(peer)]
        notice = Message(kind=NOTICE, step=self.round)
        for peer, message in (
            self.messages(peers) if self.sent else ((peer, notice) for peer in peers)
        ):
            yield Send(to=peer, message=message)

    def _hear(self, source: int, step: int) -> Iterator[Command]:
        """Note the step that a neighbor is at, and adopt one that is far ahead."""
        first = source not in self.heard
        self.heard[source] = max(step, self.heard.get(source, 0))
        if step > self.following:
            if first:
                self.found_behind()
            yield from self._discard(self.ahead)
            self.following, self.ahead = step, {}
        if not self.sent and self.following > self.round + 1:
            yield from self._advance()

    def _file(self, source: int, message: Message, slot: int, letter: Letter) -> Iterator[Command]:
        key, box = (source, slot), self._box(message.step)
        if box is None and not self.keep(key, letter):
            yield Report(name="stale-message", nbytes=message.nbytes)
        elif box is not None and key in box:
            yield Report(name="duplicate-message", nbytes=message.nbytes)
        elif box is not None:
            box[key] = letter

    def _miss(self, event: Received) -> Iterator[Command]:
        """Note that a message has come and that nothing in it is of use."""
        source, message = event.source, event.message
        yield from self._hear(source, message.step)
        box, slot = self._box(message.step), self.slot_of(message)
        for each in self.slots(source) if slot is None else (slot,):
            if box is not None:
                box.setdefault((source, each), None)

    def _box(self, step: int) -> Box | None:
        return {self.round: self.inbox, self.following: self.ahead}.get(step)

    def _advance(self) -> Iterator[Command]:
        yield from self._discard(self.inbox)
        first = self.round + 1 if self.sent else self.round
        if self.following > first:
            yield Report(name="skipped-round", count=self.following - first)
        self.round, self.following = self.following, self.following + 1
        self.inbox, self.ahead = self.ahead, {}

    def _discard(self, box: Box) -> Iterator[Command]:
        """Count what came for a round that does not take place, and is of no other use."""
        letters = [
            letter
            for key, letter in box.items()
            if letter is not None and not self.keep(key, letter)
        ]
        if letters:
            nbytes = sum(message_bytes(len(letter[-1]), self.wire) for letter in letters)
            yield Report(name="stale-message", count=len(letters), nbytes=nbytes)

    def _go_on(self) -> Iterator[Command]:
        if not self.training and not self.waits_for:
            yield SetTimer(name=PATIENCE, at=None)
            yield from self._finish()

    def _finish(self) -> Iterator[Command]:
        """Settle the round and begin the next."""
        letters = {key: self.inbox[key] for key in sorted(self.inbox)}
        self.inbox = {}
        yield from self.settle({key: each for key, each in letters.items() if each is not None})
        yield from self._advance()
        yield from self._begin()
